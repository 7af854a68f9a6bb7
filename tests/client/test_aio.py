"""The async client keeps the promises of the sync client, and promises that concern tasks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator

import pytest

from pensieve import errors
from pensieve.client import AsyncClient, AsyncConversation, Restarted, Retry
from tests.client.scripted import AWAY, Mishap, Refusal, ScriptedServer

SAFETY_SECONDS = 60.0
Script = Callable[[AsyncClient], Awaitable[None]]


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


def run(server: ScriptedServer, script: Script) -> list[float]:
    """Run a script with a client. Return how long it slept between tries."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    retry = Retry(retries=3, first_seconds=1.0, most_seconds=8.0, drawn=lambda: 1.0)
    client = AsyncClient(server.address, token="t", retry=retry, sleep=sleep)  # outside any loop

    async def main() -> None:
        async with client:
            await script(client)

    asyncio.run(main())
    return slept


async def wait_for_abandoned(server: ScriptedServer) -> str:
    return await asyncio.to_thread(server.abandoned.get, timeout=SAFETY_SECONDS)


def test_a_lost_turn_restarts(server: ScriptedServer) -> None:
    async def script(client: AsyncClient) -> None:
        server.mishaps.append(Mishap(after=1, lost=True))
        events = [event async for event in client.conversation("c").send("a b")]
        assert [str(event) for event in events] == ["a ", "", "A ", "B "]
        assert events[1] == Restarted(2)
        server.mishaps.append(Mishap(after=1, lost=True))
        assert (await client.conversation("c").ask("c d")).text == "C D "

    run(server, script)


def test_retries_are_limited_and_wait_as_long_as_the_server_asks(server: ScriptedServer) -> None:
    async def script(client: AsyncClient) -> None:
        server.mishaps.extend([Mishap(after=1, lost=True)] * 9)
        turn = client.conversation("c").send("a b")
        for _ in range(2):
            with pytest.raises(errors.Unavailable):
                await turn.reply()
        assert len(server.calls) == 4
        server.mishaps.clear()
        server.refusals.append(Refusal("UNAVAILABLE", "UNAVAILABLE", retry_seconds=9))
        await client.conversation("c").get()

    assert run(server, script) == [1.0, 2.0, 4.0, 9.0]


def test_methods_for_conversations_and_health(server: ScriptedServer) -> None:
    async def script(client: AsyncClient) -> None:
        talk = client.conversation("c")
        assert (await talk.create(system_prompt="Be brief.")).revision == 0
        await talk.ask("one two")
        await talk.ask("three")
        server.refusals.append(AWAY)
        texts = [message.text async for message in talk.messages(include_token_ids=True)]
        assert texts == ["Be brief.", "one two", "one two", "three", "three"]
        branch = await talk.fork(1)
        assert (await branch.get()).revision == 1
        assert (await talk.rewind(1)).revision == 3
        await talk.warm()
        assert not await talk.cancel()
        ids = [state.conversation_id async for state in client.conversations()]
        assert ids == [branch.conversation_id, "c"]
        assert await client.healthy()
        await talk.delete()
        with pytest.raises(errors.NotFound):
            await talk.get()
        server.calls.clear()
        server.refusals.append(AWAY)
        with pytest.raises(errors.Unavailable):
            await branch.fork()
        assert server.names() == ["ForkConversation"]

    run(server, script)


def test_errors_and_deadlines(server: ScriptedServer) -> None:
    async def script(client: AsyncClient) -> None:
        talk = client.conversation("c")
        server.mishaps.append(Mishap(after=1, stalls=True))
        with pytest.raises(errors.DeadlineExceeded, match=r"0\.05 s"):
            await talk.ask("a b", timeout=0.05)
        other = client.conversation("d")
        server.mishaps.append(Mishap(after=1, stalls=True))
        async with other.send("a b") as first:
            await anext(first)
            with pytest.raises(errors.TurnRunning) as running:
                await other.ask("me too")
            assert running.value.turn_id == first.turn_id
        with pytest.raises(errors.InvalidArgument, match="surrogate"):
            other.send("\udc00")

    run(server, script)


def test_leaving_the_loop_or_closing_the_turn_abandons_it(server: ScriptedServer) -> None:
    async def script(client: AsyncClient) -> None:
        server.mishaps.extend([Mishap(after=1, stalls=True)] * 2)
        async for _ in client.conversation("c").send("a b", request_id="left"):
            break
        assert await wait_for_abandoned(server) == "left"
        turn = client.conversation("d").send("a b", request_id="closed")
        await anext(turn)
        await turn.close()
        assert await wait_for_abandoned(server) == "closed"
        with pytest.raises(errors.TurnInterrupted):
            await turn.reply()

    run(server, script)


def test_cancelling_a_task_ends_its_turn(server: ScriptedServer) -> None:
    async def script(client: AsyncClient) -> None:
        stalled = threading.Event()
        server.mishaps.append(Mishap(after=1, stalls=True, on_stall=stalled.set))
        turn = client.conversation("c").send("a b c", request_id="r")
        task = asyncio.create_task(turn.reply())
        assert await asyncio.to_thread(stalled.wait, SAFETY_SECONDS)
        # The server has sent the word, but the task may not have read it yet.
        while not turn._course.progress.num_tokens:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await wait_for_abandoned(server) == "r"
        (ended,) = server.requests("CancelTurn")
        assert (ended.request_id, ended.keep_tokens, ended.attempt) == ("r", 1, 1)
        with pytest.raises(errors.TurnInterrupted, match="the delivered part"):
            await turn.reply()

    run(server, script)


@pytest.mark.parametrize("waits", ["turn", "call"])
def test_closing_the_client_cancels_no_task(server: ScriptedServer, waits: str) -> None:
    async def script(client: AsyncClient) -> None:
        talk: AsyncConversation = client.conversation("c")
        stalled = threading.Event()
        if waits == "turn":
            server.mishaps.append(Mishap(after=1, stalls=True, on_stall=stalled.set))
            task = asyncio.create_task(talk.ask("a b"))
        else:
            server.hold(stalled)
            task = asyncio.create_task(talk.get())  # type: ignore[arg-type]
        assert await asyncio.to_thread(stalled.wait, SAFETY_SECONDS)
        await client.close()
        with pytest.raises(errors.InvalidArgument, match="client: was closed"):
            await task
        assert not task.cancelled()
        with pytest.raises(errors.InvalidArgument, match="client: is closed"):
            await talk.get()

    run(server, script)


@pytest.mark.parametrize("waits", ["turn", "call"])
def test_a_task_cancelled_while_the_client_closes_raises_cancelled_error(
    server: ScriptedServer, waits: str
) -> None:
    async def script(client: AsyncClient) -> None:
        talk: AsyncConversation = client.conversation("c")
        stalled = threading.Event()
        if waits == "turn":
            server.mishaps.append(Mishap(after=1, stalls=True, on_stall=stalled.set))
            task = asyncio.create_task(talk.ask("a b"))
        else:
            server.hold(stalled)
            task = asyncio.create_task(talk.get())  # type: ignore[arg-type]
        assert await asyncio.to_thread(stalled.wait, SAFETY_SECONDS)
        task.cancel()  # the task notices this and the close at the same time
        await client.close()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()

    run(server, script)


def test_many_tasks_share_one_client(server: ScriptedServer) -> None:
    async def script(client: AsyncClient) -> None:
        server.mishaps.extend([Mishap(after=1)] * 5)
        texts = await asyncio.gather(
            *(client.conversation(f"c{n}").ask(f"{n} is my number") for n in range(15))
        )
        assert [reply.text for reply in texts] == [f"{n} is my number " for n in range(15)]

    run(server, script)
