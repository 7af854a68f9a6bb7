"""Run the engine process of the fault search inside the test's own process.

The engine is real. Its executor is a faulty ledger, and its pipe is simulated.

A `Machine` is one run of the engine process. When the machine dies, unread messages are lost, and so are
events that did not get through the pipe. Both sides notice the death late. A `Link` is the real
`EngineClient`, but supervises machines instead of processes. It starts a new machine when one is gone.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pensieve.conversations.engine_client import EngineClient, EngineProgram, Ready
from pensieve.core.cache import CacheConfig
from pensieve.core.cost import CostProfile
from pensieve.core.iteration import Iteration, Outcome, SampledToken
from pensieve.core.policies.registry import policy_named
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.engine import pipe as channel
from pensieve.engine.engine import Engine, EngineConfigs
from pensieve.engine.journal import hash_of
from pensieve.engine.mailbox import Mailbox
from pensieve.engine.messages import (
    CancelTurn,
    DeleteConversation,
    EngineEvent,
    EngineMessage,
    ProvideLog,
    SubmitTurn,
    TurnEnded,
)
from pensieve.engine.ports import Ports
from pensieve.errors import DeviceError, QueueFull
from pensieve.sim.executor import VirtualClock
from tests.fakes import VOCAB, LedgerExecutor, ends_turn
from tests.faults.texts import word

if TYPE_CHECKING:
    from pensieve.conversations.daemon import Daemon

COST = CostProfile.analytic(
    num_parameters=1000, num_layers=2, num_heads=2, head_size=8, chunk_tokens=4
)
FaultHappens = Callable[[str], bool]  # draws whether a fault of this kind happens now
Note = Callable[[str, str], None]  # actor, event


@dataclass(frozen=True)
class EngineShape:
    policy: str = "value"
    device_pages: int = 16
    host_pages: int = 12
    chunk_tokens: int = 4
    batch_tokens_max: int = 16
    turns_max: int = 8
    time_share: int = 0
    turns_queued_max: int = 64
    depth: int = 1
    swap_outs_max: int = 64
    staging_pages: int = 0  # per arena, for streamed turns
    stream: str = "on"
    checks_every: int = 1  # commits between two checks of the invariants

    @property
    def cache(self) -> CacheConfig:
        return CacheConfig(
            *(self.device_pages, self.host_pages, self.chunk_tokens),
            swap_outs_max=self.swap_outs_max,
            staging_pages=self.staging_pages,
        )


class FaultyLedger(LedgerExecutor):
    """A ledger whose device fails at times. Its tokens stand for words."""

    def __init__(
        self, shape: EngineShape, seed: int, late: float, fault_happens: FaultHappens
    ) -> None:
        super().__init__(
            shape.device_pages,
            shape.host_pages,
            shape.chunk_tokens,
            seed,
            late,
            depth=shape.depth,
            staging_pages=shape.staging_pages,
        )
        self._fault_happens = fault_happens
        self._shuffle = random.Random(seed)
        self._spoke: set[int] = set()  # turns that have generated a word

    def launch(self, iteration: Iteration) -> None:
        if self._fault_happens("an allocation fails"):
            raise DeviceError("out of memory")
        for piece in iteration.slices:
            if piece.needs_token and self._fault_happens("a row is not a number"):
                self.failing_turns.add(piece.attempt_id)
        super().launch(iteration)
        if iteration.groups:
            self._fault_happens("a turn is streamed")
        if self._fault_happens("a launch fails half way"):
            raise DeviceError("an illegal memory access was encountered")

    def collect(self) -> Outcome:
        if self._fault_happens("collecting fails"):
            raise DeviceError("unspecified launch failure")
        outcome = super().collect()
        finished = list(outcome.finished_copies)
        if len(finished) > 1 and self._fault_happens("copies finish out of order"):
            self._shuffle.shuffle(finished)
        if self.outstanding:
            self._fault_happens("copies are late")
        samples = []
        for sample in outcome.samples:
            text = ""
            if not ends_turn(sample.token_id):
                text = word(sample.token_id)
                if sample.attempt_id in self._spoke:
                    text = " " + text
                self._spoke.add(sample.attempt_id)
            samples.append(replace(sample, text=text))
        return replace(outcome, samples=tuple(samples), finished_copies=tuple(finished))


class Machine:
    """One engine process, from its start to its death."""

    def __init__(
        self,
        shape: EngineShape,
        seed: int,
        late: float,
        clock: VirtualClock,
        fault_happens: FaultHappens,
        note: Note,
    ) -> None:
        self.shape = shape
        self.alive = True
        self.is_hung = False  # its main thread has stopped
        self.is_stopped = False  # all its threads have stopped
        self.incoming: deque[bytes] = deque()  # written by the service, not yet read
        self.frames: deque[bytes] = deque()  # written by the engine, not yet read
        self.mailbox = Mailbox()
        self.executor = FaultyLedger(shape, seed, late, fault_happens)
        self.context_max = shape.cache.device_tokens_max
        scheduler = SchedulerConfig(
            shape.batch_tokens_max,
            shape.turns_max,
            time_share=shape.time_share,
            stream=shape.stream,
        )
        self.engine = Engine(
            EngineConfigs.fitted(shape.cache, scheduler, None, shape.turns_queued_max),
            policy_named(shape.policy, COST, shape.chunk_tokens),
            self.executor,
            Ports(clock, self.mailbox, self),
            (self,),
        )
        self.scheduler = self.engine.scheduler
        self.cache = self.scheduler.cache
        self._clock = clock
        self._note = note
        self._published: list[EngineEvent] = []  # in the outbox
        self._num_commits = 0
        self._num_rounds = 0
        self._written_at = clock.now()

    # -- called by the world --

    def read(self, num_frames: int) -> None:
        """Read frames that the service wrote to the pipe."""
        if self.is_stopped and self.alive:
            return
        while self.incoming and num_frames:
            frame = self.incoming.popleft()
            num_frames -= 1
            if self.alive:
                head = channel.LENGTHS.size + channel.lengths(frame[: channel.LENGTHS.size])[0]
                self.mailbox.put(
                    channel.message_of(
                        channel.unpack(frame[channel.LENGTHS.size : head], frame[head:])
                    )
                )

    def step(self) -> bool:
        """Run one step of the engine. Handle its errors like the real engine process."""
        if not self.alive or self.is_hung:
            return False
        self._num_rounds += 1
        try:
            return self.engine.step()
        except DeviceError as error:
            self._fail(error)
            return True

    def flush(self) -> None:
        """Write all events since the last flush as one frame; without events, write a heartbeat."""
        now = self._clock.now()
        if not self.alive or self.is_stopped:
            return
        if self._published:
            self.frames.append(channel.pack_events(self._published))
            self._published = []
        elif now - self._written_at >= channel.BEAT_SECONDS:
            self.frames.append(channel.pack_alive(self._num_rounds))
        else:
            return
        self._written_at = now

    def die(self, num_frames: int, cut: bool) -> None:
        """Simulate kill -9: deliver `num_frames` written frames, and half a frame if `cut`."""
        self.alive = False
        self._published = []
        gone = list(self.frames)[num_frames:]
        self.frames = deque(list(self.frames)[:num_frames])
        if gone and cut:
            self.frames.append(gone[0][: len(gone[0]) // 2])

    def _fail(self, error: DeviceError) -> None:
        def raise_it() -> bool:
            raise error

        self.engine.step = raise_it  # type: ignore[method-assign]
        try:
            self.engine.run()
        except DeviceError:
            self._note("engine", f"fails: {error}")
        self.flush()
        self.frames.append(channel.pack(["died", str(error), 6]))
        self.alive = False

    # -- called by the engine, as its sink and observer --

    def publish(self, events: Sequence[EngineEvent]) -> None:
        self._published += events

    def received(self, message: EngineMessage, now: float) -> None:
        if isinstance(message, SubmitTurn):
            kind = "warm" if message.warm else "turn"
            what = f"{kind} {message.attempt_id} of {message.conversation_id}"
            size = len(message.tokens) // 4
            self._note("engine", f"takes {what}: {message.history_tokens} + {size} tokens")
        elif isinstance(message, ProvideLog):
            self._note(
                "engine", f"takes {len(message.tokens) // 4} tokens for {message.attempt_id}"
            )
        else:
            self._note("engine", f"takes {message}")

    def planned(self, iteration: Iteration | None, now: float) -> None:
        if iteration is not None:
            slices = ", ".join(f"{s.attempt_id}[{s.start}:{s.stop}]" for s in iteration.slices)
            parts = iteration.copies, iteration.swap_ins, iteration.swap_outs
            moves = " ".join(str(len(part)) for part in parts)
            self._note("engine", f"plans {iteration.index} {hash_of(iteration)}: {slices}; {moves}")

    def committed(self, iteration: Iteration, outcome: Outcome, now: float) -> None:
        self._note(
            "engine", f"commits {iteration.index}, finished copies {outcome.finished_copies}"
        )
        self._num_commits += 1
        if self._num_commits % self.shape.checks_every == 0:
            self.scheduler.check(now)

    def published(self, events: Sequence[EngineEvent]) -> None:
        for event in events:
            if isinstance(event, SampledToken):
                self._note("engine", f"says {event.token_id} for turn {event.attempt_id}")
            elif isinstance(event, TurnEnded):
                usage = event.usage
                self._note(
                    "engine",
                    f"ends turn {event.attempt_id}: {event.finish} {event.failure or ''}"
                    f" prompt {usage.prompt_tokens} output {usage.output_tokens}",
                )
            else:
                self._note("engine", f"answers {event}")


class _Wire:
    """The service's end of the pipe."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._closed = False

    def write(self, data: bytes) -> None:
        self._machine.incoming.append(data)

    def is_closing(self) -> bool:
        return self._closed

    @property
    def transport(self) -> _Wire:
        return self

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        """Close the pipe. The engine process then exits, unless it is dead."""
        self._closed = True
        if self._machine.alive:
            self._machine.die(0, cut=False)


class Link(EngineClient):
    """The real EngineClient. It supervises machines that `begin` creates. None: the start failed."""

    def __init__(
        self, daemon: Daemon, begin: Callable[[], Machine | None], fault_happens: FaultHappens
    ) -> None:
        super().__init__(
            EngineProgram((), {}, Path("/")), daemon.events, patience=daemon.engine._patience
        )
        self.machine: Machine | None = None
        self._begin = begin
        self._fault_happens = fault_happens

    def put(self, message: EngineMessage) -> None:
        always = isinstance(message, CancelTurn | DeleteConversation)
        if not always and self._fault_happens("the mailbox is full"):
            raise QueueFull("so many messages wait for the engine; try again later")
        super().put(message)

    def deliver(self, num_frames: int) -> None:
        """Pass frames of the engine to the service. If the engine is dead, pass the end of the pipe, too."""
        machine, reader = self.machine, self._reader
        if machine is None or reader is None:
            return
        while machine.frames and num_frames:
            reader.feed_data(machine.frames.popleft())
            num_frames -= 1
        if not machine.frames and not machine.alive:
            self.machine = None
            reader.feed_eof()

    async def _spawn(self) -> Ready:
        machine = self._begin()
        if machine is None:
            raise DeviceError("the device has no memory left")
        self.machine = machine
        self._reader = asyncio.StreamReader(limit=channel.FRAME_BYTES_MAX, loop=self._loop)
        self._writer = cast(Any, _Wire(machine))
        shape = machine.shape
        self.ready = Ready(
            machine.context_max, VOCAB, shape.device_pages, shape.host_pages, 1, shape.chunk_tokens
        )
        return self.ready
