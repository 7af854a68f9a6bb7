"""Each acknowledged turn is in the history exactly once, whatever the client and its connections do.

A model records the acknowledged turns. Turns are begun, read, joined, retried, cancelled, stopped and cut
off in any order, by the sync and the async client.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from pensieve import errors
from pensieve.client import AsyncClient, Client, Delta, Reply, Restarted, Retry
from pensieve.conversations.daemon_config import DaemonConfig
from tests.client.test_leaving import await_ends_patiently
from tests.conversations.proxy import Proxy
from tests.conversations.rig_daemon import ECHO, DaemonRig
from tests.scale import SCALE, SEED

PATIENT = Retry(retries=100, first_seconds=0.001, most_seconds=0.05)
NAMES = ("a", "b")


class Person:
    """A sync or async client behind connections that can be cut."""

    def __init__(self, kind: type[Any], address: str) -> None:
        self._runner = asyncio.Runner()
        self._proxy = Proxy(address)
        self.client: Any = kind(self._proxy.address, retry=PATIENT)
        self.cut = self._proxy.reset

    def do(self, called: Any) -> Any:
        """Return the result of a call, which is a coroutine with the async client."""
        return self._runner.run(called) if inspect.iscoroutine(called) else called

    def next(self, turn: Any) -> Delta | Restarted | None:
        """Return the turn's next event, or None at the end."""
        if hasattr(turn, "__next__"):
            return next(turn, None)

        async def following() -> Any:
            return await anext(turn, None)

        return self._runner.run(following())

    def reply(self, turn: Any) -> Reply:
        found: Reply = self.do(turn.reply() if callable(turn.reply) else turn.reply)
        return found

    def close(self) -> None:
        self.do(self.client.close())
        self._proxy.close()
        self._runner.close()


@dataclass
class OpenTurn:
    """A turn whose reader has not reached the end."""

    name: str
    text: str
    options: dict[str, Any]
    turn: Any
    pieces: list[Delta] = field(default_factory=list)
    is_cancelled: bool = False

    @property
    def seen(self) -> str:
        return "".join(map(str, self.pieces))


class ClientMachine(RuleBasedStateMachine):
    rig: ClassVar[DaemonRig]
    kind: ClassVar[type[Any]]
    num_made: ClassVar[int] = 0
    happened: ClassVar[defaultdict[str, int]] = defaultdict(int)

    def __init__(self) -> None:
        super().__init__()
        self.person, self.other = (Person(self.kind, self.rig.server.address) for _ in range(2))
        self.open: dict[str, OpenTurn] = {}
        self.history: dict[str, list[tuple[str, str]]] = {name: [] for name in NAMES}
        self.latest: dict[str, tuple[OpenTurn, Reply]] = {}  # acknowledged turns, to be sent again
        self.num_turns = 0
        type(self).num_made += 1

    # -- what clients do --

    @precondition(lambda self: len(self.open) < len(NAMES))
    @rule(length=st.integers(1, 60), pieces=st.integers(0, 6), keeps=st.booleans())
    def begin(self, length: int, pieces: int, keeps: bool) -> None:
        name = next(each for each in NAMES if each not in self.open)
        self.num_turns += 1
        text = f"word {self.num_turns}"
        options = {
            "request_id": f"{self.num_made}-{self.num_turns}",
            "max_tokens": length,
            "ignore_eos": True,
            "keep_partial": keeps,
        }
        turn = self.person.client.conversation(self.id_of(name)).send(text, **options)
        self.open[name] = OpenTurn(name, text, options, turn)
        self.read(self.open[name], pieces)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), pieces=st.integers(1, 9))
    def read_on(self, data: st.DataObject, pieces: int) -> None:
        self.read(self.draw_open_turn(data), pieces)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        opened = self.draw_open_turn(data)
        self.read(opened, 1000)
        reply = self.person.reply(opened.turn)
        self.acknowledge(opened, reply)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def attach(self, data: st.DataObject) -> None:
        """Send the same request from another client. The first reader still reads the same reply."""
        opened = self.draw_open_turn(data)
        if not opened.pieces:
            return  # the first request may not have been sent yet
        talk = self.other.client.conversation(self.id_of(opened.name))
        reply = self.other.reply(talk.send(opened.text, **opened.options))
        self.read(opened, 1000)
        own = self.person.reply(opened.turn)
        assert (own.text, own.token_ids, own.revision) == (
            reply.text,
            reply.token_ids,
            reply.revision,
        )
        self.acknowledge(opened, own)
        self.happened["attached"] += 1

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        opened = self.draw_open_turn(data)
        if opened.pieces:
            opened.is_cancelled = self.person.do(opened.turn.cancel()) or opened.is_cancelled
            self.happened["cancelled"] += opened.is_cancelled

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """Afterwards the history has the delivered part, or nothing, or the complete turn."""
        opened = self.draw_open_turn(data)
        self.person.do(opened.turn.close())
        del self.open[opened.name]
        stored = self.stored(opened.name)
        before = self.history[opened.name]
        assert stored[: len(before)] == before
        kept = stored[len(before) :]
        assert len(kept) <= 1
        if kept:
            text, reply = kept[0]
            assert text == opened.text
            assert reply.startswith(opened.seen)
            before.append(kept[0])
            self.happened["kept"] += 1
        else:
            keeps = opened.options["keep_partial"] and bool(opened.pieces)
            assert not keeps, "delivered text is not in the history"

    @precondition(lambda self: self.latest)
    @rule(data=st.data())
    def try_again(self, data: st.DataObject) -> None:
        """A repeated request gets the same answer, and adds no second message."""
        name = data.draw(st.sampled_from(sorted(self.latest)))
        opened, reply = self.latest[name]
        talk = self.other.client.conversation(self.id_of(name))
        again = self.other.reply(talk.send(opened.text, **opened.options))
        assert again.replayed
        assert (again.text, again.token_ids, again.usage) == (
            reply.text,
            reply.token_ids,
            reply.usage,
        )
        self.check(name)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def say_more_while_it_runs(self, data: st.DataObject) -> None:
        opened = self.draw_open_turn(data)
        if opened.pieces and self.rig.num_live == len(self.open):
            talk = self.other.client.conversation(self.id_of(opened.name))
            try:
                reply = self.other.do(talk.ask("me too", max_tokens=1, expected_revision=10**6))
            except (errors.TurnRunning, errors.StaleRevision):
                return
            raise AssertionError(f"two turns at once: {reply}")

    @rule()
    def cut(self) -> None:
        self.person.cut()
        self.other.cut()

    # -- what must be true --

    def acknowledge(self, opened: OpenTurn, reply: Reply) -> None:
        del self.open[opened.name]
        assert reply.text == opened.seen
        assert reply.token_ids == tuple(i for each in opened.pieces for i in each.token_ids)
        assert reply.finish_reason == ("cancelled" if opened.is_cancelled else "length")
        self.history[opened.name].append((opened.text, reply.text))
        assert reply.revision == len(self.history[opened.name])
        self.latest[opened.name] = (opened, reply)
        self.check(opened.name)

    def check(self, name: str) -> None:
        if name not in self.open:
            assert self.stored(name) == self.history[name]

    def stored(self, name: str) -> list[tuple[str, str]]:
        talk = self.other.client.conversation(self.id_of(name))

        async def listed() -> list[Any]:
            return [each async for each in talk.messages()]

        try:
            found = self.other.do(listed()) if self.kind is AsyncClient else list(talk.messages())
        except errors.NotFound:
            return []
        texts = [each.text for each in found]
        assert [each.role for each in found] == ["user", "assistant"] * (len(found) // 2)
        return list(zip(texts[::2], texts[1::2], strict=True))

    # -- inside --

    def id_of(self, name: str) -> str:
        return f"{self.kind.__name__}-{self.num_made}-{name}"

    def draw_open_turn(self, data: st.DataObject) -> OpenTurn:
        return self.open[data.draw(st.sampled_from(sorted(self.open)))]

    def read(self, opened: OpenTurn, pieces: int) -> None:
        for _ in range(pieces):
            piece = self.person.next(opened.turn)
            if piece is None:
                return
            assert isinstance(piece, Delta), "no turn was lost, so no turn restarts"
            opened.pieces.append(piece)

    def teardown(self) -> None:
        for opened in list(self.open.values()):
            self.person.do(opened.turn.close())
        self.person.close()
        self.other.close()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonRig]:
    data: Path = tmp_path_factory.mktemp("machine") / "data"
    config = DaemonConfig(grace_seconds=3600)
    with DaemonRig(data, config=config, program=(*ECHO, "--seconds=0.002")) as rig:
        yield rig


@pytest.mark.timeout(300 * SCALE)
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_each_acknowledged_turn_is_in_the_history_once(
    rig: DaemonRig, kind: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    await_ends_patiently(monkeypatch)
    ClientMachine.rig, ClientMachine.kind = rig, kind
    ClientMachine.happened.clear()
    run_state_machine_as_test(
        seed(SEED)(ClientMachine),
        settings=settings(
            max_examples=15 * SCALE,
            stateful_step_count=25,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    happened = ClientMachine.happened
    assert all(happened[each] for each in ("attached", "cancelled", "kept")), dict(happened)
