"""Each limit of tenants, over gRPC, and limits that change while the daemon runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from pensieve.cli.main import main
from pensieve.client import Client, Retry
from pensieve.client.admin import Admin
from pensieve.conversations.admission import Admission, DaemonLoad
from pensieve.conversations.daemon_config import DaemonConfig
from pensieve.errors import ContextFull, NotFound, QueueFull, StorageFull
from pensieve.guard import callers
from pensieve.guard.exposure import Listening
from pensieve.guard.guard import CallKind, Guard, GuardedCall
from pensieve.guard.limits import Allowance, Allowances, Limits
from pensieve.v1 import admin_pb2
from pensieve.v1 import conversation_pb2 as pb
from tests.conversations.raw_http2 import RST_STREAM, RawPeer, frame
from tests.conversations.rig_daemon import (
    ECHO,
    DaemonRig,
    details,
    read_turn,
    stopped_engine,
    wait_for,
)

ENDLESS = pb.Sampling(max_tokens=50_000, ignore_eos=True)
SHORT = pb.Sampling(max_tokens=3, ignore_eos=True)
TIMEOUT = 1000.0  # of calls that the guard delays


class TokensRig(DaemonRig):
    """A daemon with a token per tenant; `secrets[tenant]` is that token."""

    def __init__(
        self,
        folder: Path,
        limits: dict[str, dict[str, Any]],
        program: tuple[str, ...] = ECHO,
        written: dict[str, str] | None = None,
        ttft: float = 0.0,
    ) -> None:
        self.file = folder / "tokens.toml"
        self.secrets: dict[str, str] = {}
        self.digests: dict[str, str] = {}
        self.write(limits)
        tokens = callers.read_tokens(self.file)
        data = self.data = folder / "data"
        listening = Listening(
            "127.0.0.1:0", data / "admin.sock", tokens=tokens, token_file=self.file
        )
        limits_now = callers.limits_of(tokens)
        config = DaemonConfig(grace_seconds=0.3, limits=limits_now, ttft_seconds=ttft)
        super().__init__(data, config=config, listening=listening, program=program, written=written)

    def write(self, limits: dict[str, dict[str, Any]]) -> None:
        """Write the token file, with the same tokens as before."""
        lines = []
        for tenant, values in limits.items():
            if tenant not in self.secrets:
                token, entry = callers.new_token(tenant, admin=False)
                self.secrets[tenant] = token
                self.digests[tenant] = entry.split('"')[1]
            values = {"sha256": self.digests[tenant], "tenant": tenant, **values}
            lines += [
                "[[token]]",
                *(f"{name} = {json.dumps(each)}" for name, each in values.items()),
            ]
        new = self.file.with_suffix(".new")
        new.write_text("\n".join(lines))
        new.chmod(0o600)
        new.replace(self.file)

    def change(self, limits: dict[str, dict[str, Any]]) -> None:
        """Change the limits, and wait until they apply."""
        before = self.limits()
        self.write(limits)
        wait_for(lambda: self.limits() != before, 30)

    def limits(self) -> dict[str, Limits]:
        allowances = self.daemon.admission.allowances
        return {each: allowances.of(each, 0.0).limits for each in allowances.tenants}

    def in_debt(self, tenant: str) -> QueueFull | None:
        async def look() -> QueueFull | None:
            now = asyncio.get_running_loop().time()
            return self.daemon.admission.allowances.of(tenant, now).in_debt(now)

        return self.call(look())

    def num_calls(self, tenant: str) -> int:
        return self.daemon.admission.allowances.of(tenant, 0.0).num_calls

    def unread_bytes(self, tenant: str) -> int:
        return self.daemon.admission.allowances.of(tenant, 0.0).num_unread_bytes

    def stored_bytes(self, tenant: str) -> int:
        threads, store = self.daemon.threads, self.daemon.store
        return int(self.call(threads.in_store("", store.stored_bytes, tenant)))

    def num_turns(self, tenant: str) -> int:
        async def look() -> int:
            return self.daemon.conversations.turns.num_of_tenant(tenant)

        return int(self.call(look()))

    def record_charges(self) -> list[tuple[str, int]]:
        """Record the tenant and the tokens of each charge."""
        seen: list[tuple[str, int]] = []
        charge = self.daemon.admission.charge

        def note_and_charge(tenant: str, num_tokens: int, now: float) -> None:
            seen.append((tenant, num_tokens))
            charge(tenant, num_tokens, now)

        self.daemon.admission.charge = note_and_charge  # type: ignore[method-assign]
        return seen

    def evict(self, name: str, tenant: str) -> None:
        with Admin(f"unix:{self.data / 'admin.sock'}") as admin:
            admin.evict(name, tenant)

    def client(self, tenant: str) -> Client:
        return Client(
            self.server.address, token=self.secrets[tenant], retry=Retry(retries=0), timeout=60.0
        )

    def metadata(self, tenant: str) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.secrets[tenant]}"),)

    def begin(self, tenant: str, name: str, sampling: Any = ENDLESS, **fields: Any) -> Any:
        """Begin a turn, and wait until it is accepted."""
        request = pb.SendMessageRequest(
            conversation_id=name,
            messages=[pb.NewMessage(content="hello")],
            create_if_missing=True,
            sampling=sampling,
            **fields,
        )
        call = self.stub.SendMessage(request, metadata=self.metadata(tenant), timeout=60)
        next(iter(call))
        return call


@contextlib.contextmanager
def refused(limit: str) -> Iterator[None]:
    with pytest.raises(grpc.RpcError) as error:
        yield
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    info = details(error.value)["ErrorInfo"]
    assert (info.reason, info.metadata["limit"]) == ("QUEUE_FULL", limit)


# -- storage --


def test_a_tenant_at_its_storage_limit_may_delete_and_read_but_not_store(
    tmp_path: Path,
) -> None:
    with TokensRig(tmp_path, {"a": {"storage_bytes": 20_000}, "b": {}}) as rig:
        with rig.client("a") as client:
            for number in range(10):
                client.conversation(f"c{number}").create(system_prompt="x" * 2500)
                if rig.stored_bytes("a") >= 20_000:
                    break
            last = f"c{number}"
            assert 5 <= number < 9
            for act in (
                lambda: client.conversation("more").create(),
                lambda: client.conversation("c0").ask("hello", max_tokens=2),
                lambda: client.conversation("new").ask("hello", max_tokens=2),
                lambda: client.conversation("c0").fork(conversation_id="fork"),
            ):
                with pytest.raises(StorageFull, match=r"take 2\d,\d\d\d of 20,000 bytes"):
                    act()
            assert next(client.conversation("c0").messages()).text == "x" * 2500
            client.conversation(last).delete()
            assert client.conversation("c0").ask("hello", max_tokens=2, ignore_eos=True).text
        with rig.client("b") as client:
            assert client.conversation("c").ask("x" * 30_000, max_tokens=2).revision == 1


def test_a_running_turn_is_stored_above_the_storage_limit_and_can_be_replayed(
    tmp_path: Path,
) -> None:
    with TokensRig(tmp_path, {"a": {"storage_bytes": 2500}}) as rig, rig.client("a") as client:
        talk = client.conversation("c")
        first = talk.ask("hello " * 500, max_tokens=50, ignore_eos=True, request_id="r1")
        assert rig.stored_bytes("a") > 2500
        with pytest.raises(StorageFull):
            talk.ask("more", max_tokens=2)
        again = talk.ask("hello " * 500, max_tokens=50, ignore_eos=True, request_id="r1")
        assert again.text == first.text


# -- tokens --


def test_history_changes_are_charged_and_a_tenant_in_debt_may_only_read_and_delete(
    tmp_path: Path,
) -> None:
    """Otherwise a limited tenant could make others wait while its texts are tokenized."""
    with TokensRig(tmp_path, {"a": {"tokens_per_second": 5}}) as rig, rig.client("a") as client:
        client.conversation("c").ask("hello", max_tokens=1, ignore_eos=True)
        charges = rig.record_charges()
        client.conversation("c").fork(conversation_id="fork")
        client.conversation("fork").rewind(0)
        assert charges == [("a", 1), ("a", 1)]
        client.conversation("long").create(system_prompt="word " * 200)
        assert sum(num_tokens for _, num_tokens in charges) > 200
        for act in (
            lambda: client.conversation("more").create(),
            lambda: client.conversation("c").fork(conversation_id="fork2"),
            lambda: client.conversation("c").rewind(0),
            lambda: client.conversation("c").ask("hello", max_tokens=1),
        ):
            with pytest.raises(QueueFull) as error:
                act()
            assert error.value.limit == "tokens_per_second"
            assert (error.value.retry_after_seconds or 0) > 20
        assert len(list(client.conversation("c").messages())) == 2
        client.conversation("c").delete()


def test_a_text_that_does_not_fit_is_charged_because_it_was_tokenized(tmp_path: Path) -> None:
    with TokensRig(tmp_path, {"a": {"tokens_per_second": 1}}) as rig, rig.client("a") as client:
        charges = rig.record_charges()
        text = "a b c d e f g " * (rig.daemon.context_max // 5)
        with pytest.raises(ContextFull):
            client.conversation("c").ask(text, max_tokens=1)
        assert sum(num_tokens for _, num_tokens in charges) > rig.daemon.context_max


# -- requests and calls --


def test_requests_of_all_kinds_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pensieve.guard.limits.BURST_SECONDS", 5000.0)  # 5 requests may be saved up
    with TokensRig(tmp_path, {"a": {"requests_per_second": 0.001}, "b": {}}) as rig:
        with rig.client("a") as client:
            for number in range(5):
                with contextlib.suppress(NotFound):
                    if number % 2:
                        client.conversation("no").delete()
                    else:
                        list(client.conversations())
            with pytest.raises(QueueFull) as error:
                client.conversation("c").ask("hello", max_tokens=2)
            assert error.value.limit == "requests_per_second"
            assert 500 < (error.value.retry_after_seconds or 0) <= 1000
        with rig.client("b") as client:
            for _ in range(20):
                list(client.conversations())


def record_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the pauses of the guard. Only the first pause takes its time."""
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        await asyncio.sleep(seconds if len(pauses) == 1 else 0.0)

    namespace = SimpleNamespace(sleep=pause, get_running_loop=asyncio.get_running_loop)
    monkeypatch.setattr("pensieve.guard.guard.asyncio", namespace)
    return pauses


def test_refusals_of_a_tenant_over_its_limits_are_delayed_and_other_tenants_do_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pensieve.guard.limits.REFUSALS_PER_SECOND", 1 / 3600)
    monkeypatch.setattr("pensieve.guard.limits.PAUSE_SECONDS_MAX", 3600.0)
    pauses = record_pauses(monkeypatch)
    with TokensRig(tmp_path, {"few": {"requests_per_second": 0.01}, "other": {}}) as rig:

        def get(tenant: str, timeout: float | None = None) -> Any:
            request = pb.GetConversationRequest(conversation_id="c")
            metadata = rig.metadata(tenant)
            return rig.stub.GetConversation.future(request, metadata=metadata, timeout=timeout)

        assert get("few").code() is grpc.StatusCode.NOT_FOUND  # the one request that was saved up
        waiting = get("few")
        wait_for(lambda: len(pauses) == 1)
        assert get("other").code() is grpc.StatusCode.NOT_FOUND
        # A caller with a timeout is refused after half of it.
        assert get("few", TIMEOUT).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert pauses[-1] == pytest.approx(TIMEOUT / 2, rel=0.5)
        assert not waiting.done()
        assert waiting.cancel()
        wait_for(lambda: rig.num_calls("few") == 0)


def test_calls_of_a_tenant_in_debt_are_delayed_and_other_tenants_do_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pensieve.guard.limits.CALLS_PER_SECOND", 1 / 3600)
    monkeypatch.setattr("pensieve.guard.limits.PAUSE_SECONDS_MAX", 3600.0)
    pauses = record_pauses(monkeypatch)
    with TokensRig(tmp_path, {"owes": {"tokens_per_second": 0.001}, "other": {}}) as rig:

        def list_conversations(tenant: str, timeout: float | None = None) -> Any:
            request = pb.ListConversationsRequest()
            metadata = rig.metadata(tenant)
            return rig.stub.ListConversations.future(request, metadata=metadata, timeout=timeout)

        assert list_conversations("owes").result().conversations == []
        with rig.client("owes") as client:
            client.conversation("c").ask("hello", max_tokens=3, ignore_eos=True)
        wait_for(lambda: bool(rig.in_debt("owes")))
        waiting = list_conversations("owes")
        wait_for(lambda: len(pauses) == 1)
        assert list_conversations("other").result().conversations == []
        # A call with a timeout is answered after half of it.
        assert len(list_conversations("owes", TIMEOUT).result().conversations) == 1
        assert pauses[-1] == pytest.approx(TIMEOUT / 2, rel=0.5)
        assert not waiting.done()
        assert waiting.cancel()
        wait_for(lambda: rig.num_calls("owes") == 0)


def test_concurrent_calls_are_counted_until_they_end(tmp_path: Path) -> None:
    slow = (*ECHO, "--seconds=0.01")
    with TokensRig(tmp_path, {"a": {"calls_max": 2}, "b": {}}, slow) as rig:
        one, two = rig.begin("a", "c1"), rig.begin("a", "c2")
        listing = pb.ListConversationsRequest()
        with refused("calls_max"):
            rig.stub.ListConversations(listing, metadata=rig.metadata("a"))
        with refused("calls_max"):
            rig.begin("a", "c3")
        rig.stub.ListConversations(listing, metadata=rig.metadata("b"))
        two.cancel()
        wait_for(lambda: rig.num_calls("a") == 1)
        rig.stub.ListConversations(listing, metadata=rig.metadata("a"))
        one.cancel()


def test_calls_that_are_cancelled_immediately_are_not_counted_any_more(tmp_path: Path) -> None:
    with TokensRig(tmp_path, {"a": {}}) as rig, contextlib.ExitStack() as peers:
        bearer = ("authorization", f"Bearer {rig.secrets['a']}")
        body = b"\0" + struct.pack(">I", 0)
        for number in range(300):
            if number % 100 == 0:
                peer = peers.enter_context(RawPeer(rig.server.address))
            stream = peer.call("/pensieve.v1.ConversationService/ListConversations", bearer)
            if number % 3:
                peer.body(stream, body, patience=0.2, end=True)
            if number % 2:
                peer.send(frame(RST_STREAM, 0, stream, struct.pack(">I", 8)))
        wait_for(lambda: rig.num_calls("a") > 0)
        peers.close()
        wait_for(lambda: rig.num_calls("a") == rig.unread_bytes("a") == 0)


def test_a_client_can_reconnect_to_its_turn_while_its_broken_call_is_still_counted(
    tmp_path: Path,
) -> None:
    slow = (*ECHO, "--seconds=0.005")
    with TokensRig(tmp_path, {"a": {"calls_max": 1, "turns_max": 1}}, slow) as rig:
        fields = {"sampling": pb.Sampling(max_tokens=80, ignore_eos=True), "request_id": "r1"}
        with stopped_engine(rig):
            first = rig.begin("a", "c", **fields)
            second = rig.begin("a", "c", **fields)
            with refused("calls_max"):
                rig.begin("a", "c", **fields)
        assert read_turn(second).completed.revision == 1
        assert read_turn(first).completed.revision == 1


# -- warms --


def test_a_warm_counts_as_a_turn_and_its_tokens_are_charged(tmp_path: Path) -> None:
    slow = (*ECHO, "--seconds=0.2")
    written = {"token_budget": "16"}
    limits = {"a": {"turns_max": 1}, "b": {"tokens_per_second": 200}}
    with TokensRig(tmp_path, limits, slow, written) as rig:
        for tenant in limits:
            with rig.client(tenant) as client:
                for name in ("c", "d"):
                    client.conversation(name).ask("w " * 50, max_tokens=1)
                    rig.evict(name, tenant)
        with rig.client("a") as client:
            with stopped_engine(rig):
                client.conversation("c").warm()
                for act in (
                    lambda: client.conversation("d").ask("hello", max_tokens=1),
                    lambda: client.conversation("d").warm(),
                ):
                    with pytest.raises(QueueFull) as error:
                        act()
                    assert error.value.limit == "turns_max"
                turn = rig.begin("a", "c", SHORT)  # the warm is for this turn, so it must run
            assert read_turn(turn).text
        with rig.client("b") as client:
            charges = rig.record_charges()
            client.conversation("c").warm()
            # Wait until the tokens of the warm are charged.
            wait_for(lambda: sum(num_tokens for _, num_tokens in charges) > 50)
            assert {tenant for tenant, _ in charges} == {"b"}
            assert not rig.num_turns("b")


def test_warms_lost_with_the_engine_are_not_counted_any_more(tmp_path: Path) -> None:
    with TokensRig(tmp_path, {"a": {"turns_max": 1}}) as rig, rig.client("a") as client:
        client.conversation("c").ask("w " * 100, max_tokens=1)
        rig.evict("c", "a")
        with stopped_engine(rig):
            client.conversation("c").warm()
            assert rig.num_turns("a") == 1
            os.kill(rig.daemon.engine.pid or 0, signal.SIGKILL)
        wait_for(lambda: rig.daemon.engine.num_restarts and rig.daemon.serving)
        assert client.conversation("d").ask("hello", max_tokens=1).revision == 1


# -- unread responses --


def request_without_reading(
    rig: TokensRig, tenant: str, peers: contextlib.ExitStack, num: int
) -> Any:
    """Make calls of ListMessages over a connection that reads no responses."""
    peer = peers.enter_context(RawPeer(rig.server.address, window=0))
    body = pb.ListMessagesRequest(conversation_id="c").SerializeToString()
    message = b"\0" + struct.pack(">I", len(body)) + body
    path = "/pensieve.v1.ConversationService/ListMessages"
    for _ in range(num):
        stream = peer.call(path, ("authorization", f"Bearer {rig.secrets[tenant]}"))
        peer.body(stream, message, patience=0.5, end=True)
    return peer


def test_unread_responses_of_a_tenant_are_limited(tmp_path: Path) -> None:
    limits = {"a": {"unread_bytes": 400_000}, "b": {}}
    with TokensRig(tmp_path, limits) as rig, contextlib.ExitStack() as peers:
        for tenant in limits:
            with rig.client(tenant) as client:
                client.conversation("c").create(system_prompt="x" * 90_000)
        request_without_reading(rig, "a", peers, 40)
        wait_for(lambda: rig.unread_bytes("a") > 300_000)
        request = pb.ListMessagesRequest(conversation_id="c")
        wait_for(lambda: rig.num_calls("a") < 6)  # further calls were refused
        with refused("unread_bytes"):
            rig.stub.ListMessages(request, metadata=rig.metadata("a"))
        assert rig.unread_bytes("a") <= 400_000, "a response above the limit was sent"
        assert rig.stub.ListMessages(request, metadata=rig.metadata("b")).messages
        peers.close()
        wait_for(lambda: not rig.unread_bytes("a"), 60)
        assert rig.stub.ListMessages(request, metadata=rig.metadata("a")).messages


async def tell(error: Exception) -> None:
    raise AssertionError(error)


class Stream:
    """A call's context whose writes block until `released` is set."""

    read: Any = None
    read_ahead: Any = None

    def __init__(self) -> None:
        self.released = asyncio.Event()
        self.num_written = 0

    def add_done_callback(self, callback: Any) -> None:
        self.end = callback

    def peer(self) -> str:
        return "unix:"

    def time_remaining(self) -> None: ...

    async def write(self, message: Any) -> None:
        await self.released.wait()
        self.num_written += 1


def test_a_stream_chunk_waits_for_room_but_a_large_chunk_is_sent_alone() -> None:
    async def run() -> None:
        guard = Guard(allowances=Allowances({"": Limits(unread_bytes=1000)}, 0.0))
        allowance = guard.allowance("")
        first, second = Stream(), Stream()
        calls = [GuardedCall(guard, CallKind(), "Send", each, tell) for each in (first, second)]
        for each in calls:
            await each.enter(None)
        writes = [
            asyncio.ensure_future(call.send(700, stream.write, "x" * 700))
            for call, stream in zip(calls, (first, second), strict=True)
        ]
        await asyncio.sleep(0.2)
        assert allowance.num_unread_bytes == 700
        second.released.set()
        await asyncio.sleep(0.2)
        assert second.num_written == 0, "the second write did not wait for the first"
        first.released.set()
        await asyncio.gather(*writes)
        assert (second.num_written, allowance.num_unread_bytes) == (1, 0)
        await calls[0].send(5000, first.write, "x" * 5000)
        for stream in (first, second):
            stream.end(stream)
        assert allowance.num_calls == 0

    asyncio.run(run())


# -- priorities --


def test_a_priority_above_the_tokens_ceiling_is_lowered_to_it(tmp_path: Path) -> None:
    with TokensRig(tmp_path, {"a": {"priority_max": -1}, "b": {}}) as rig:
        seen: list[tuple[str, int]] = []
        begin = rig.daemon.begin

        async def note_and_begin(ask: Any, *rest: Any) -> Any:
            seen.append((ask.tenant, ask.options.priority))
            return await begin(ask, *rest)

        rig.daemon.begin = note_and_begin  # type: ignore[method-assign, assignment]
        for priority in (8, 0, -3):
            for tenant in ("a", "b"):
                read_turn(rig.begin(tenant, f"c{priority}", SHORT, priority=priority))
        assert seen == [("a", -1), ("b", 8), ("a", -1), ("b", 0), ("a", -3), ("b", -3)]


# -- weights --


def order_of_admission(
    folder: Path, limits: dict[str, dict[str, Any]], turns: Sequence[str]
) -> list[str]:
    """Return the tenants of turns that wait for another turn, in the order of admission.

    That other turn keeps its place, because its weight is the highest.
    """
    slow, written = (*ECHO, "--seconds=0.002"), {"turns_max": "1"}
    with TokensRig(folder, {"first": {"weight": 100}, **limits}, slow, written) as rig:
        admitted: list[str] = []

        def note_admission(live: Any, missing: int) -> None:
            admitted.append(live.tenant)

        rig.daemon.events.admitted.subscribe(note_admission)
        first = rig.begin("first", "c")
        calls = [rig.begin(tenant, f"c{i}", SHORT) for i, tenant in enumerate(turns)]
        assert admitted == ["first"]
        first.cancel()
        for call in calls:
            assert read_turn(call).completed.revision == 1
        return admitted[1:]


def test_other_tenants_do_not_wait_behind_the_backlog_of_a_flooding_tenant(tmp_path: Path) -> None:
    admitted = order_of_admission(
        tmp_path, {"flood": {}, "mine": {}}, [*["flood"] * 50, *["mine"] * 3]
    )
    assert len(admitted) == 53
    assert "mine" not in admitted[6:], admitted


def test_tenants_with_a_backlog_are_admitted_in_proportion_to_their_weights(tmp_path: Path) -> None:
    limits = {"light": {"weight": 1}, "heavy": {"weight": 3}}
    admitted = order_of_admission(tmp_path, limits, ["light", "heavy"] * 24)
    for end in (12, 20, 28):
        assert abs(admitted[:end].count("heavy") - 0.75 * end) <= 2, admitted


def test_warms_count_against_the_limit_of_live_turns(tmp_path: Path) -> None:
    """A flood of warms must not fill the engine's queue, which is only as long as the daemon's limit."""
    with DaemonRig(tmp_path / "data", config=DaemonConfig(live_turns_max=2)) as rig:
        for name in ("c", "d", "e"):
            rig.ask(name, "w " * 60, sampling=pb.Sampling(max_tokens=1))
            rig.admin.EvictConversation(admin_pb2.EvictConversationRequest(conversation_id=name))
        with stopped_engine(rig):
            for name in ("c", "d"):
                rig.stub.WarmConversation(pb.WarmConversationRequest(conversation_id=name))
            with pytest.raises(grpc.RpcError) as error:
                rig.stub.WarmConversation(pb.WarmConversationRequest(conversation_id="e"))
        assert details(error.value)["ErrorInfo"].reason == "QUEUE_FULL"
        wait_for(lambda: rig.call(_num_warms(rig)) == 0)
        rig.stub.WarmConversation(pb.WarmConversationRequest(conversation_id="e"))


async def _num_warms(rig: DaemonRig) -> int:
    return rig.daemon.conversations.turns.num_warms


def test_a_flooding_tenant_cannot_use_the_turns_reserved_for_other_tenants() -> None:
    def load(num_turns: int, num_of_tenant: int) -> DaemonLoad:
        return DaemonLoad(False, True, num_turns, num_of_tenant)

    shared = Admission(90, {"a": Limits(), "b": Limits()}, 0.0)
    assert shared.refusal("a", load(80, 80), None, 0.0) is None
    refusal = shared.refusal("a", load(81, 81), None, 0.0)
    assert isinstance(refusal, QueueFull)
    assert "other clients need room" in str(refusal)
    assert shared.refusal("b", load(85, 4), None, 0.0) is None
    alone = Admission(90, {"a": Limits()}, 0.0)
    assert alone.refusal("a", load(89, 89), None, 0.0) is None


# -- limits that change --


def test_changed_limits_apply_at_once_also_to_running_turns(
    tmp_path: Path,
) -> None:
    slow = (*ECHO, "--seconds=0.01")
    with TokensRig(tmp_path, {"a": {}, "b": {"turns_max": 1}}, slow) as rig:
        running = [
            rig.begin("a", f"c{i}", pb.Sampling(max_tokens=500, ignore_eos=True)) for i in (1, 2)
        ]
        rig.change({"a": {"turns_max": 2, "storage_bytes": 1}, "b": {"turns_max": 2}})
        with refused("turns_max"):
            rig.begin("a", "c3")
        one, two = rig.begin("b", "c1"), rig.begin("b", "c2")
        with refused("turns_max"):
            rig.begin("b", "c3")
        assert [read_turn(call).completed.revision for call in running] == [1, 1]
        with rig.client("a") as client, pytest.raises(StorageFull):
            client.conversation("more").create()
        rig.change({"a": {}, "b": {"turns_max": 2}})
        read_turn(rig.begin("a", "c3", SHORT))
        one.cancel()
        two.cancel()


def test_a_debt_outlasts_a_change_of_limits() -> None:
    allowance = Allowance(Limits(tokens_per_second=1.0), 0.0)
    allowance.spend(100, 0.0)
    allowance.change(Limits(tokens_per_second=9.0, turns_max=4), 0.0)
    exceeded = allowance.exceeded(0, 0.0)
    assert exceeded is not None
    assert exceeded.retry_after_seconds == 10.0
    allowance.change(Limits(), 0.0)
    assert allowance.exceeded(100, 0.0) is None
    allowance.change(Limits(tokens_per_second=2.0), 5.0)
    assert allowance.exceeded(0, 5.0) is None, "nothing is owed for a time without a limit"
    allowance.spend(20, 5.0)
    assert allowance.exceeded(0, 5.0) is None
    allowance.spend(1, 5.0)
    assert allowance.exceeded(0, 5.0) is not None


# -- what the operator sees --


def test_the_operator_sees_the_usage_and_limits_of_each_tenant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = (*ECHO, "--seconds=0.01")
    limits = {"a": {"turns_max": 5, "tokens_per_second": 9.5, "weight": 2}, "b": {}}
    with TokensRig(tmp_path, limits, slow) as rig:
        call = rig.begin("a", "c")
        read_turn(rig.begin("b", "c", SHORT))
        assert main(["admin", "tenants", "--data", str(rig.data), "--json"]) == 0
        found = {each["name"]: each for each in json.loads(capsys.readouterr().out)["tenants"]}
        call.cancel()
        assert main(["admin", "tenants", "--data", str(rig.data)]) == 0
        table = capsys.readouterr().out
    assert (found["a"]["turns"], found["a"]["calls"]) == (1, 1)
    assert (found["b"]["turns"], found["b"]["calls"]) == (0, 0)
    assert found["b"]["stored_bytes"] > 500
    assert found["a"]["limits"]["turns_max"] == 5
    assert found["a"]["limits"]["weight"] == 2.0
    assert found["a"]["tokens_saved"] == 95.0
    assert "of 5" in table
    assert "9.5 /s" in table
