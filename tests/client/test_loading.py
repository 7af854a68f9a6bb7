"""The client waits for a server that is loading its model, however long that takes."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pensieve import errors
from pensieve.client import AsyncClient, Client, Restarted, Retry
from tests.client.scripted import AWAY, Mishap, Refusal, ScriptedServer
from tests.conversations.rig_daemon import ECHO, DaemonRig, wait_for

LOADING = Refusal("UNAVAILABLE", "LOADING", retry_seconds=1.0)
MANY = 30  # pauses, many more than the retries
WAITS = 'while [ ! -e "$0" ]; do sleep 0.02; done; exec "$@"'  # waits until the file $0 exists


@contextmanager
def loading(data: Path) -> Iterator[tuple[DaemonRig, Callable[[], None]]]:
    """A daemon whose engine loads its model until the test releases it."""
    gate = data.with_suffix(".gate")
    rig = DaemonRig(data, program=("sh", "-c", WAITS, str(gate), *ECHO))
    starting = threading.Thread(target=rig.__enter__)
    starting.start()
    try:
        wait_for(lambda: getattr(rig, "server", None) is not None and rig.server.address)
        yield rig, gate.touch
    finally:
        gate.touch()
        starting.join()
        rig.__exit__(None, None, None)


def test_clients_wait_for_a_daemon_that_loads_its_model(tmp_path: Path) -> None:
    slept: list[float] = []
    with loading(tmp_path / "data") as (rig, finish_loading):

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            if len(slept) == MANY:
                finish_loading()
                wait_for(lambda: rig.daemon.serving)

        with Client(rig.server.address, sleep=sleep) as client:
            talk = client.conversation()
            assert talk.create(system_prompt="Be brief.").revision == 0
            assert talk.ask("hello", max_tokens=3).revision == 1
    assert len(slept) == MANY
    assert min(slept) >= 1.0  # no busy waiting


def test_a_turn_survives_an_engine_restart_that_loads_for_long(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    program = ("sh", "-c", WAITS, str(gate), *ECHO, "--seconds=0.005")
    slept: list[float] = []
    with DaemonRig(tmp_path / "data", program=program) as rig:

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            if len(slept) < MANY:
                wait_for(lambda: not rig.daemon.serving)
            elif len(slept) == MANY:
                gate.touch()
                wait_for(lambda: rig.daemon.serving)

        with Client(rig.server.address, sleep=sleep) as client:
            turn = client.conversation("c").send("hello", max_tokens=400, ignore_eos=True)
            events = [next(turn)]
            gate.unlink()
            os.kill(rig.daemon.engine.pid or 0, signal.SIGKILL)
            events += list(turn)
            assert sum(isinstance(event, Restarted) for event in events) == 1
            assert (len(turn.reply.token_ids), turn.reply.revision) == (400, 1)
    assert len(slept) >= MANY


def test_the_async_client_waits_while_a_daemon_loads_its_model(tmp_path: Path) -> None:
    async def talk() -> None:
        slept: list[float] = []
        with loading(tmp_path / "data") as (rig, finish_loading):

            async def sleep(seconds: float) -> None:
                slept.append(seconds)
                if len(slept) == MANY:
                    finish_loading()
                    await asyncio.to_thread(wait_for, lambda: rig.daemon.serving)

            async with AsyncClient(rig.server.address, sleep=sleep) as client:
                conversation = client.conversation()
                await conversation.create(system_prompt="Be brief.")
                assert (await conversation.ask("hello", max_tokens=3)).revision == 1
        assert len(slept) == MANY

    asyncio.run(talk())


def test_a_turn_can_be_left_while_the_daemon_loads(tmp_path: Path) -> None:
    with loading(tmp_path / "data") as (rig, _), Client(rig.server.address) as client:
        turn = client.conversation().send("hello", timeout=60)

        def interrupt(seconds: float) -> None:
            raise KeyboardInterrupt

        turn._sleep = interrupt
        with pytest.raises(KeyboardInterrupt):
            next(turn)
        with pytest.raises(errors.TurnInterrupted, match="nothing of it is in the history"):
            _ = turn.reply


def test_a_timeout_during_loading_raises_the_loading_error(tmp_path: Path) -> None:
    # The pause before the next try is 60 s, longer than the timeouts.
    retry = Retry(drawn=lambda: 59.0)
    with (
        loading(tmp_path / "data") as (rig, _),
        Client(rig.server.address, retry=retry) as client,
    ):
        with pytest.raises(errors.Loading, match="loading"):
            client.conversation().ask("hello", timeout=30)
        with pytest.raises(errors.Loading):
            client.conversation().create(timeout=30)


# -- when and how long --


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


def test_waiting_for_loading_uses_no_retries(server: ScriptedServer) -> None:
    slept: list[float] = []
    retry = Retry(retries=3, first_seconds=0.5, drawn=lambda: 1.0)
    server.mishaps.extend([Mishap()] * 3 + [Mishap(refusal=LOADING)] * 9 + [Mishap()] * 3)
    with Client(server.address, retry=retry, sleep=slept.append) as client:
        assert client.conversation("c").ask("a b").text == "a b "
    assert slept == [0.5, 1.0, 2.0, *[2.0] * 9, 0.5, 1.0, 2.0]


def test_the_client_gives_up_if_loading_never_ends(server: ScriptedServer) -> None:
    slept: list[float] = []
    retry = Retry(loading_seconds=10.0, drawn=lambda: 1.0)
    server.mishaps.extend([Mishap(refusal=LOADING)] * 99)
    with (
        Client(server.address, retry=retry, sleep=slept.append) as client,
        pytest.raises(errors.Loading),
    ):
        client.conversation("c").ask("a b")
    assert slept == [2.0] * 5


def test_with_retries_0_the_client_does_not_wait_for_loading(server: ScriptedServer) -> None:
    server.mishaps.append(Mishap(refusal=LOADING))
    server.refusals.append(LOADING)
    with Client(server.address, retry=Retry(retries=0)) as client:
        with pytest.raises(errors.Loading):
            client.conversation("c").ask("a b")
        with pytest.raises(errors.Loading):
            client.conversation("c").create()


def test_calls_that_are_not_retried_still_wait_for_loading(server: ScriptedServer) -> None:
    slept: list[float] = []
    server.refusals.extend([LOADING, LOADING, AWAY])
    client = Client(server.address, retry=Retry(), sleep=slept.append)
    with client, pytest.raises(errors.Unavailable):
        client.conversation("c").create()
    assert (len(slept), server.names()) == (2, ["CreateConversation"] * 3)
