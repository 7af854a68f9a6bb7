"""Three real daemons behind one client, each with a separate history, which makes moves visible."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from pensieve.client import Client, Restarted
from pensieve.client.addresses import ranked
from pensieve.guard.exposure import Listening
from tests.client.several_rig import QUICK, AsyncCaller, SyncCaller
from tests.conversations.rig_daemon import ECHO, DaemonRig, wait_for

IDS = [f"talk-{number}" for number in range(40)]


class Daemons:
    """Rigs that can be stopped and restarted at the same address."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self._folder = folder
        self._program = (*ECHO, f"--seconds={seconds}")
        self._stack = contextlib.ExitStack()
        self.rigs: dict[str, contextlib.ExitStack] = {}
        for number in range(3):
            self._start(number, "127.0.0.1:0")

    def _start(self, number: int, address: str) -> None:
        data = self._folder / str(number)
        data.mkdir(exist_ok=True)
        rig = DaemonRig(
            data, listening=Listening(address, data / "admin.sock"), program=self._program
        )
        stack = contextlib.ExitStack()
        stack.enter_context(rig)
        self.rigs[rig.server.address] = stack
        self._stack.callback(stack.close)

    @property
    def addresses(self) -> list[str]:
        return list(self.rigs)

    def stop(self, address: str) -> None:
        self.rigs[address].close()

    def start(self, address: str) -> None:
        self._start(self.addresses.index(address), address)

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def daemons(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Daemons]:
    daemons = Daemons(tmp_path, getattr(request, "param", 0.0))
    yield daemons
    daemons.close()


def conversations_by_daemon(daemons: Daemons) -> dict[str, set[str]]:
    """Return the conversations of each running daemon."""
    known = {}
    for address in daemons.addresses:
        with Client(address, retry=QUICK) as client:
            if client.healthy():
                known[address] = {each.conversation_id for each in client.conversations()}
    return known


@pytest.mark.parametrize("kind", [SyncCaller, AsyncCaller], ids=["threads", "tasks"])
def test_conversations_of_a_stopped_daemon_move_and_return_with_it(
    kind: type[SyncCaller], daemons: Daemons
) -> None:
    home = {each: ranked(each, daemons.addresses)[0] for each in IDS}
    mine = {address: {each for each in IDS if home[each] == address} for address in home.values()}
    with kind(daemons.addresses) as client:
        for text in ("one", "two"):
            for each in IDS:
                assert client.ask(each, text, max_tokens=2).finish_reason == "length"
        assert conversations_by_daemon(daemons) == mine  # each conversation is on one daemon only
        gone = home[IDS[0]]
        daemons.stop(gone)
        for each in IDS:
            revision = client.ask(each, "three", max_tokens=2).revision
            # Histories are separate here, so a fallback starts a new history. A shared history would go on.
            assert revision == (1 if home[each] == gone else 3)
        assert client.slept == []
        moved = {each: ranked(each, daemons.addresses)[1] for each in mine[gone]}
        assert conversations_by_daemon(daemons) == {
            address: mine[address] | {each for each in moved if moved[each] == address}
            for address in mine
            if address != gone
        }
        daemons.start(gone)
        others = (f"other-{number}" for number in itertools.count())
        new_ids = (each for each in others if ranked(each, daemons.addresses)[0] == gone)

        def is_back() -> bool:
            """Return whether a new conversation whose home is `gone` begins there."""
            new_id = next(new_ids)
            client.ask(new_id, "zero", max_tokens=2)
            return new_id in conversations_by_daemon(daemons).get(gone, ())

        wait_for(is_back)
        for each in IDS:
            revision = client.ask(each, "four", max_tokens=2).revision
            assert revision == (3 if home[each] == gone else 4)


@pytest.mark.parametrize("daemons", [0.02], indirect=True)
@pytest.mark.parametrize("kind", [SyncCaller, AsyncCaller], ids=["threads", "tasks"])
def test_a_turn_whose_daemon_stops_halfway_is_answered_by_the_next_daemon(
    kind: type[SyncCaller], daemons: Daemons
) -> None:
    order = ranked("trip", daemons.addresses)

    def after(number: int) -> None:
        if number == 2:
            daemons.stop(order[0])

    with kind(daemons.addresses) as client:
        events = client.events("trip", "hello there", after, max_tokens=100)
        restarts = [index for index, each in enumerate(events) if isinstance(each, Restarted)]
        pieces = events[restarts[-1] + 1 :] if restarts else events
        text = "".join(str(each) for each in pieces)
    with Client(order[1]) as second:
        messages = list(second.conversation("trip").messages())
    assert [message.role for message in messages] == ["user", "assistant"]
    assert messages[0].text == "hello there"
    assert messages[1].text == text  # what the reader got after the restart, without repetition
