"""Three daemons as one: sums of their metrics, and rows for daemons that do not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pensieve.client.fleet import Fleet, Replica, ReplicaAnswer, exposition, fleet
from pensieve.client.fleet.holdings import KnownBy, ServingReplica, held_of, holds_kv, owner_of
from pensieve.client.fleet.totals import tenants_of, total_of
from pensieve.conversations.daemon_config import DaemonConfig
from pensieve.errors import DeadlineExceeded, InvalidArgument, NotFound, Unavailable
from pensieve.v1 import admin_pb2 as pb
from tests.client.fleet.replicas_rig import (
    HANG_SECONDS,
    HISTORY,
    SHORT,
    Replicas,
    replica_at,
    replicas_in,
    run_with_fleet,
)
from tests.conversations.rig_daemon import DaemonRig


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    with replicas_in(tmp_path_factory.mktemp("replicas")) as found:
        yield found


def single(world: Replicas) -> list[Any]:
    """Return each daemon's answer to a direct call."""
    return [rig.admin.GetStats(pb.GetStatsRequest()).stats for rig in world.rigs.values()]


def values(found: Sequence[ReplicaAnswer[Any]]) -> list[Any]:
    return [answer.value for answer in found]


def test_totals_are_the_sums_of_the_replicas_stats(world: Replicas) -> None:
    found = run_with_fleet(world.alive, Fleet.stats)
    assert [answer.value.replica for answer in found if answer.value] == ["a", "b", "c"]
    total, alone = total_of(values(found)), single(world)
    for name in ("conversations_cached", "new_tokens", "output_tokens", "device_tokens"):
        assert total[name] == sum(getattr(each, name) for each in alone), name
    assert (total["conversations_cached"], total["output_tokens"]) == (4, 20)
    assert total["num_serving"] == 3
    assert total["device"]["tokens"] == 3 * 4096 * 32
    assert total["device"]["tokens_used"] == 4 * 32
    assert total["first_token"]["count"] == 4
    assert total["token_gap"]["count"] == 16
    assert total["service"]["commits"] == sum(each.service.commits for each in alone)
    assert total["more"]["iteration_tokens.sum"] == total["more"]["tokens_computed"]
    assert total["more"]["turns_length"] == 4
    assert total["tokens_per_iteration"] == total["more"]["tokens_computed"] / total["iterations"]


def test_totals_omit_figures_that_cannot_be_added(world: Replicas) -> None:
    found = values(run_with_fleet(world.alive, Fleet.stats))
    names = {name for each in found for name in each.more}
    left_out = names - total_of(found)["more"].keys()
    assert left_out == {
        *("seconds", "token_budget_used", "iteration_error_p50", "iteration_error_p90"),
        *("tbt_p50_seconds", "tbt_p99_seconds", "ttft_p50_seconds", "ttft_p99_seconds"),
        *("suspended_p50_seconds", "suspended_p99_seconds"),
    }


def test_a_shared_history_counts_once(world: Replicas) -> None:
    found = values(run_with_fleet(world.alive, Fleet.stats))
    assert [each.conversations_stored for each in found] == [2, 2, 0]
    assert total_of(found)["conversations_stored"] == 2
    for each in found:
        each.history = ""
    assert total_of(found)["conversations_stored"] == 4


def test_replicas_that_do_not_answer_are_listed_with_the_reason(
    world: Replicas,
) -> None:
    found = run_with_fleet(world.all, Fleet.stats, HANG_SECONDS)
    assert [answer.replica.name for answer in found] == ["a", "b", "c", "dead", "hanging"]
    assert [answer.value is not None for answer in found] == [True, True, True, False, False]
    dead, hanging = found[3:]
    assert isinstance(dead.error, Unavailable)
    assert dead.reason == f"nothing listens at {world.dead.address}"
    assert isinstance(hanging.error, DeadlineExceeded)
    assert hanging.reason == "no answer in 1 s"


def test_explain_shows_kv_on_two_replicas(world: Replicas) -> None:
    found = run_with_fleet(world.alive, Fleet.cached)
    held = held_of(found, False, 20)
    rows = {(each.replica, each.conversation.conversation_id): each.also_on for each in held}
    assert rows == {("a", "x"): ("b",), ("a", "y"): (), ("b", "x"): ("a",), ("b", "z"): ()}
    tokens = [each.conversation.device_tokens for each in held]
    assert tokens == sorted(tokens, reverse=True)
    least = held_of(run_with_fleet(world.alive, lambda several: several.cached(True)), True, 3)
    worth = [each.conversation.retention_value for each in least]
    assert len(least) == 3
    assert worth == sorted(worth)


def test_explain_finds_the_serving_replica_and_replicas_with_stale_kv(world: Replicas) -> None:
    found = run_with_fleet(world.alive, lambda several: several.explain("x"))
    assert [value is not None and holds_kv(value) for value in values(found)] == [True, True, False]
    assert isinstance(found[2].error, NotFound)
    assert owner_of(found) == ServingReplica("b", KnownBy.LATEST)
    assert owner_of(
        run_with_fleet(world.alive, lambda several: several.explain("z"))
    ) == ServingReplica("b", KnownBy.ONLY)
    nobody = run_with_fleet(world.alive, lambda several: several.explain("nobody"))
    assert owner_of(nobody) is None
    assert all(isinstance(each.error, NotFound) for each in nobody)
    with pytest.raises(InvalidArgument):
        run_with_fleet(world.alive, lambda several: several.explain(3))  # type: ignore[arg-type]


def test_the_replica_that_runs_a_turn_serves_the_conversation() -> None:
    def answer(name: str, **fields: Any) -> ReplicaAnswer[pb.ExplainConversationResponse]:
        value = pb.ExplainConversationResponse(history=HISTORY, **fields)
        value.runs.add(num_chunks=1, place="host")
        return ReplicaAnswer(Replica(name, f"{name}:1"), value)

    gone = ReplicaAnswer[pb.ExplainConversationResponse](
        Replica("c", "c:1"), error=Unavailable("out of reach")
    )
    older, newer = answer("a", idle_seconds=9.0), answer("b", idle_seconds=2.0)
    assert owner_of([older, newer, gone]) == ServingReplica("b", KnownBy.LATEST)
    assert owner_of([answer("a", running=True), newer]) == ServingReplica("a", KnownBy.RUNNING)
    answers = answer("a", owner="one"), answer("b", owner="one", owned=True)
    assert owner_of([*answers, gone]) == ServingReplica("b", KnownBy.HISTORY)
    assert owner_of([answers[0], gone]) == ServingReplica("one", KnownBy.HISTORY)
    assert owner_of([answer("a", running=True), answer("b", running=True)]) is None
    # An unreachable replica may know the conversation, too. So "a" is the latest, and not the only one.
    assert owner_of([older, gone]) == ServingReplica("a", KnownBy.LATEST)
    older.value.history = newer.value.history = ""  # type: ignore[union-attr]
    assert owner_of([older, newer]) is None


def test_tenants_and_checks_cover_all_replicas(world: Replicas) -> None:
    found = run_with_fleet(world.alive, Fleet.tenants)
    (whole,) = tenants_of(values(found))
    stored = [tenant.stored_bytes for each in values(found) for tenant in each.tenants]
    assert len(stored) == 2  # `c` has no tenants, because no client has called it
    assert (whole["name"], whole["turns"]) == ("", 0)
    assert whole["stored_bytes"] == max(stored) > 0
    checked = run_with_fleet(world.all, Fleet.check, HANG_SECONDS)
    assert values(checked) == [[], [], [], None, None]


def test_merged_metrics_have_a_replica_label_on_every_sample(world: Replicas) -> None:
    found = run_with_fleet(world.all, Fleet.metrics, HANG_SECONDS)
    text = exposition.merged((answer.replica, answer.value) for answer in found)
    families = {each.name: each for each in text_string_to_metric_families(text)}
    up = {each.labels["replica"]: each.value for each in families["pensieve_replica_up"].samples}
    assert up == {"a": 1, "b": 1, "c": 1, "dead": 0, "hanging": 0}
    tokens = families["pensieve_generation_tokens"].samples
    assert {each.labels["replica"]: each.value for each in tokens} == {"a": 10, "b": 10, "c": 0}
    assert all(
        each.labels["replica"] in up and "exported_replica" not in each.labels
        for family in families.values()
        for each in family.samples
    )
    heads = [line for line in text.split("\n") if line.startswith("# TYPE ")]
    assert len(heads) == len(set(heads)) == len({line.split(" ")[2] for line in heads})


def test_unreadable_metrics_of_one_replica_do_not_affect_the_others(
    world: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = world.rigs["b"].server.admin._metrics

    async def broken() -> str:
        return (await real()) + 'x{y="z\n'

    monkeypatch.setattr(world.rigs["b"].server.admin, "_metrics", broken)
    found = run_with_fleet(world.alive, Fleet.metrics)
    assert [answer.value is not None for answer in found] == [True, False, True]
    assert "the replica's metrics cannot be read: line " in found[1].reason
    text = exposition.merged((answer.replica, answer.value) for answer in found)
    assert 'pensieve_replica_up{replica="b"} 0' in text
    assert 'pensieve_engine_up{replica="c"' in text


class Changing:
    """A discovery whose replicas the test sets. None: the discovery is unreachable."""

    def __init__(self, *replicas: Replica) -> None:
        self.replicas: tuple[Replica, ...] | None = replicas

    async def list_replicas(self) -> Sequence[Replica]:
        if self.replicas is None:
            raise Unavailable("the history is out of reach")
        return self.replicas


def test_a_watch_shows_replicas_that_stop_return_or_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: Replicas
) -> None:
    monkeypatch.setattr(fleet, "LIST_SECONDS", 0.0)
    monkeypatch.setattr(fleet, "RESTART_SECONDS", 0.05)
    here = replica_at("here", tmp_path / "here")

    def daemon() -> DaemonRig:
        return DaemonRig(tmp_path / "here", config=DaemonConfig(grace_seconds=0.2))

    async def watch() -> list[str]:
        seen = []
        discovery = Changing(here, world.hanging)
        rig = await asyncio.to_thread(daemon().__enter__)

        async def until(snapshots: Any, state: dict[str, bool]) -> None:
            async with asyncio.timeout(60):
                async for found in snapshots:
                    if {each.replica.name: each.value is not None for each in found} == state:
                        return

        async with (
            Fleet(discovery, seconds=HANG_SECONDS) as all_of_them,
            aclosing(all_of_them.watch(0.1)) as snapshots,
        ):
            await until(snapshots, {"here": True, "hanging": False})
            seen.append("one of two")
            await asyncio.to_thread(rig.__exit__, None, None, None)
            await until(snapshots, {"here": False, "hanging": False})
            seen.append("ended")
            rig = await asyncio.to_thread(daemon().__enter__)
            await until(snapshots, {"here": True, "hanging": False})
            seen.append("back")
            discovery.replicas = None
            await until(snapshots, {"here": True, "hanging": False})
            seen.append("as before")
            discovery.replicas = (here, world.alive[0])
            await until(snapshots, {"here": True, "a": True})
            seen.append("another")
        await asyncio.to_thread(rig.__exit__, None, None, None)
        return seen

    assert asyncio.run(watch()) == ["one of two", "ended", "back", "as before", "another"]


def test_explain_reports_idle_time_and_kv_of_a_conversation(tmp_path: Path) -> None:
    with DaemonRig(tmp_path / "d") as rig:
        request = pb.ExplainConversationRequest(conversation_id="x")
        rig.ask("x", "one", sampling=SHORT)
        answer = rig.admin.ExplainConversation(request)
        assert answer.HasField("idle_seconds")
        assert not answer.running
        rig.admin.EvictConversation(pb.EvictConversationRequest(conversation_id="x"))
        assert not holds_kv(rig.admin.ExplainConversation(request))
