"""Tenants share the service's threads fairly, and readers do not wait for writers."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from pensieve.conversations.draft import OutdatedTokens
from pensieve.conversations.threads import FairPool, Threads
from pensieve.errors import InvalidArgument, PensieveError
from pensieve.store import ConversationStore, NewConversation, NewMessage
from pensieve.text import ChatTemplate
from pensieve.v1 import conversation_pb2 as pb
from tests.api.http.rig_http import http_rig
from tests.conversations.rig_daemon import PATIENCE_SECONDS, DaemonRig, blocked_store, wait_for

# -- the pool --


def test_the_pool_alternates_between_tenants_and_keeps_each_tenants_order() -> None:
    ran: list[str] = []

    async def flood() -> None:
        pool, gate = FairPool(asyncio.get_running_loop(), 1, "store"), threading.Event()
        jobs: list[Any] = [asyncio.ensure_future(pool.run("a", gate.wait))]
        for tenant, count in (("a", 5), ("b", 2), ("c", 3)):
            for i in range(count):
                work = pool.run(tenant, partial(ran.append, f"{tenant}{i}"))
                jobs.append(asyncio.ensure_future(work))
        await asyncio.sleep(0)
        assert sorted(pool._queues) == ["a", "b", "c"]
        gate.set()
        await asyncio.gather(*jobs)
        assert not pool._queues
        pool.close()

    asyncio.run(flood())
    assert ran == ["a0", "b0", "c0", "a1", "b1", "c1", "a2", "c2", "a3", "a4"]


def test_callers_get_their_own_results_in_the_order_of_their_jobs() -> None:
    finished: list[int] = []

    async def main() -> None:
        pool = FairPool(asyncio.get_running_loop(), 1, "store")

        async def call(i: int) -> None:
            if i % 7 == 3:
                with pytest.raises(InvalidArgument, match=f"number {i}"):
                    await pool.run(str(i % 2), lambda: _refuse(i))
            else:
                assert await pool.run(str(i % 2), lambda: i) == i
            finished.append(i)

        await asyncio.gather(*(call(i) for i in range(50)))
        pool.close()

    asyncio.run(main())
    assert finished == list(range(50))


def _refuse(i: int) -> None:
    raise InvalidArgument("i", f"number {i}")


def test_a_refused_job_is_freed_without_a_garbage_collection() -> None:
    """Full collections are rare here (gc_pause.py), and an error's frames keep its large arguments alive."""
    errors: list[weakref.ref[InvalidArgument]] = []

    async def main() -> None:
        threads = Threads(asyncio.get_running_loop(), 1)
        for i in range(4):
            job = threads.in_store("a", _refuse, i)
            try:
                await (threads.run_to_end(job) if i % 2 else job)
            except InvalidArgument as error:
                errors.append(weakref.ref(error))
            del job
        await threads.in_store("a", lambda: None)  # now the thread has dropped the last error
        await threads.close()
        assert [error() for error in errors] == [None] * 4

    with no_collections():
        asyncio.run(main())


def test_a_refused_turn_is_freed_without_a_garbage_collection(tmp_path: Path) -> None:
    """Otherwise the text and tokens of a request that is too long would stay in memory.

    The test sends such requests over gRPC and over HTTP.
    """
    with http_rig(tmp_path / "data") as server:
        rig, long = server.rig, "word " * (2 * server.rig.daemon.context_max)
        rig.ask("c", "hello", sampling=pb.Sampling(max_tokens=2))
        gc.collect()
        with no_collections():
            for conversation_id in ("c", "new"):
                with pytest.raises(grpc.RpcError) as refused:
                    rig.ask(conversation_id, long)
                assert refused.value.code() is grpc.StatusCode.OUT_OF_RANGE
            request = pb.DeleteConversationRequest(conversation_id="nobody")
            with pytest.raises(grpc.RpcError):
                rig.stub.DeleteConversation(request)
            assert server.chat(long).status == 400
            assert server.chat("hello", "yes", long).status == 400
            wait_for(lambda: not errors_in_memory())


def errors_in_memory() -> list[PensieveError]:
    return [each for each in gc.get_objects() if isinstance(each, PensieveError)]


@contextmanager
def no_collections() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_a_job_runs_even_if_its_caller_was_cancelled() -> None:
    ran: list[str] = []

    async def main() -> None:
        pool, gate = FairPool(asyncio.get_running_loop(), 1, "store"), threading.Event()
        first = asyncio.ensure_future(pool.run("a", gate.wait))
        gone = asyncio.ensure_future(pool.run("a", lambda: ran.append("gone")))
        await asyncio.sleep(0)
        gone.cancel()
        gate.set()
        await first
        await pool.run("a", lambda: ran.append("next"))
        pool.close()

    asyncio.run(main())
    assert ran == ["gone", "next"]


# -- with a daemon --


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[DaemonRig]:
    with DaemonRig(tmp_path / "data") as rig:
        yield rig


def test_reads_do_not_wait_for_writes(rig: DaemonRig) -> None:
    rig.ask("c", "hello", sampling=pb.Sampling(max_tokens=4))
    with blocked_store(rig):
        stub, seconds = rig.stub, 20.0
        read = stub.ListMessages(pb.ListMessagesRequest(conversation_id="c"), timeout=seconds)
        assert len(read.messages) == 2
        found = stub.GetConversation(
            pb.GetConversationRequest(conversation_id="c"), timeout=seconds
        )
        assert found.conversation.num_messages == 2
        listed = stub.ListConversations(pb.ListConversationsRequest(), timeout=seconds)
        assert [each.conversation_id for each in listed.conversations] == ["c"]


def test_a_client_reads_its_own_writes(rig: DaemonRig) -> None:
    for i in range(20):
        rig.ask("c", "hello", sampling=pb.Sampling(max_tokens=2))
        assert len(rig.messages("c")) == 2 * (i + 1)
        found = rig.stub.GetConversation(pb.GetConversationRequest(conversation_id="c"))
        assert found.conversation.revision == i + 1


def test_long_texts_are_tokenized_outside_the_store_thread(
    rig: DaemonRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes a system prompt, which is tokenized when it is checked, and again in the first turn."""
    tokenized_by: list[str] = []
    for name in ("opening", "delta", "tokens_after_head"):
        original = getattr(ChatTemplate, name)

        def note(*arguments: Any, original: Any = original) -> Any:
            tokenized_by.append(threading.current_thread().name)
            return original(*arguments)

        monkeypatch.setattr(ChatTemplate, name, note)
    long = "word " * (rig.daemon.config.short_characters // 4)
    request = pb.CreateConversationRequest(conversation_id="c", system_prompt=long)
    rig.stub.CreateConversation(request)
    rig.ask("c", "hello", sampling=pb.Sampling(max_tokens=2))
    rig.ask("c", long, sampling=pb.Sampling(max_tokens=2))
    assert len(tokenized_by) == 3
    assert all(each.startswith("text") for each in tokenized_by)
    rig.ask("c", "short", sampling=pb.Sampling(max_tokens=2))
    assert tokenized_by[-1].startswith("store")


@contextmanager
def old_history_being_tokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[DaemonRig, Future[Any]]]:
    """Hold a turn while the old history of its conversation is tokenized again, until the block ends."""
    head = [NewMessage("system", "Be brief.")]
    with ConversationStore.open(tmp_path / "data", "test") as store:
        store.create_conversation(NewConversation("old", "another", head))
    began, gate, tokens = threading.Event(), threading.Event(), OutdatedTokens.tokens

    def wait(outdated: OutdatedTokens) -> list[list[int]]:
        began.set()
        assert gate.wait(PATIENCE_SECONDS)
        return tokens(outdated)

    monkeypatch.setattr(OutdatedTokens, "tokens", wait)
    with DaemonRig(tmp_path / "data") as rig, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(rig.ask, "old", "hello", sampling=pb.Sampling(max_tokens=2))
        try:
            assert began.wait(PATIENCE_SECONDS)
            yield rig, answer
        finally:
            gate.set()


def test_retokenizing_a_history_blocks_no_other_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with old_history_being_tokenized(tmp_path, monkeypatch) as (rig, answer):
        rig.ask("other", "hello", sampling=pb.Sampling(max_tokens=2))
        assert not answer.done()
    assert answer.result().completed.revision == 1


def test_a_recreated_conversation_gets_no_tokens_of_the_deleted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with old_history_being_tokenized(tmp_path, monkeypatch) as (rig, answer):
        rig.stub.DeleteConversation(pb.DeleteConversationRequest(conversation_id="old"))
        request = pb.CreateConversationRequest(conversation_id="old", system_prompt="Be long.")
        rig.stub.CreateConversation(request)
        monkeypatch.setattr(rig.daemon.store, "replace_log", None)  # must not be called
    assert answer.result().completed.revision == 1
    with ConversationStore.open(tmp_path / "data", "test") as store:
        assert store.messages("old")[0].content == "Be long."
        assert store.verify() == []


def test_a_turn_overtakes_the_queued_jobs_of_a_flooding_tenant(rig: DaemonRig) -> None:
    """Another tenant has a hundred jobs in the queue. The turn begins after at most one of them."""
    before: list[int] = []
    done = Counter[int]()  # thread -> number of jobs
    history = rig.daemon.conversations._history
    begin = history.begin_if_short

    def note(*arguments: Any) -> Any:
        before.append(done[threading.get_ident()])
        return begin(*arguments)

    async def flood() -> None:
        for lane in rig.daemon.threads._lanes:
            for _ in range(100):
                job = lane.run("noisy", lambda: done.update([threading.get_ident()]))
                rig.daemon.threads.spawn(job)

    history.begin_if_short = note  # type: ignore[method-assign, assignment]
    with blocked_store(rig):
        rig.call(flood())
        stream = rig.send("c", "hello", sampling=pb.Sampling(max_tokens=2))
        wait_for(lambda: rig.daemon.conversations.arriving.num_turns == 1)
    assert list(stream)[-1].HasField("completed")
    assert len(before) == 1
    assert before[0] <= 1
