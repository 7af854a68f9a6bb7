"""Random actions of daemons on one SQLite file, compared with a model of the allowed actions.

The stores run in one process, and the test decides when their leases expire. The model knows the log, the
owner and the running turn of every conversation. Each call must end as the model predicts. At the end, every
store must read the model's state.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pensieve.errors import (
    AlreadyExists,
    NotFound,
    OwnedElsewhere,
    PensieveError,
    TurnRunning,
    Unavailable,
)
from pensieve.store import ConversationStore, NewConversation, NewTurn
from pensieve.store.connection import preferred_driver
from pensieve.store.shared_file import SHARED_SQLITE_MIN
from tests.scale import SCALE, SEED
from tests.store.faulty import writer_of
from tests.store.talk import reply, user

pytestmark = pytest.mark.skipif(
    preferred_driver.sqlite_version_info < SHARED_SQLITE_MIN, reason="needs a newer SQLite"
)
NAMES = ("tea", "cup", "pot", "can")
NUM_STEPS = 400


@dataclass
class Running:
    """A turn that was begun."""

    name: str
    made: int  # when its conversation was created; tells a recreated conversation from the deleted one
    request_id: str
    turn_id: int
    attempt: int
    token: int
    daemon: int  # session number of its daemon
    is_over: bool = False
    revision: int = 0  # the revision that the turn created; 0: none yet


@dataclass
class ModelConversation:
    """The model's state of a conversation."""

    made: int
    owner: int  # session number of the owner
    log: list[int] = field(default_factory=list)
    revision: int = 0
    running: Running | None = None


@dataclass
class Daemon:
    """One run of a daemon."""

    store: ConversationStore
    number: int
    is_expired: bool = False
    is_draining: bool = False


class World:
    def __init__(self, folder: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.folder = folder
        self.daemons: dict[str, Daemon] = {}
        self.talks: dict[str, ModelConversation] = {}
        self.begun: list[Running] = []
        self.epochs: dict[int, tuple[int, int]] = {}
        self.finished: set[str] = set()
        self.count = 0
        self.done: Counter[str] = Counter()
        for name in "abc":
            self.open(name)

    # -- predictions of the model --

    def by_number(self, number: int) -> Daemon | None:
        return next((each for each in self.daemons.values() if each.number == number), None)

    def may_own(self, daemon: Daemon, talk: ModelConversation) -> bool:
        owner = self.by_number(talk.owner)
        if owner is None or owner is daemon or owner.is_expired:
            return True
        return owner.is_draining and talk.running is None

    def take(self, daemon: Daemon, talk: ModelConversation) -> None:
        if talk.owner != daemon.number:
            talk.owner = daemon.number
            if talk.running is not None:
                talk.running.is_over = True
                talk.running = None

    def claim_or_error(self, daemon: Daemon, name: str) -> type[PensieveError] | None:
        """Return the error that a call that changes the log must raise, or None.

        If there is no error, the daemon then owns the conversation.
        """
        talk = self.talks.get(name)
        if talk is None:
            return NotFound
        if not self.may_own(daemon, talk):
            return OwnedElsewhere
        if talk.owner == daemon.number and talk.running is not None:
            return TurnRunning
        self.take(daemon, talk)
        return None

    # -- actions --

    def open(self, name: str) -> None:
        store = ConversationStore.open(
            self.folder / name,
            "a test",
            url=f"sqlite://{self.folder / 'db'}",
            replica=name,
            lease_seconds=3600.0,
        )
        self.daemons[name] = Daemon(store, store.owners.session)

    def close(self, name: str, *, dies: bool) -> None:
        daemon = self.daemons.pop(name)
        if dies:  # its session row stays until the folder is opened again
            daemon.store.owners.end = lambda: None  # type: ignore[method-assign]
        daemon.store.close()
        self.open(name)
        for talk in self.talks.values():
            if talk.owner == daemon.number and talk.running is not None:
                talk.running.is_over = True
                talk.running = None

    def step(self) -> None:
        name = self.chance.choice(sorted(self.daemons))
        daemon = self.daemons[name]
        kind = self.chance.choices(
            ("begin", "end", "create", "delete", "rewind", "fork", "look", "change_daemon"),
            (30, 30, 8, 4, 6, 5, 10, 7),
        )[0]
        talk = self.chance.choice(NAMES)
        if kind == "change_daemon":
            self.change_daemon(name, daemon)
        else:
            getattr(self, kind)(daemon, talk)
        self.done[kind] += 1

    def change_daemon(self, name: str, daemon: Daemon) -> None:
        match self.chance.randrange(5):
            case 0:
                self.close(name, dies=False)
            case 1:
                self.close(name, dies=True)
            case 2:
                daemon.is_expired = True
                with writer_of(daemon.store).writing() as conn:
                    conn.execute(
                        "UPDATE sessions SET lease_until = lease_until - 7200 WHERE session = ?",
                        (daemon.number,),
                    )
            case 3:
                if daemon.is_expired:
                    daemon.is_expired = False
                    with writer_of(daemon.store).writing() as conn:
                        daemon.store.owners.renew(conn)
            case 4:
                daemon.is_draining = True
                daemon.store.drain()

    def create(self, daemon: Daemon, name: str) -> None:
        new = NewConversation(name, "f")
        if name in self.talks:
            with pytest.raises(AlreadyExists):
                daemon.store.create_conversation(new)
            return
        daemon.store.create_conversation(new)
        self.count += 1
        self.talks[name] = ModelConversation(self.count, daemon.number)

    def begin(self, daemon: Daemon, name: str) -> None:
        self.count += 1
        running = {each.running.request_id for each in self.talks.values() if each.running}
        again = [
            each
            for each in self.begun
            if each.name == name and each.is_over and each.request_id not in running | self.finished
        ]
        if again and self.chance.random() < 0.3:
            request_id = again[-1].request_id
        else:
            request_id = f"r{self.count}"
        request = NewTurn(request_id, [user(request_id, 1)])
        talk = self.talks.get(name)
        known = talk is not None and any(
            each.request_id == request_id and each.made == talk.made for each in self.begun
        )
        expected = self.claim_or_error(daemon, name)
        if expected is not None:
            with pytest.raises(expected):
                daemon.store.begin_turn(name, request)
            return
        assert talk is not None
        begun = daemon.store.begin_turn(name, request)
        assert begun.must_run
        assert (begun.turn.attempts > 1) == known
        talk.running = Running(
            *(name, talk.made, request_id, begun.turn.turn_id, begun.turn.attempts, self.count),
            daemon.number,
        )
        self.begun.append(talk.running)
        self.check_epoch(daemon, name, talk)

    def check_epoch(self, daemon: Daemon, name: str, talk: ModelConversation) -> None:
        owner = daemon.store.owners.owner(name)
        assert owner is not None
        assert owner.session == talk.owner
        assert owner.is_ours
        held = (talk.made, daemon.number)
        assert self.epochs.setdefault(owner.epoch, held) == held

    def end(self, daemon: Daemon, name: str) -> None:
        """End a turn that this daemon began, even if the turn has already ended or was taken over."""
        mine = [each for each in self.begun if each.daemon == daemon.number]
        if not mine:
            return
        turn = self.chance.choice(mine[-4:])
        talk = self.talks.get(turn.name)
        store, late = daemon.store, reply("x", turn.token)
        if self.chance.random() < 0.3:
            is_running = talk is not None and talk.running is turn
            try:
                store.interrupt_turn(turn.turn_id, turn.attempt)
            except NotFound:
                assert not is_running
            if is_running:
                assert talk is not None
                talk.running, turn.is_over = None, True
            return
        if talk is not None and talk.running is turn:
            talk.revision += 1
            done = store.finish_turn(turn.turn_id, late, "stop", {}, attempt=turn.attempt)
            assert done == talk.revision
            talk.log += [1, turn.token]
            talk.running, turn.revision = None, done
            self.finished.add(turn.request_id)
            return
        if turn.revision and talk is not None and talk.made == turn.made:  # a repeated end
            again = store.finish_turn(turn.turn_id, late, "stop", {}, attempt=turn.attempt)
            assert again == turn.revision
            return
        with pytest.raises((NotFound, Unavailable)):
            store.finish_turn(turn.turn_id, late, "stop", {}, attempt=turn.attempt)

    def delete(self, daemon: Daemon, name: str) -> None:
        expected = self.claim_or_error(daemon, name)
        if expected is not None:
            with pytest.raises(expected):
                daemon.store.delete_conversation(name)
            return
        daemon.store.delete_conversation(name)
        del self.talks[name]

    def rewind(self, daemon: Daemon, name: str) -> None:
        expected = self.claim_or_error(daemon, name)
        if expected is not None:
            with pytest.raises(expected):
                daemon.store.rewind_conversation(name, 0)
            return
        talk = self.talks[name]
        daemon.store.rewind_conversation(name, 0)
        talk.log, talk.revision = [], talk.revision + 1

    def fork(self, daemon: Daemon, name: str) -> None:
        target = self.chance.choice(NAMES)
        if name not in self.talks or target in self.talks:
            return
        source = self.talks[name]  # any daemon may fork, also while a turn runs
        daemon.store.fork_conversation(name, source.revision, target)
        self.count += 1
        self.talks[target] = ModelConversation(
            self.count, daemon.number, list(source.log), source.revision
        )

    def look(self, daemon: Daemon, name: str) -> None:
        talk = self.talks.get(name)
        if talk is None:
            with pytest.raises(NotFound):
                daemon.store.get_conversation(name)
            return
        found = daemon.store.get_conversation(name)
        assert found.revision == talk.revision
        assert list(daemon.store.log(name)) == talk.log
        running = talk.running
        owner = self.by_number(talk.owner)
        if running is not None and owner is not daemon and (owner is None or owner.is_expired):
            running = None  # the next claim will interrupt this turn
        assert found.running_turn_id == (None if running is None else running.turn_id)

    def check_and_close(self) -> None:
        for daemon in self.daemons.values():
            for name in NAMES:
                self.look(daemon, name)
            assert daemon.store.verify() == []
        for daemon in self.daemons.values():
            daemon.store.close()


@pytest.mark.parametrize("number", range(6 * SCALE))
def test_every_call_ends_as_the_model_predicts(number: int, tmp_path: Path) -> None:
    world = World(tmp_path, SEED + number)
    try:
        for _ in range(NUM_STEPS):
            world.step()
        world.check_and_close()
    finally:
        for daemon in world.daemons.values():
            daemon.store.close()
    assert min(world.done.values()) > 3
    assert len(world.epochs) > 3
