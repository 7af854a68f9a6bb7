"""A request_id is sent again while its turn begins, or after its conversation was deleted and recreated."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from pensieve.conversations.draft import TurnRequest
from pensieve.conversations.live_turn import LiveTurn
from pensieve.store.records import BeginResult
from pensieve.v1 import conversation_pb2 as pb
from tests.conversations.rig_daemon import ECHO, DaemonRig, read_turn, stopped_engine, wait_for
from tests.guard.test_tenants import TokensRig

SHORT = pb.Sampling(max_tokens=4, ignore_eos=True)
SLOW = (*ECHO, "--seconds=0.02")


@contextmanager
def busy(rig: DaemonRig, name: str, tenant: str = "") -> Iterator[None]:
    """Keep all store threads, or all threads of the text pool, busy with this tenant's jobs."""
    gate, begun = threading.Event(), threading.Semaphore(0)

    def wait() -> None:
        begun.release()
        gate.wait(60.0)

    threads = rig.daemon.threads
    pools = threads._lanes
    if name == "in_text_pool":
        pools = [threads._text_pool] * rig.daemon.config.text_threads
    num_threads = len(pools)

    async def begin() -> None:
        for pool in pools:
            threads.spawn(pool.run(tenant, wait))

    rig.call(begin())
    for _ in range(num_threads):
        assert begun.acquire(timeout=60.0)
    try:
        yield
    finally:
        gate.set()


def store_jobs(rig: DaemonRig) -> int:
    """Return the number of jobs that wait while the store is busy."""
    return rig.daemon.threads.store_waiting.num_jobs - rig.daemon.store.num_lanes


def test_a_request_id_can_be_reused_while_its_turn_ends_in_a_deleted_conversation(
    tmp_path: Path,
) -> None:
    """If the first turn's end removed the second turn's entry, the second end would stop the service."""

    def say(rig: DaemonRig, words: str) -> Any:
        return rig.ask("c", words, request_id="r", sampling=pb.Sampling(max_tokens=20))

    def delete(rig: DaemonRig) -> None:
        rig.stub.DeleteConversation(pb.DeleteConversationRequest(conversation_id="c"))

    with DaemonRig(tmp_path / "data", program=SLOW) as rig, ThreadPoolExecutor(3) as pool:
        with ExitStack() as blocking:
            with stopped_engine(rig):  # the first turn must not end before the deletion waits
                first: Future[Any] = pool.submit(say, rig, "first words")
                wait_for(lambda: rig.num_live == 1)
                blocking.enter_context(busy(rig, "in_store"))
                deletion = pool.submit(delete, rig)
                wait_for(lambda: store_jobs(rig) == 1)
                second = pool.submit(say, rig, "second words")
                wait_for(lambda: store_jobs(rig) == 2)
            wait_for(lambda: store_jobs(rig) == 3)  # the third job ends the first turn
        deletion.result()
        assert first.exception() is not None, "its conversation is gone"
        assert second.result().completed.revision == 1
        assert rig.num_live == 0
        assert not rig.server.stopping.is_set()
        assert say(rig, "second words").started.replayed


def test_a_repeated_request_waits_for_the_first_call(tmp_path: Path) -> None:
    """A turn whose text is being tokenized must not block its own client's retry."""
    with TokensRig(tmp_path, {"a": {"turns_max": 1}}) as rig, ThreadPoolExecutor(2) as pool:
        request = pb.SendMessageRequest(
            conversation_id="c", request_id="r", create_if_missing=True, sampling=SHORT
        )
        request.messages.add(content="word " * rig.daemon.config.short_characters)

        def say() -> Any:
            return list(rig.stub.SendMessage(request, metadata=rig.metadata("a"), timeout=60))[-1]

        with busy(rig, "in_text_pool", "b"):
            calls = [pool.submit(say)]
            wait_for(lambda: rig.daemon.conversations.arriving.num_turns == 1)
            calls.append(pool.submit(say))
            wait_for(lambda: rig.num_calls("a") == 2)
        assert [call.result().completed.revision for call in calls] == [1, 1]


def test_lookups_of_one_tenant_do_not_use_up_another_tenants_limit(tmp_path: Path) -> None:
    limits = {"a": {"turns_max": 1}, "b": {"turns_max": 1}}
    with TokensRig(tmp_path, limits, SLOW) as rig, ThreadPoolExecutor(32) as pool:
        rig.begin("b", "c", sampling=SHORT, request_id="r").cancel()
        wait_for(lambda: not rig.num_turns("b"))
        list(rig.stub.SendMessage(_again(), metadata=rig.metadata("b"), timeout=60))
        running = [rig.begin(tenant, "long") for tenant in limits]
        with busy(rig, "in_store", "a"):
            for number in range(20):
                pool.submit(_send_refused, rig, number)
            lookups = rig.daemon.conversations._num_lookups
            wait_for(lambda: lookups["a"] == 16)
            again = pool.submit(
                lambda: list(rig.stub.SendMessage(_again(), metadata=rig.metadata("b"), timeout=60))
            )
            wait_for(lambda: lookups["b"] == 1)
        assert again.result()[0].started.replayed
        for call in running:
            call.cancel()


def _again() -> pb.SendMessageRequest:
    request = pb.SendMessageRequest(
        conversation_id="c", request_id="r", create_if_missing=True, sampling=SHORT
    )
    request.messages.add(content="hello")
    return request


def _send_refused(rig: TokensRig, number: int) -> None:
    request = pb.SendMessageRequest(conversation_id="long", request_id=f"r{number}")
    request.messages.add(content="hello")
    try:
        list(rig.stub.SendMessage(request, metadata=rig.metadata("a"), timeout=60))
    except grpc.RpcError:
        return
    raise AssertionError("a second turn at once")


@pytest.mark.parametrize("is_seen", [True, False], ids=["looked_up", "begun_meanwhile"])
def test_a_turn_that_already_runs_here_is_not_started_a_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_seen: bool
) -> None:
    """A history that was restarted between a call and its retry knows only that the turn runs."""
    with DaemonRig(tmp_path / "data", program=SLOW) as rig:
        sampling = pb.Sampling(max_tokens=100, ignore_eos=True)
        stream = rig.send("c", "hello", request_id="r", sampling=sampling)
        assert next(stream).HasField("started")
        daemon = rig.daemon

        async def running() -> LiveTurn:
            (live,) = daemon.conversations.turns.all_live()
            return live

        live = rig.call(running())
        assert live.request is not None
        begin, look_up = daemon.store.begin_turn, daemon.store.look_up

        def begin_again(*given: Any, **named: Any) -> BeginResult:
            request = replace(given[1], expected_revision=None, expected_created_at=None)
            return begin(given[0], request, **named)._replace(must_run=True)

        def look_before(*given: Any, **named: Any) -> Any:
            conversation, _, log_end = look_up(*given, **named)
            return replace(conversation, running_turn_id=None), None, log_end

        monkeypatch.setattr(daemon.store, "begin_turn", begin_again)
        if not is_seen:
            monkeypatch.setattr(daemon.store, "look_up", look_before)

        async def begin_and_find(request: TurnRequest) -> list[LiveTurn | None]:
            conversations = daemon.conversations
            live = await conversations.begin(request)
            return [live, await conversations.find_turn_of_retry(request)]

        assert rig.call(begin_and_find(live.request)) == [live, live]
        assert rig.num_live == 1
        assert read_turn(stream).completed.revision == 1


def test_waiting_requests_of_a_tenant_use_limited_memory(tmp_path: Path) -> None:
    """Above the limit, requests are not received. Requests of disconnected clients are not tokenized."""
    with DaemonRig(tmp_path / "data") as rig:
        incoming = rig.server.guard.incoming
        request = pb.CreateConversationRequest(system_prompt="x" * 1_000_000)
        with busy(rig, "in_text_pool", "b"):
            calls = [rig.stub.CreateConversation.future(request) for _ in range(100)]
            wait_for(lambda: incoming.bytes_held[""] > 32 << 20)
            # Above the limit no further request is started, but 16 may already be arriving.
            assert incoming.bytes_held[""] <= (32 << 20) + 16 * 1_000_100
            for call in calls:
                call.cancel()
            wait_for(lambda: not incoming.bytes_held[""])
        assert rig.ask("c", "hello", sampling=SHORT).completed.revision == 1
        found = rig.stub.ListConversations(pb.ListConversationsRequest())
        assert [each.conversation_id for each in found.conversations] == ["c"]
