"""The SDK against a real daemon whose model is arithmetic."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pensieve import errors
from pensieve.client import AsyncClient, Client, Delta, Restarted, Retry
from pensieve.client.admin import Admin
from tests.conversations.rig_daemon import ECHO, DaemonRig, ServeProcess


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonRig]:
    with DaemonRig(tmp_path_factory.mktemp("client") / "data") as rig:
        yield rig


@pytest.fixture
def client(rig: DaemonRig) -> Iterator[Client]:
    with Client(rig.server.address, timeout=30) as client:
        yield client


def test_a_conversation_continues_by_its_id(client: Client) -> None:
    trip = client.conversation("trip-42")
    turn = trip.send("Where shall we go?", max_tokens=12, ignore_eos=True)
    pieces = list(turn)
    assert "".join(map(str, pieces)) == turn.reply.text
    assert turn.reply.finish_reason == "length"
    assert len(turn.reply.token_ids) == turn.reply.usage.output_tokens == 12
    reply = client.conversation("trip-42").ask("Why there?")
    assert reply.usage.device_tokens > 12
    messages = [(message.role, message.text) for message in trip.messages()]
    assert messages == [
        ("user", "Where shall we go?"),
        ("assistant", turn.reply.text),
        ("user", "Why there?"),
        ("assistant", reply.text),
    ]
    assert trip.get().revision == 2


def test_token_ids_of_the_messages_add_up_to_the_log(client: Client) -> None:
    talk = client.conversation()
    for text in ("one", "two"):
        talk.ask(text, max_tokens=5)
    messages = list(talk.messages(include_token_ids=True))
    position = 0
    for message in messages:
        assert message.first_token == position
        position += len(message.token_ids)
    assert position == talk.get().num_tokens


def test_forks_rewinds_and_deletions(client: Client) -> None:
    talk = client.conversation()
    talk.create(system_prompt="Be brief.", metadata={"user": "ada", "n": 3})
    first = talk.ask("one", max_tokens=5)
    talk.ask("two", max_tokens=5)
    branch = talk.fork(first.revision, metadata={"why": "try"})
    assert [m.text for m in branch.messages()] == [m.text for m in talk.messages()][:3]
    assert branch.get().metadata == {"why": "try"}
    with pytest.raises(errors.StaleRevision) as stale:
        talk.rewind(first.revision, expected_revision=first.revision)
    assert (stale.value.expected, stale.value.actual) == (1, 2)
    state = talk.rewind(first.revision, expected_revision=2)
    assert (state.num_messages, state.metadata) == (3, {"user": "ada", "n": 3})
    talk.delete()
    with pytest.raises(errors.NotFound):
        talk.get()
    assert branch.ask("three").revision == 2


def test_the_client_raises_the_same_error_class_as_the_daemon(client: Client) -> None:
    talk = client.conversation()
    with pytest.raises(errors.NotFound):
        talk.get()
    with pytest.raises(errors.NotFound):
        talk.ask("hello", create_if_missing=False)
    with pytest.raises(errors.InvalidArgument) as wrong:
        talk.ask("hello", top_p=3.0)
    assert wrong.value.field == "sampling.top_p"
    with pytest.raises(errors.StaleRevision) as stale:
        talk.ask("hello", expected_revision=9)
    assert (stale.value.expected, stale.value.actual) == (9, 0)
    talk.create()  # the refused call has not created a conversation
    with pytest.raises(errors.AlreadyExists):
        talk.create()
    with pytest.raises(errors.ContextFull) as full:
        talk.ask("word " * 120_000)
    assert full.value.tokens > full.value.tokens_max


def test_a_turn_survives_the_death_of_the_engine(tmp_path: Path) -> None:
    with (
        DaemonRig(tmp_path / "data", program=(*ECHO, "--seconds=0.005")) as rig,
        Client(rig.server.address, retry=Retry(first_seconds=0.05)) as client,
    ):
        talk = client.conversation()
        events = []
        killed = False
        for event in talk.send("hello", max_tokens=400, ignore_eos=True):
            events.append(event)
            if isinstance(event, Delta) and not killed:
                killed = True
                os.kill(rig.daemon.engine.pid or 0, signal.SIGKILL)
        restarts = [place for place, each in enumerate(events) if isinstance(each, Restarted)]
        assert len(restarts) == 1
        shown = events[restarts[0] + 1 :]
        assert sum(len(each.token_ids) for each in shown if isinstance(each, Delta)) == 400
        messages = [m.text for m in talk.messages()]
        assert messages == ["hello", "".join(map(str, shown))]


def test_a_turn_survives_kill_9_of_the_daemon(tmp_path: Path) -> None:
    process = ServeProcess(tmp_path / "data", engine="echo:0.005")
    address = process.start()
    process.arguments = (*process.arguments, "--address", address)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 1:
            process.start()

    with Client(address, sleep=sleep, retry=Retry(retries=20)) as client:
        talk = client.conversation("c")
        talk.ask("before", max_tokens=10)
        shown = ""
        for number, event in enumerate(talk.send("hello", max_tokens=400, ignore_eos=True)):
            shown = "" if isinstance(event, Restarted) else shown + str(event)
            if number == 5:
                process.kill()
        texts = [message.text for message in talk.messages()]
        assert slept
        assert texts[0] == "before"
        assert texts[2:] == ["hello", shown]
    assert process.stop() == 0


def test_an_address_without_a_server_is_unavailable_after_the_retries() -> None:
    slept: list[float] = []
    client = Client("127.0.0.1:1", retry=Retry(retries=2), sleep=slept.append)
    with client, pytest.raises(errors.Unavailable):
        client.conversation("c").ask("hello")
    assert len(slept) == 2
    with Client("127.0.0.1:1", retry=Retry(retries=0)) as client:
        assert not client.healthy()


def test_threads_may_share_a_client(client: Client) -> None:
    replies: dict[int, str] = {}

    def talk(number: int) -> None:
        conversation = client.conversation()
        for text in ("one", "two", "three"):
            replies[number] = conversation.ask(text, max_tokens=8).text

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(replies.values())) == 1  # equal messages have equal replies
    assert len(replies) == 12
    assert client.healthy()


def test_the_asyncio_twin(rig: DaemonRig) -> None:
    async def talk() -> None:
        async with AsyncClient(rig.server.address, timeout=30) as client:
            conversation = client.conversation()
            await conversation.create(system_prompt="Be brief.")
            pieces = [str(d) async for d in conversation.send("hi", max_tokens=9, ignore_eos=True)]
            reply = await conversation.ask("and?", request_id="r")
            again = await conversation.ask("and?", request_id="r")
            assert (again.text, again.replayed) == (reply.text, True)
            messages = [m async for m in conversation.messages(include_token_ids=True)]
            assert messages[2].text == "".join(pieces)
            branch = await conversation.fork(1)
            assert (await branch.get()).num_messages == 3
            await conversation.warm()
            assert (await conversation.rewind(0)).num_messages == 1
            with pytest.raises(errors.StaleRevision):
                await conversation.ask("x", expected_revision=77)
            assert not await conversation.cancel()
            await conversation.delete()
            assert await client.healthy()
            found = [state.conversation_id async for state in client.conversations()]
            assert branch.conversation_id in found
            replies = await asyncio.gather(
                *(client.conversation().ask("hi", max_tokens=20) for _ in range(20))
            )
            assert len({reply.text for reply in replies}) == 1

    asyncio.run(talk())


def test_the_operator_sees_what_the_daemon_holds(rig: DaemonRig, client: Client) -> None:
    client.conversation("seen").ask("hello", max_tokens=100, ignore_eos=True)
    socket = f"unix:{rig._arguments[0] / 'admin.sock'}"
    with Admin(socket) as admin:
        assert admin.stats().serving
        assert next(admin.watch(0.1)).daemon_seconds > 0
        assert "seen" in [each.conversation_id for each in admin.cached(limit=100)]
        assert [run.place for run in admin.explain("seen").runs] == ["device"]
        assert admin.evict("seen") == 4
        assert admin.check() == []
    with Admin(rig.server.address) as stranger, pytest.raises(errors.PermissionDenied):
        stranger.stats()
