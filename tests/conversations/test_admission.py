"""Admission of turns: it depends on the present queue, and a turn is never refused because of itself."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from pensieve.conversations.admission import Admission, DaemonLoad, WorkAhead
from pensieve.conversations.daemon_config import DaemonConfig
from pensieve.conversations.draft import TurnRequest
from pensieve.conversations.live_turn import LiveTurn, ReplyTokens
from pensieve.core.turn import TurnOptions
from pensieve.errors import DeadlineExceeded, InvalidArgument, QueueFull
from pensieve.guard.limits import Limits
from pensieve.sampling import Sampling
from pensieve.text import Message
from pensieve.v1 import conversation_pb2 as pb
from tests.conversations.rig_daemon import (
    ECHO,
    DaemonRig,
    blocked_store,
    details,
    read_turn,
    stopped_engine,
    wait_for,
)

LONG = pb.Sampling(max_tokens=60, ignore_eos=True)  # takes 0.3 s, at 5 ms a token


def load(num_waiting: int = 0, waiting_since: float | None = None) -> DaemonLoad:
    return DaemonLoad(
        False, True, num_waiting, num_waiting, lambda: WorkAhead(num_waiting), waiting_since
    )


def load_with_prompts(seconds: float) -> DaemonLoad:
    """Return a load with prompts of `seconds` predicted seconds ahead. The engine has room for them."""
    return DaemonLoad(False, True, 1, 1, lambda: WorkAhead(0, seconds))


# -- the estimate --


def test_the_predicted_wait_is_zero_while_no_turn_waits() -> None:
    admission = Admission(10, {}, now=0.0)
    for second in range(20, 120, 5):
        admission.turn_admitted(0.0, float(second))
    assert admission.refusal("", load(3, 118.0), 8.0, 120.0) is not None
    assert admission.refusal("", load(), 0.001, 120.0) is None
    assert admission.wait_seconds(load(), 120.0) == 0.0


def test_the_predicted_wait_counts_only_waiting_turns() -> None:
    admission = Admission(10, {}, now=0.0)
    for tenth in range(1, 200):
        admission.turn_admitted(0.0, tenth / 10)  # ten turns a second
    for num_waiting in (1, 5, 50):
        wait = admission.wait_seconds(load(num_waiting, 0.0), 19.9)
        assert wait == pytest.approx(num_waiting / 10)
    refusal = admission.refusal("", load(9, 0.0), 0.8, 19.9)
    assert isinstance(refusal, DeadlineExceeded)
    assert "turns wait 0.9 s now" in str(refusal)
    assert admission.refusal("", load(9, 0.0), 1.0, 19.9) is None


def test_the_predicted_wait_grows_while_the_engine_admits_no_turn() -> None:
    admission = Admission(10, {}, now=0.0)
    admission.turn_admitted(1.0, 1.0)
    assert admission.wait_seconds(load(1, 50.0), 50.0) == 0.0
    assert admission.wait_seconds(load(1, 50.0), 80.0) == 30.0


def test_idle_time_does_not_increase_the_predicted_wait() -> None:
    admission = Admission(10, {}, now=0.0)
    for hour in range(1, 10):
        admission.turn_admitted(3600.0 * hour - 0.2, 3600.0 * hour)
    assert admission.wait_seconds(load(1, 36_000.0), 36_000.0) <= 0.2


def prompt(seconds: float) -> LiveTurn:
    return LiveTurn(1, "c", 0, 0, prompt_seconds=seconds)


def paced(seconds_per_predicted: float, **settings: float) -> Admission:
    """Return the admission of an engine that has computed one prompt, predicted to take two seconds."""
    admission = Admission(10, {}, now=0.0, **settings)
    admission.prompts.pace.begun(0.0, is_only=True)
    admission.prompts.ended(prompt(2.0), 2.0 * seconds_per_predicted)
    return admission


def test_the_wait_for_prompts_ahead_is_scaled_by_the_measured_pace() -> None:
    assert Admission(10, {}, now=0.0).wait_seconds(load_with_prompts(100.0), 0.0) == 0.0, (
        "no prompt has been measured"
    )
    admission = paced(1.5)
    assert admission.wait_seconds(load_with_prompts(4.0), 3.0) == pytest.approx(6.0)
    assert admission.wait_seconds(load_with_prompts(0.0), 3.0) == 0.0
    refusal = admission.refusal("", load_with_prompts(4.0), 5.0, 3.0)
    assert isinstance(refusal, DeadlineExceeded)
    assert refusal.retry_after_seconds == pytest.approx(1.0)
    assert admission.refusal("", load_with_prompts(4.0), 6.5, 3.0) is None
    admission.engine_lost()
    assert admission.wait_seconds(load_with_prompts(4.0), 3.0) == 0.0


def test_a_turn_beyond_the_ttft_objective_is_refused_with_a_retry_time() -> None:
    admission = paced(1.5, ttft_seconds=2.0)
    assert admission.refusal("", load_with_prompts(1.3), None, 3.0) is None
    refusal = admission.refusal("", load_with_prompts(4.0), 60.0, 3.0)
    assert isinstance(refusal, QueueFull)
    assert refusal.limit == ""
    assert refusal.retry_after_seconds == pytest.approx(4.0)
    assert "wait 6.0 s for their first token" in str(refusal)
    assert "the objective (--ttft) is 2 s" in str(refusal)
    assert admission.num_refused_for_ttft == 1
    assert admission.refusal("", load(), None, 3.0) is None, "an idle engine refuses no turn"
    assert paced(1.5).refusal("", load_with_prompts(4.0), None, 3.0) is None, (
        "there is no objective"
    )


def test_with_a_full_engine_the_ttft_objective_uses_the_admission_rate() -> None:
    admission = Admission(50, {}, now=0.0, ttft_seconds=0.65)
    for tenth in range(1, 200):
        admission.turn_admitted(0.0, tenth / 10)
    assert admission.refusal("", load(6, 0.0), None, 19.9) is None
    refusal = admission.refusal("", load(9, 0.0), None, 19.9)
    assert isinstance(refusal, QueueFull)
    assert refusal.retry_after_seconds == pytest.approx(0.25)


# -- with a daemon --


@contextmanager
def _one_turn_rig(folder: Path, grace_seconds: float) -> Iterator[DaemonRig]:
    config = DaemonConfig(
        grace_seconds=grace_seconds,
        limits={"few": Limits(turns_max=1), "slow": Limits(tokens_per_second=1.0)},
    )
    program, written = (*ECHO, "--seconds=0.005"), {"turns_max": "1"}
    with DaemonRig(folder / "data", config=config, program=program, written=written) as rig:
        yield rig


@pytest.fixture
def one_turn_rig(tmp_path: Path) -> Iterator[DaemonRig]:
    """A daemon whose engine has room for one turn, and takes 5 ms for a token. No turn is given up."""
    with _one_turn_rig(tmp_path, 3600) as rig:
        yield rig


@pytest.fixture
def short_grace_rig(tmp_path: Path) -> Iterator[DaemonRig]:
    """The same daemon, but a turn is given up when it has had no reader for 0.3 s."""
    with _one_turn_rig(tmp_path, 0.3) as rig:
        yield rig


def turn_request(
    conversation_id: str, request_id: str, tenant: str = "", max_tokens: int = 90_000
) -> TurnRequest:
    options = TurnOptions(Sampling(max_tokens=max_tokens, ignore_eos=True))
    messages = (Message("user", "hello"),)
    return TurnRequest(
        conversation_id, messages, options, tenant, request_id, create_if_missing=True
    )


def begin(rig: DaemonRig, *args: Any) -> LiveTurn:
    live = rig.call(rig.daemon.begin(turn_request(*args)))
    assert isinstance(live, LiveTurn)
    return live


def call_on_loop(rig: DaemonRig, act: Any, *args: Any) -> Any:
    """Call a function on the daemon's event loop."""

    async def call() -> Any:
        answer = act(*args)
        return await answer if inspect.isawaitable(answer) else answer

    return rig.call(call())


def begin_in_background(rig: DaemonRig, *args: Any) -> None:
    async def work() -> None:
        await rig.daemon.begin(turn_request(*args))

    call_on_loop(rig, rig.daemon.threads.spawn, work())


def block_the_store(rig: DaemonRig) -> threading.Event:
    """Block the store threads after their present jobs, until the returned event is set."""
    gate = threading.Event()
    for lane in rig.daemon.threads._lanes:
        call_on_loop(rig, rig.daemon.threads.spawn, lane.run("", lambda: gate.wait(60.0)))
    return gate


def test_no_turn_is_refused_because_of_an_earlier_burst(one_turn_rig: DaemonRig) -> None:
    rig = one_turn_rig
    with stopped_engine(rig):
        burst = [rig.send(f"burst{i}", "hello", sampling=LONG) for i in range(6)]
        wait_for(lambda: rig.call(_num_waiting(rig)) > 3)
        wait_for(lambda: _wait_seconds(rig) > 0.02)
        with pytest.raises(grpc.RpcError) as error:
            rig.ask("late", "hello", seconds=0.02)
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert all(list(stream)[-1].HasField("completed") for stream in burst)
    assert _wait_seconds(rig) == 0.0
    assert rig.ask("after", "hello", seconds=60).completed.revision == 1


def _wait_seconds(rig: DaemonRig) -> float:
    return float(call_on_loop(rig, lambda: rig.daemon.wait_seconds))


async def _num_waiting(rig: DaemonRig) -> int:
    return rig.daemon.conversations.turns.num_waiting


def test_a_refusal_because_of_the_deadline_has_the_reason_deadline_exceeded(
    one_turn_rig: DaemonRig,
) -> None:
    rig = one_turn_rig
    endless = pb.Sampling(max_tokens=2000, ignore_eos=True)
    turns = [rig.send(f"long{i}", "hello", sampling=endless) for i in range(2)]
    wait_for(lambda: rig.num_live == 2 and rig.call(_num_waiting(rig)) == 1)
    rig.daemon.admission.turn_admitted(0.0, rig.daemon.started_at + 10_000_000)  # a very long wait
    with pytest.raises(grpc.RpcError) as error:
        rig.ask("late", "hello", seconds=15_000)  # a deadline far beyond the test's own limit
    assert details(error.value)["ErrorInfo"].reason == "DEADLINE_EXCEEDED"
    for turn in turns:
        turn.cancel()


def test_a_retry_is_not_refused_because_of_its_own_turn(one_turn_rig: DaemonRig) -> None:
    """Attaching to a turn, or replaying its reply, begins no turn. So no limit applies."""
    rig = one_turn_rig
    for tenant in ("few", "slow"):
        live = begin(rig, "c", "r1", tenant)
        assert begin(rig, "c", "r1", tenant) is live
        with pytest.raises(InvalidArgument, match="request_id"):
            begin(rig, "c", "r1", tenant, 7)
        wait_for(lambda live=live: live.finish is not None or live.num_tokens > 5)
        call_on_loop(rig, lambda live=live: rig.daemon.conversations.ends.stop(live))
        wait_for(lambda live=live: live.finish is not None)
    other = begin(rig, "d", "r2", "few")
    with pytest.raises(QueueFull, match="1 turns at once"):
        begin(rig, "e", "r3", "few")
    assert begin(rig, "c", "r1", "few").replayed
    assert begin(rig, "d", "r2", "few") is other
    rig.daemon.draining = True
    assert begin(rig, "d", "r2", "few") is other
    assert begin(rig, "c", "r1", "slow").replayed
    rig.daemon.draining = False


def test_a_tenant_over_its_token_rate_can_reattach_to_its_turn(one_turn_rig: DaemonRig) -> None:
    rig = one_turn_rig
    live = begin(rig, "c", "r1", "slow", 60)
    call_on_loop(rig, lambda: rig.daemon.conversations.followers.follow(live, _ignore))
    with pytest.raises(QueueFull, match="1 tokens per second"):
        begin(rig, "c", "r2", "slow")
    assert begin(rig, "c", "r1", "slow", 60).reply.token_ids == live.reply.token_ids


async def _ignore(tokens: ReplyTokens) -> None:
    pass


# -- the grace period while the store is busy --


def test_attaching_to_a_running_turn_does_not_wait_for_the_store(one_turn_rig: DaemonRig) -> None:
    rig = one_turn_rig
    with stopped_engine(rig):
        first = rig.send("c", "hello", request_id="r1", sampling=LONG)
        assert next(iter(first)).started.attempt == 1
        with blocked_store(rig):
            first.cancel()
            again = rig.send("c", "hello", request_id="r1", sampling=LONG, seconds=20)
            started = next(iter(again)).started
    assert (started.attempt, started.replayed) == (1, False)
    assert len(read_turn(again).token_ids) == 60


def test_a_turn_is_not_given_up_while_the_store_delays_its_retry(
    short_grace_rig: DaemonRig,
) -> None:
    """The client disconnects before its turn begins, and retries. The store delays the retry."""
    rig = short_grace_rig
    rig.ask("c", "first")
    with ThreadPoolExecutor(1) as pool:
        with stopped_engine(rig):  # the turn must not end within the grace period
            to_begin = block_the_store(rig)
            first = rig.send("c", "hello", request_id="r1", sampling=LONG)
            num_lanes = rig.daemon.store.num_lanes
            wait_for(lambda: rig.daemon.threads.store_waiting.num_jobs == num_lanes + 1)
            first.cancel()
            wait_for(lambda: _num_calls(rig) == 0)
            to_retry = block_the_store(rig)
            retried = pool.submit(rig.ask, "c", "hello", request_id="r1", sampling=LONG)
            wait_for(lambda: _num_calls(rig) == 1)
            to_begin.set()
            wait_for(lambda: rig.num_live == 1)
            time.sleep(1.0)  # longer than the grace period
            to_retry.set()
        again = retried.result()
    assert again.started.attempt == 1
    assert len(again.token_ids) == 60


def _num_calls(rig: DaemonRig) -> int:
    return rig.daemon.admission.allowances.of("", 0.0).num_calls


# -- quotas --


def test_turns_about_to_begin_count_towards_the_tenants_limit(one_turn_rig: DaemonRig) -> None:
    rig = one_turn_rig
    second = turn_request("d", "r2", "few")
    with blocked_store(rig):
        begin_in_background(rig, "c", "r1", "few", 60)
        wait_for(lambda: rig.daemon.conversations.arriving.num_of_tenant("few") == 1)
        refused = asyncio.run_coroutine_threadsafe(rig.daemon.begin(second), rig._loop)
        # Before a request is refused, the store is asked whether the request is a retry.
        wait_for(lambda: rig.daemon.conversations._num_lookups["few"] == 1)
    with pytest.raises(QueueFull, match="1 turns at once"):
        refused.result(60)
    wait_for(lambda: not rig.daemon.conversations.arriving.num_turns and rig.num_live == 0)
    begin(rig, "d", "r2", "few")


def test_turns_about_to_begin_count_as_ahead_of_a_new_turn(one_turn_rig: DaemonRig) -> None:
    rig = one_turn_rig

    def num_ahead(priority: int = 0) -> float:
        return call_on_loop(rig, lambda: rig.daemon._load(priority=priority).ahead().num_turns)

    with blocked_store(rig):
        for name in ("c", "d"):
            begin_in_background(rig, name, "r1", "", 60)
        wait_for(lambda: rig.daemon.conversations.arriving.num_turns == 2)
        assert num_ahead() == 2
        assert num_ahead(priority=1) == 0
    wait_for(lambda: not rig.daemon.conversations.arriving.num_turns and rig.num_live == 0)
    assert num_ahead() == 0


@pytest.mark.parametrize("how", ["gone", "deleted"])
def test_a_tenant_is_charged_for_computed_tokens_after_a_disconnect_or_deletion(
    short_grace_rig: DaemonRig, how: str
) -> None:
    rig = short_grace_rig

    async def begin_with_reader() -> tuple[LiveTurn, asyncio.Task[None]]:
        live = await rig.daemon.begin(turn_request("c", "r1", "slow"))
        return live, asyncio.create_task(rig.daemon.conversations.followers.until_ended(live))

    live, reader = rig.call(begin_with_reader())
    wait_for(lambda: live.num_tokens > 100)  # the tenant may use 10 at once, and then 1 a second
    if how == "gone":
        call_on_loop(rig, reader.cancel)
    else:
        call_on_loop(rig, lambda: rig.daemon.conversations.delete("c", "slow"))
    wait_for(lambda: live.finish is not None)
    with pytest.raises(QueueFull, match="1 tokens per second"):
        begin(rig, "d", "r2", "slow")


def test_a_turn_deleted_while_it_waits_is_not_charged(one_turn_rig: DaemonRig) -> None:
    rig = one_turn_rig
    first = begin(rig, "c", "r1")
    waiting = begin(rig, "d", "r2", "slow")
    call_on_loop(rig, lambda: rig.daemon.conversations.delete("d", "slow"))
    assert waiting.num_charged_tokens == 0
    call_on_loop(rig, lambda: rig.daemon.conversations.ends.stop(first))
    begin(rig, "d", "r3", "slow")


# -- a damaged history --


def test_a_damaged_history_can_be_read_but_not_changed(
    one_turn_rig: DaemonRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, stub = one_turn_rig, one_turn_rig.stub
    rig.ask("c", "hello", request_id="r1", sampling=pb.Sampling(max_tokens=3))
    monkeypatch.setattr(rig.daemon.store, "integrity_check", lambda: ["page 7 is torn"])
    call_on_loop(rig, lambda: rig.daemon.damage.check(rig.lines.append))
    wait_for(lambda: rig.daemon.damage.problems)
    for change in (
        lambda: rig.ask("c", "more"),
        lambda: rig.ask("new", "hello"),
        lambda: stub.CreateConversation(pb.CreateConversationRequest(conversation_id="d")),
        lambda: stub.ForkConversation(pb.ForkConversationRequest(conversation_id="c")),
        lambda: stub.RewindConversation(pb.RewindConversationRequest(conversation_id="c")),
        lambda: stub.DeleteConversation(pb.DeleteConversationRequest(conversation_id="c")),
        lambda: stub.WarmConversation(pb.WarmConversationRequest(conversation_id="c")),
    ):
        with pytest.raises(grpc.RpcError) as error:
            change()
        assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert details(error.value)["ErrorInfo"].reason == "STORE_CORRUPT"
    assert len(rig.messages("c")) == 2
    assert rig.ask(
        "c", "hello", request_id="r1", sampling=pb.Sampling(max_tokens=3)
    ).started.replayed
