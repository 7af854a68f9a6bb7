"""One world of the fault search: the whole service over simulated surroundings, drawn from one seed.

Real: the core, the engine, its mailbox, the frames of the pipe, the supervision of the engine process, the
daemon with its readers and grace periods, the conversations, and the store over SQLite.

Simulated: the clock, the event loop and its threads (threads.py), the device and the engine's process
(machine.py), the disk (disk.py), and the clients (people.py).

Nothing happens by itself. The seed decides each move: some engine steps, some frames through the pipe, some
jobs of the store's thread, some time, one client action, or a fault. Events can therefore happen in any
order, but one seed always gives the same order.

These checks run all the time:

* the tokens that each slice attends to, against the ledger (the simulated device, tests/fakes.py), and the
  core against its invariants;
* each reply, as delivered and as stored, against the tokens that the ledger's arithmetic gives;
* each history against all possible histories, given the answers that clients received;
* the tokens of an attempt against the tokens delivered earlier for the same attempt.

After the faults stop, every turn must end, every client must get an answer, and the store must verify. After
all conversations are deleted, all pages must be empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pensieve.conversations.daemon import Daemon
from pensieve.conversations.daemon_config import DaemonConfig, Sources
from pensieve.conversations.engine_client import EngineProgram
from pensieve.errors import DeviceError, StoreError, StoreUnavailable
from pensieve.launch.model_folder import LoadedTexts
from pensieve.sampling import Sampling
from pensieve.sim.executor import VirtualClock
from pensieve.store import conversation_rows, shared_commits
from pensieve.store.conversation_store import ConversationStore
from tests.faults.disk import STORE_FAULTS, Disk, Fault, ProcessDied, copy_empty_history
from tests.faults.fibers import Fibers
from tests.faults.kinds import BY_ITSELF, BY_MOVE, ORDINARY, Rates, Shape, draw_rates, draw_shape
from tests.faults.machine import Link, Machine
from tests.faults.people import People
from tests.faults.process import Process, open_inspector, quiet
from tests.faults.texts import template
from tests.faults.threads import Threads

STEPS_MAX = 800  # after the faults have stopped, everything must end within these steps
WALL = 1_700_000_000.0
COUNTDOWNS = (1, 2, 4, 8, 16)  # statements from now until a store fault happens


class World:
    def __init__(
        self,
        seed: int,
        shelf: Path,
        tell: Callable[[str], None] | None = None,
        shape: Shape | None = None,
        rates: Rates | None = None,
    ) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.shape = shape or draw_shape(self.random, seed)
        self.rates = rates or draw_rates(self.random)
        self.happened: Counter[str] = Counter()
        self.clock = VirtualClock(1.0)
        self.people = People(self.random, self.shape, self.happened, self.note)
        self.process: Process | None = None
        self.num_events = 0
        self._tell = tell
        self._digest = hashlib.blake2b(digest_size=16)
        self._wall_offset = WALL
        self._stalled_until = 0  # a number of moves
        self._held_until = 0
        self._num_moves = 0
        self._num_machines = 0
        self._faulty = True
        folder = shelf / f"world-{seed}"
        folder.mkdir()
        self._place = str(folder)
        self.disk = Disk(folder, self._between_statements)
        self.disk.on_fault = self._on_fault
        self.disk.on_savepoint = self._on_savepoint
        copy_empty_history(self.disk.folder, shelf)

    def run(self) -> None:
        """Run the whole world: random moves, then a rest, then the final check."""
        self.note("world", f"seed {self.seed}: {self.shape}")
        self.start()
        for _ in range(self.shape.num_moves):
            self.move()
        self.settle()
        self.final_check()

    @property
    def hash(self) -> str:
        """Return the hash of all events so far."""
        return self._digest.hexdigest()

    def note(self, who: str, what: str) -> None:
        line = f"{self.clock.now():10.3f} {who:8} {what}".replace(self._place, "disk")
        self.num_events += 1
        self._digest.update(line.encode())
        if self._tell is not None:
            self._tell(line)

    def fault_happens(self, kind: str) -> bool:
        """Draw whether a fault of this kind happens now."""
        if kind in BY_ITSELF:
            self.happened[kind] += 1
            return False
        rate = self.rates[kind]
        if not rate or not self._faulty or self.random.random() >= rate:
            return False
        self.happened[kind] += 1
        return True

    # -- moves --

    def move(self) -> None:
        self._num_moves += 1
        weights = ORDINARY | {kind: self.rates[kind] for kind in BY_MOVE}
        what = self.random.choices(list(weights), list(weights.values()))[0]
        with self._catching_death():
            if what not in ORDINARY:
                if self._make_move(what):
                    self.happened[what] += 1
                    self.note("world", what)
            elif self.process is None:
                self.start()
            elif what == "engine":
                self._move_engine(self.process)
            elif what == "pipe":
                self._move_pipe(self.process)
            elif what == "store":
                for _ in range(self.random.choice((1, 1, 3))):
                    self.process.work(other=self.random.random() < 0.3)
            elif what == "client":
                self._move_client()
            elif self._num_moves >= self._stalled_until:
                self.clock.advance(self.random.choice((0.0, 0.05, 0.3, 1.0, 7.0)))
            self._spin()

    def _move_engine(self, process: Process) -> None:
        machine = process.machine
        if machine is None:
            return
        machine.read(self.random.choice((0, 1, 100)))
        for _ in range(self.random.choice((1, 1, 4))):
            if not machine.step():
                break
        if self.random.random() < 0.7:
            machine.flush()
        if self._num_moves >= self._stalled_until:
            self.clock.advance(0.01)

    def _move_pipe(self, process: Process) -> None:
        if process.machine is not None:
            process.machine.read(self.random.choice((1, 100)))
            if self._num_moves >= self._held_until:
                process.machine.flush()
                process.deliver(self.random.choice((1, 1, 100)))

    def _move_client(self) -> None:
        people = self.people
        names = people.names
        waiting = [each for each in people.requests if each.is_open and not each.num_calls]
        if len(names) < self.shape.conversations_max and (not names or self.random.random() < 0.25):
            people.create()
        elif not names:
            return
        elif waiting and self.random.random() < 0.3:
            people.say_again(self.random.choice(waiting))
        else:
            name = self.random.choice(names)
            if not (name in people.full and people.rewind(name, 0)):
                people.say(name)

    def _make_move(self, kind: str) -> bool:
        """Do a move of BY_MOVE. Return False if the move was impossible or takes effect later."""
        people = self.people
        fault = next((each for each in STORE_FAULTS if each.kind == kind), None)
        if fault is not None:
            self.disk.arm(fault, self.random.choice(COUNTDOWNS))
            return False  # the fault happens at a later statement
        if kind == "the engine is killed":
            return self.kill_engine()
        if kind in ("the engine is stopped", "the engine's main thread hangs"):
            return self.hang_engine(whole=kind == "the engine is stopped")
        if kind == "the service is killed":
            return self.kill_service()
        if kind == "the service is stopped and started":
            return self.stop()
        if kind == "time stands still":
            self._stalled_until = self._num_moves + self.random.choice((10, 50))
        elif kind == "time jumps ahead":
            self.clock.advance(self.random.choice((40.0, 3600.0)))
        elif kind == "the wall clock goes back":
            self._wall_offset -= self.random.choice((1.0, 3600.0))
        elif kind == "events come late":
            self._held_until = self._num_moves + self.random.choice((5, 20, 50))
        elif kind == "a turn is cancelled":
            return people.cancel()
        elif kind == "a turn is left":
            return people.leave()
        elif kind == "an id comes again with other words":
            return people.say_other_words()
        elif kind == "a message is said again":
            if people.requests:
                people.say_again(self.random.choice(people.requests))
            return bool(people.requests)
        elif kind in (
            "a reader leaves",
            "a reader stops reading",
            "a second message during a turn",
        ):
            if not people.turns_under_way:
                return False
            call = self.random.choice(people.turns_under_way)
            assert call.request is not None
            if kind == "a reader leaves":
                people.hang_up(call)
            elif kind == "a reader stops reading":
                call.stalled = asyncio.Event()
            else:
                people.say(call.request.conversation)
        elif names := people.names:
            return self._move_conversation(self.random.choice(names), kind)
        else:
            return False
        return True

    def _move_conversation(self, name: str, kind: str) -> bool:
        people = self.people
        if kind == "a conversation is forked":
            too_many = len(people.names) >= self.shape.conversations_max + 2
            return not too_many and people.fork(name)
        if kind == "a conversation is rewound":
            return people.rewind(name)
        if kind == "a conversation is deleted":
            return people.delete(name)
        if kind == "KV is evicted":
            return people.evict(name, to_host=self.random.random() < 0.5)
        assert kind == "KV is warmed", kind
        return people.warm(name)

    # -- start and end of processes --

    def start(self) -> None:
        """Start the service, which may die during the start."""
        with self._catching_death():
            self._open()

    def _open(self) -> None:
        try:
            store = ConversationStore.open(
                self.disk.folder,
                "pensieve serve",
                driver=self.disk,
                now=self._wall,
                random_bits=self.random.getrandbits,
            )
        except StoreUnavailable as error:
            self.note("service", f"does not start: {error}")
            return
        interrupted = [turn.request_id for turn in store.interrupted_at_open]
        self.happened["a turn is interrupted by a restart"] += len(interrupted)
        self.note("service", f"starts; interrupted: {interrupted}")
        fibers = Fibers(self.seed + self._num_moves)
        process = self.process = self.people.process = Process(
            store, Threads(self.clock), fibers, self.shape.store_threads
        )
        starting = process.loop.create_task(self._start(process))
        process.loop.spin()
        if (why := starting.exception()) is not None:
            assert isinstance(why, DeviceError), repr(why)
            self.note("service", f"gives up: {why}")
            self.bury()

    async def _start(self, process: Process) -> None:
        daemon = Daemon(
            process.store,
            LoadedTexts(template(), "the fingerprint", Sampling()),
            # This program is never run: below, the world replaces the process by its machine.
            EngineProgram((), {}, self.disk.folder),
            DaemonConfig(
                live_turns_max=self.shape.turns_max,
                grace_seconds=self.shape.grace_seconds,
                heartbeat_seconds=self.shape.heartbeat_seconds,
                iteration_seconds_max=self.shape.iteration_seconds_max,
                short_characters=self.shape.short_characters,
                keep_warm_seconds=0.0,
            ),
            sources=Sources(self._wall, self.random.getrandbits),
        )
        process.link = Link(daemon, self._new_machine, self.fault_happens)
        daemon.engine = process.link
        await daemon.start()
        process.owners.watch_daemon(daemon)
        process.daemon = daemon
        if process.store.integrity_check_due:
            daemon.damage.check(lambda line: self.note("service", line))

    def _new_machine(self) -> Machine | None:
        if self.fault_happens("the engine does not start"):
            return None
        self._num_machines += 1
        self.note("engine", f"starts, number {self._num_machines}")
        late = self.rates["copies are late"] if self._faulty else 0.2
        seed = self.seed * 1000 + self._num_machines
        return Machine(self.shape.engine, seed, late, self.clock, self.fault_happens, self.note)

    def kill_engine(self) -> bool:
        machine = self.process.machine if self.process is not None else None
        if machine is None or not machine.alive:
            return False
        machine.die(self.random.randint(0, len(machine.frames)), self.random.random() < 0.5)
        return True

    def hang_engine(self, whole: bool) -> bool:
        """Hang the engine's main thread, or (`whole`) all its threads."""
        machine = self.process.machine if self.process is not None else None
        if machine is None or not machine.alive:
            return False
        machine.is_hung = True
        machine.is_stopped |= whole
        return True

    def kill_service(self) -> bool:
        if self.process is None:
            return False
        self.disk.die()
        self.bury()
        return True

    def stop(self) -> bool:
        """Stop the service as SIGTERM does (drain and close), and start it again."""
        process = self.process
        if process is None or process.daemon is None:
            return False
        daemon = process.daemon

        async def end() -> None:
            await daemon.drain(self.random.choice((0.0, 0.5, 3.0)))
            self.people.drop_connections()
            await daemon.close()

        self.note("service", "drains")
        ending = process.loop.create_task(end())
        for _ in range(STEPS_MAX):
            if ending.done():
                break
            self._move_engine(process)
            self._move_pipe(process)
            process.work(other=False)  # the store's thread ends after its last job
            self.clock.advance(0.05)
            process.loop.spin()
        why = ending.exception()
        if isinstance(why, ProcessDied):
            raise why
        assert why is None or isinstance(why, StoreError | StoreUnavailable), repr(why)
        self.note("service", f"has stopped: {why}")
        process.check()
        self.bury()
        self.start()
        return True

    def bury(self) -> None:
        """End the service's process and its engine; check what the disk has kept."""
        process, self.process, self.people.process = self.process, None, None
        if process is not None:
            self.note("service", "is gone")
            self.people.drop_connections()
            process.bury()
            with contextlib.closing(
                open_inspector(self.disk.folder / "conversations.db")
            ) as inspector:
                self.people.check_store_after_death(inspector)

    @contextlib.contextmanager
    def _catching_death(self) -> Iterator[None]:
        """Catch the death of the service's process."""
        try:
            yield
        except ProcessDied:
            self.bury()

    # -- the end --

    def settle(self) -> None:
        """Stop the faults. Continue until every turn has ended and every client has an answer."""
        self.note("world", "the faults stop")
        self._faulty = False
        self.disk.heal()
        for call in self.people.calls:
            if call.stalled is not None:
                call.stalled.set()
        self.rest()

    def rest(self, say_again: bool = True) -> None:
        """Continue until nothing runs. With `say_again`, also send messages until each is answered."""
        for _ in range(STEPS_MAX):
            with self._catching_death():
                if not self._go_on(say_again):
                    return
        waiting = [each for each in self.people.requests if each.is_open]
        raise AssertionError(f"the world never comes to rest: {self.people.calls}, {waiting}")

    def move_until_begun(self) -> None:
        """Continue until turns are live, or ten steps have passed."""
        for _ in range(10):
            daemon = self.people.daemon
            if daemon is not None and daemon.conversations.turns.num_live:
                return
            with self._catching_death():
                self._go_on(say_again=False)

    def _go_on(self, say_again: bool) -> bool:
        """Let every part move once. Return False if no part had anything to do."""
        if self.process is None:
            self.start()
            return True
        process, worked = self.process, False
        if (machine := process.machine) is not None:
            machine.read(100)
            while machine.step():
                worked = True
                self.clock.advance(0.01)
                if not machine.scheduler.num_turns:
                    break  # no turn waits for the remaining copies, so they may take their time
            machine.flush()
            process.deliver(100)
        while process.loop.store_jobs or process.loop.other_jobs:
            process.work(other=False)
            worked = True
        process.loop.spin()
        process.check()
        if say_again and process.daemon is not None and not self.people.calls:
            worked |= self.people.say_all_again()
        self.clock.advance(0.05 if worked else 0.5)
        daemon = process.daemon
        resting = (
            daemon is not None and daemon.engine.serving and not daemon.conversations.turns.num_live
        )
        return worked or bool(self.people.calls) or not resting

    def final_check(self) -> None:
        """Final check: store, engine and clients agree, and nothing is left over."""
        people = self.people
        for name in people.names:
            people.look(name)
        for request in [each for each in people.requests if each.reply is not None][:3]:
            if people.histories.exists(request.conversation):
                people.say_again(request)
        for name in people.names[:2]:
            people.rewind(name, 0)
        self.rest()
        last = [people.say(name) for name in people.names[:2]]
        self.rest()
        assert all(request.reply is not None for request in last), f"no answer to one of {last}"
        problems: list[str] = []
        people.check(problems)
        self.rest()
        assert problems == [], problems
        process = self.process
        assert process is not None
        self.note("store", self._contents(process))
        for name in people.names:
            people.delete(name)
        self.rest()
        assert not people.names, "a deleted conversation still exists"
        assert conversation_rows.num_conversations(process.inspector) == 0
        assert process.store.verify() == []
        assert people.daemon is not None
        assert people.daemon.num_turns_of("") == 0, "a turn or warm that has ended still counts"
        machine = process.machine
        assert machine is not None
        assert machine.scheduler.num_turns == 0, "a turn never ends"
        machine.scheduler.check(self.clock.now())
        cache, engine = machine.cache, self.shape.engine
        assert not cache.conversations, f"the engine still holds {list(cache.conversations)}"
        assert cache.device.num_empty == engine.device_pages, "a device page leaked"
        assert cache.host.num_empty == engine.host_pages, "a host page leaked"
        self.bury()

    def _contents(self, process: Process) -> str:
        """Return a digest of every row of the store."""
        digest = hashlib.blake2b(digest_size=16)
        for table in ("conversations", "turns", "messages", "history", "bodies", "tenants"):
            for row in process.inspector.execute(f"SELECT * FROM {table} ORDER BY 1, 2"):
                digest.update(repr(row).encode())
        return digest.hexdigest()

    # -- inside --

    def _wall(self) -> float:
        return self._wall_offset + self.clock.now()

    def _spin(self) -> None:
        if self.process is not None:
            self.process.loop.spin()
            self.process.check()

    def _on_fault(self, fault: Fault) -> None:
        if fault.code is None and self.process is not None:
            self.process.fibers.has_died = True
        self.happened[fault.kind] += 1
        self.note("disk", fault.kind)

    def _on_savepoint(self) -> None:
        self.happened["calls share a commit"] += 1
        self.note("store", "a call joins the transaction of another")
        process = self.process
        if self._faulty and process is not None and process.fibers.random.random() < 0.3:
            self.happened["a shared commit meets a fault"] += 1
            self.disk.commit_fault = process.fibers.random.choice(STORE_FAULTS)

    def _between_statements(self) -> None:
        """Let other threads run while a store thread waits for the disk."""
        process = self.process
        if process is None or not process.in_job:
            return
        process.fibers.give_way()
        if self.fault_happens("events overtake the store's thread"):
            self.note("world", "events overtake the store's thread")
            with process.loop.on_the_loop():
                if process.machine is not None:
                    process.machine.flush()
                    process.deliver(100)
                process.loop.spin()


def run(seed: int, shelf: Path, tell: Callable[[str], None] | None = None) -> World:
    """Run the world of this seed to its end.

    The time in which calls may join a shared commit is real time, so it must not end in a simulated world.
    """
    with quiet(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_commits, "GROUP_SECONDS", 3600.0)
        world = World(seed, shelf, tell)
        try:
            world.run()
        except BaseException as error:
            error.add_note(f"python -m tests.faults {seed}")
            with contextlib.suppress(AssertionError):
                world.bury()
            raise
    return world
