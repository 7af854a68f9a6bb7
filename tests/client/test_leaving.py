"""Every way to stop a turn early stops it at the daemon, and the next message can be sent at once.

The daemon's grace period is so long that no turn here ends because of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pensieve import errors
from pensieve.client import (
    AsyncClient,
    AsyncConversation,
    AsyncTurn,
    Client,
    Conversation,
    Delta,
    Message,
    Restarted,
    Turn,
    aio_connection,
    connection,
    retry,
    turn_progress,
)
from pensieve.client.retry import Deadline
from pensieve.conversations.daemon_config import DaemonConfig
from tests.conversations.proxy import Proxy
from tests.conversations.rig_daemon import ECHO, DaemonRig, wait_for

Piece = Delta | Restarted
Leave = Callable[[Conversation], list[Piece]]  # leaves a turn, returns the pieces it received
LeaveAsync = Callable[[AsyncConversation], Awaitable[list[Piece]]]
NUM_PIECES = 4


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonRig]:
    config = DaemonConfig(grace_seconds=3600)
    data = tmp_path_factory.mktemp("leaving") / "data"
    with DaemonRig(data, config=config, program=(*ECHO, "--seconds=0.005")) as rig:
        yield rig


def await_ends_patiently(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the client wait longer for the end of a turn: a busy machine may answer late."""
    for module in (aio_connection, connection, turn_progress):
        monkeypatch.setattr(module, "END_SECONDS", 60.0)


@pytest.fixture(autouse=True)
def patient_client(monkeypatch: pytest.MonkeyPatch) -> None:
    await_ends_patiently(monkeypatch)


def endless(talk: Conversation, **options: object) -> Turn:
    return talk.send("hello", max_tokens=90_000, ignore_eos=True, **options)  # type: ignore[arg-type]


def endless_async(talk: AsyncConversation, **options: object) -> AsyncTurn:
    return talk.send("hello", max_tokens=90_000, ignore_eos=True, **options)  # type: ignore[arg-type]


def expire(turn: Turn | AsyncTurn) -> None:
    """Let the turn time out soon, however long it took until now."""
    turn._course.deadline = Deadline(0.1)
    turn._detach()  # the next stream has the new deadline


def check_kept(reply: Message, pieces: list[Piece]) -> None:
    """Check that the history has the received text, perhaps followed by text that was held back."""
    deltas = [piece for piece in pieces if isinstance(piece, Delta)]
    assert reply.token_ids == tuple(token_id for delta in deltas for token_id in delta.token_ids)
    assert reply.text.startswith("".join(map(str, deltas)))
    assert reply.finish_reason == "cancelled"


# -- threads --


def by_close(talk: Conversation) -> list[Piece]:
    turn = endless(talk)
    pieces = [next(turn) for _ in range(NUM_PIECES)]
    turn.close()
    return pieces


def by_the_end_of_a_with(talk: Conversation) -> list[Piece]:
    with endless(talk) as turn:
        return [next(turn) for _ in range(NUM_PIECES)]


def by_a_break(talk: Conversation) -> list[Piece]:
    pieces: list[Piece] = []
    for piece in endless(talk):
        pieces.append(piece)
        if len(pieces) == NUM_PIECES:
            break
    return pieces


def by_an_error_in_the_loop(talk: Conversation) -> list[Piece]:
    pieces: list[Piece] = []
    with contextlib.suppress(KeyError):
        for piece in endless(talk):
            pieces.append(piece)
            if len(pieces) == NUM_PIECES:
                raise KeyError
    return pieces


def by_ctrl_c_in_the_body(talk: Conversation) -> list[Piece]:
    pieces: list[Piece] = []
    with contextlib.suppress(KeyboardInterrupt), endless(talk) as turn:
        for piece in turn:
            pieces.append(piece)
            if len(pieces) == NUM_PIECES:
                raise KeyboardInterrupt
    return pieces


def by_a_timeout(talk: Conversation) -> list[Piece]:
    turn = endless(talk, timeout=60)
    pieces = [next(turn) for _ in range(NUM_PIECES)]
    expire(turn)
    with pytest.raises(errors.DeadlineExceeded, match="the delivered part of it is in the history"):
        pieces.extend(turn)
    with pytest.raises(errors.DeadlineExceeded):  # raised again on later use
        _ = turn.reply
    return pieces


def by_the_end_of_the_client(talk: Conversation) -> list[Piece]:
    with Client(talk.client.address) as other:
        turn = endless(other.conversation(talk.conversation_id))
        return [next(turn) for _ in range(NUM_PIECES)]


WAYS: list[Leave] = [
    by_close,
    by_the_end_of_a_with,
    by_a_break,
    by_an_error_in_the_loop,
    by_ctrl_c_in_the_body,
    by_a_timeout,
    by_the_end_of_the_client,
]


@pytest.mark.parametrize("leave", WAYS, ids=lambda way: way.__name__)
def test_delivered_text_is_kept_and_the_next_message_is_answered(
    rig: DaemonRig, leave: Leave
) -> None:
    with Client(rig.server.address) as client:
        talk = client.conversation()
        pieces = leave(talk)
        assert talk.ask("again", max_tokens=3).finish_reason in ("length", "stop")
        messages = list(talk.messages(include_token_ids=True))
        assert [message.text for message in messages][::2] == ["hello", "again"]
        check_kept(messages[1], pieces)


def test_an_ask_that_times_out_leaves_nothing_in_the_history(rig: DaemonRig) -> None:
    with Client(rig.server.address) as client:
        talk = client.conversation()
        for text in ("hello", "hello"):
            with pytest.raises(errors.DeadlineExceeded, match="nothing of it is in the history"):
                talk.ask(text, max_tokens=90_000, ignore_eos=True, timeout=0.2)
        assert talk.ask("again", max_tokens=3).revision == 1
        assert next(message.text for message in talk.messages()) == "again"


def test_ask_with_keep_partial_keeps_the_delivered_text(rig: DaemonRig) -> None:
    with Client(rig.server.address) as client:
        talk = client.conversation()
        assert client.healthy()  # connects, so that the timeout covers only the turn
        with pytest.raises(errors.DeadlineExceeded, match="the delivered part"):
            talk.ask("hello", max_tokens=90_000, ignore_eos=True, timeout=8, keep_partial=True)
        assert [message.finish_reason for message in talk.messages()] == ["", "cancelled"]


def test_a_stopped_turn_with_keep_partial_false_leaves_nothing(rig: DaemonRig) -> None:
    with Client(rig.server.address) as client:
        talk = client.conversation()
        with endless(talk, keep_partial=False) as turn:
            for _ in range(NUM_PIECES):
                next(turn)
        with pytest.raises(
            errors.TurnInterrupted, match=r"stopped.*nothing of it is in the history"
        ):
            _ = turn.reply
        assert list(talk.messages()) == []
        assert talk.ask("again", max_tokens=3).revision == 1


def test_a_turn_stopped_before_its_first_token_leaves_nothing(tmp_path: Path) -> None:
    program = (*ECHO, "--seconds=0.5")
    config = DaemonConfig(grace_seconds=3600)
    with (
        DaemonRig(tmp_path / "data", config=config, program=program) as rig,
        Client(rig.server.address) as client,
    ):
        talk = client.conversation()
        with pytest.raises(errors.DeadlineExceeded, match="nothing"):
            list(endless(talk, timeout=0.05))
        assert talk.ask("again", max_tokens=1).revision == 1
        assert len(list(talk.messages())) == 2


def test_closing_a_turn_that_was_never_read_sends_no_request(rig: DaemonRig) -> None:
    with Client(rig.server.address) as client:
        talk = client.conversation("unread")
        endless(talk).close()
        with endless(talk):
            pass
        with pytest.raises(errors.NotFound):
            talk.get()


def test_ctrl_c_while_waiting_for_a_delta_ends_the_turn(tmp_path: Path) -> None:
    main = threading.main_thread().ident
    assert main is not None
    config = DaemonConfig(grace_seconds=3600)
    with (
        DaemonRig(tmp_path / "data", config=config, program=(*ECHO, "--seconds=0.5")) as rig,
        Client(rig.server.address) as client,
    ):
        talk = client.conversation()
        interrupted = threading.Event()

        def press() -> None:  # when the main thread waits for a piece, outside gRPC's locks
            wait_for(lambda: rig.num_live)
            while not interrupted.is_set():  # Python loses a signal that arrives in a callback
                while sys._current_frames()[main].f_code is not threading.Condition.wait.__code__:
                    time.sleep(0.001)
                signal.pthread_kill(main, signal.SIGINT)
                interrupted.wait(10)

        presser = threading.Thread(target=press)
        presser.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                talk.ask("hello", max_tokens=90_000, ignore_eos=True)
        finally:
            interrupted.set()
            presser.join()
        assert talk.ask("again", max_tokens=1).revision == 1


def test_a_conversation_can_be_rewound_or_forked_right_after_a_turn_is_left(rig: DaemonRig) -> None:
    with Client(rig.server.address) as client:
        talk = client.conversation()
        talk.ask("first", max_tokens=2)
        by_a_break(talk)
        assert talk.rewind(1).num_messages == 2
        by_a_break(talk)
        assert talk.get().running_turn_id == ""
        by_a_break(talk)
        assert len(list(talk.fork().messages())) == 6


def test_a_message_during_another_clients_turn_raises_turn_running(rig: DaemonRig) -> None:
    with Client(rig.server.address) as client, Client(rig.server.address) as other:
        with endless(client.conversation("busy")) as turn:
            next(turn)
            with pytest.raises(errors.TurnRunning) as running:
                other.conversation("busy").ask("me too")
            with pytest.raises(errors.TurnRunning):
                client.conversation("busy").ask("me too")
            assert running.value.turn_id == turn.turn_id
        assert other.conversation("busy").ask("me too", max_tokens=2).revision == 2


def test_cancel_inside_a_with_block_keeps_all_generated_text(rig: DaemonRig) -> None:
    with Client(rig.server.address) as client:
        talk = client.conversation()
        with endless(talk, keep_partial=False) as turn:
            next(turn)
            assert turn.cancel()
        assert [message.finish_reason for message in talk.messages()] == ["", "cancelled"]


def test_closing_a_turn_does_not_wait_long_for_a_hanging_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon stops the turn when it notices that no client reads. Until then, messages wait or fail."""
    monkeypatch.setattr(connection, "END_SECONDS", retry.END_SECONDS)
    with DaemonRig(tmp_path / "data", program=(*ECHO, "--seconds=0.005")) as rig:
        with closing(Proxy(rig.server.address)) as proxy, Client(proxy.address) as client:
            talk = client.conversation()
            turn = endless(talk)
            next(turn)
            proxy.freeze()
            turn.close()
            with pytest.raises(errors.TurnInterrupted, match="did not confirm"):
                _ = turn.reply
        wait_for(lambda: not rig.num_live)


def test_a_broken_connection_does_not_end_the_turn(rig: DaemonRig) -> None:
    with closing(Proxy(rig.server.address)) as proxy, Client(proxy.address) as client:
        talk = client.conversation()
        turn = talk.send("hello", max_tokens=200, ignore_eos=True)
        pieces = [str(next(turn)) for _ in range(NUM_PIECES)]
        proxy.reset()
        pieces += [str(piece) for piece in turn]
        assert turn.reply.finish_reason == "length"
        assert [message.text for message in talk.messages()] == ["hello", "".join(pieces)]


# -- asyncio --


async def read(turn: AsyncTurn, pieces: list[Piece]) -> None:
    async for piece in turn:
        pieces.append(piece)


async def task_by_close(talk: AsyncConversation) -> list[Piece]:
    turn = endless_async(talk)
    pieces = [await anext(turn) for _ in range(NUM_PIECES)]
    await turn.close()
    return pieces


async def task_by_the_end_of_a_with(talk: AsyncConversation) -> list[Piece]:
    async with endless_async(talk) as turn:
        return [await anext(turn) for _ in range(NUM_PIECES)]


async def task_by_a_break(talk: AsyncConversation) -> list[Piece]:
    pieces: list[Piece] = []
    async for piece in endless_async(talk):
        pieces.append(piece)
        if len(pieces) == NUM_PIECES:
            break
    return pieces


async def task_by_the_end_of_a_generator(talk: AsyncConversation) -> list[Piece]:
    async def generated() -> AsyncIterator[Piece]:
        async with endless_async(talk) as turn:
            async for piece in turn:
                yield piece

    pieces: list[Piece] = []
    generator = generated()
    async for piece in generator:
        pieces.append(piece)
        if len(pieces) == NUM_PIECES:
            break
    await generator.aclose()  # type: ignore[attr-defined]
    return pieces


async def task_by_a_timeout(talk: AsyncConversation) -> list[Piece]:
    turn = endless_async(talk, timeout=60)
    pieces = [await anext(turn) for _ in range(NUM_PIECES)]
    expire(turn)
    with pytest.raises(errors.DeadlineExceeded, match="the delivered part of it is in the history"):
        await read(turn, pieces)
    return pieces


async def task_by_asyncios_timeout(talk: AsyncConversation) -> list[Piece]:
    pieces: list[Piece] = []

    async def read_some() -> None:
        async with asyncio.timeout(None) as limit:
            async for piece in endless_async(talk):
                pieces.append(piece)
                if len(pieces) == NUM_PIECES:
                    limit.reschedule(asyncio.get_running_loop().time())

    with pytest.raises(TimeoutError):
        await read_some()
    return pieces


async def task_by_a_cancelled_task(talk: AsyncConversation) -> list[Piece]:
    pieces: list[Piece] = []
    task = asyncio.create_task(read(endless_async(talk), pieces))
    while len(pieces) < NUM_PIECES:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return pieces


async def task_by_the_end_of_the_client(talk: AsyncConversation) -> list[Piece]:
    async with AsyncClient(talk.client.address) as other:
        turn = endless_async(other.conversation(talk.conversation_id))
        return [await anext(turn) for _ in range(NUM_PIECES)]


TASK_WAYS: list[LeaveAsync] = [
    task_by_close,
    task_by_the_end_of_a_with,
    task_by_a_break,
    task_by_the_end_of_a_generator,
    task_by_a_timeout,
    task_by_asyncios_timeout,
    task_by_a_cancelled_task,
    task_by_the_end_of_the_client,
]


@pytest.mark.parametrize("leave", TASK_WAYS, ids=lambda way: way.__name__)
def test_delivered_text_is_kept_when_a_task_leaves_a_turn(
    rig: DaemonRig, leave: LeaveAsync
) -> None:
    async def talk() -> None:
        async with AsyncClient(rig.server.address) as client:
            talk = client.conversation()
            pieces = await leave(talk)
            assert (await talk.ask("again", max_tokens=3)).revision == 2
            messages = [each async for each in talk.messages(include_token_ids=True)]
            assert [message.text for message in messages][::2] == ["hello", "again"]
            check_kept(messages[1], pieces)

    asyncio.run(talk())


def test_cancelling_a_task_during_ask_leaves_nothing(rig: DaemonRig) -> None:
    async def talk() -> None:
        async with AsyncClient(rig.server.address) as client:
            talk = client.conversation()
            for _ in range(2):
                asking = talk.ask("hello", max_tokens=90_000, ignore_eos=True)
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(asking, 0.2)
            assert (await talk.ask("again", max_tokens=3)).revision == 1
            async with endless_async(talk, keep_partial=False) as turn:
                await anext(turn)
            assert len([message async for message in talk.messages()]) == 2

    asyncio.run(talk())


# -- between two steps of a turn that begins --


Open = Callable[..., object]


def test_an_interrupt_just_after_the_request_was_sent_ends_the_turn(
    rig: DaemonRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(rig.server.address) as client:
        talk, opened = client.conversation(), []
        open_stream: Open = client._connection.stream

        def open_and_interrupt(*arguments: object) -> None:
            opened.append(open_stream(*arguments))
            wait_for(lambda: rig.num_live)
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(client._connection, "stream", open_and_interrupt)
            with pytest.raises(KeyboardInterrupt):
                next(endless(talk))
        assert talk.ask("again", max_tokens=3).revision == 1


@pytest.mark.parametrize("step", ["wait_for_endings", "stream"])
def test_a_turn_closed_just_before_its_request_is_sent_ends(
    rig: DaemonRig, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    with Client(rig.server.address) as client:
        talk = client.conversation()
        turn, take_step = endless(talk), getattr(client._connection, step)

        def close_first(*arguments: object) -> object:
            turn.close()  # another thread may do this
            return take_step(*arguments)

        with monkeypatch.context() as patched:
            patched.setattr(client._connection, step, close_first)
            assert list(turn) == []
        with pytest.raises(errors.TurnInterrupted, match="nothing of it is in the history"):
            _ = turn.reply
        assert talk.ask("again", max_tokens=3).revision == 1


@pytest.mark.parametrize("step", ["wait_for_endings", "stream"])
def test_an_async_turn_closed_just_before_its_request_is_sent_ends(
    rig: DaemonRig, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    async def talk() -> None:
        async with AsyncClient(rig.server.address) as client:
            talk = client.conversation()
            turn, take_step = endless_async(talk), getattr(client._connection, step)
            closing: list[asyncio.Task[None]] = []

            async def close_and_await(*arguments: object) -> None:
                await turn.close()
                await take_step(*arguments)

            def close_first(*arguments: object) -> object:
                closing.append(asyncio.create_task(turn.close()))
                return take_step(*arguments)

            with monkeypatch.context() as patched:
                patched.setattr(
                    client._connection, step, close_first if step == "stream" else close_and_await
                )
                pieces: list[Piece] = []
                await read(turn, pieces)
                assert pieces == []
            assert (await talk.ask("again", max_tokens=3)).revision == 1

    asyncio.run(talk())


# -- errors of a turn that was left --


def test_the_error_of_a_turn_that_was_never_sent_says_only_that(rig: DaemonRig) -> None:
    with Client(rig.server.address) as client:
        turn = endless(client.conversation())
        turn.close()
        with pytest.raises(
            errors.TurnInterrupted, match=r"stopped before its end; it was not sent$"
        ):
            _ = turn.reply


def test_if_another_thread_closes_a_turn_the_readers_error_says_what_is_kept(
    rig: DaemonRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(rig.server.address) as client:
        turn = endless(client.conversation())
        next(turn)
        end_turn = client._connection.end_turn
        has_answered, reader_failed = threading.Event(), threading.Event()

        def slowly(*ending: Any) -> object:  # the server's answer arrives after the reader's error
            answer = end_turn(*ending)
            if threading.current_thread() is closer:
                has_answered.set()
                reader_failed.wait(10)
            return answer

        monkeypatch.setattr(client._connection, "end_turn", slowly)
        closer = threading.Thread(target=turn.close)
        closer.start()
        has_answered.wait(10)
        try:
            with pytest.raises(errors.TurnInterrupted, match="the delivered part of it is in the"):
                _ = turn.reply
        finally:
            reader_failed.set()
            closer.join()
