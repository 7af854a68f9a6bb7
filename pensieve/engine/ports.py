"""The protocols of an engine's surroundings: clock, executor, preparer, KV pages, sink, observers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pensieve.core.adoption import KvPlace
from pensieve.core.constraint import Constraint
from pensieve.core.iteration import Iteration, Outcome
from pensieve.engine.mailbox import Mailbox
from pensieve.engine.messages import EngineEvent, EngineMessage


class Clock(Protocol):
    def now(self) -> float:
        """Return seconds of a clock that never goes back."""


class Executor(Protocol):
    """Runs iterations. core/iteration.py has the contract on which the scheduler relies."""

    @property
    def depth(self) -> int:
        """The maximum number of iterations that may be launched and not collected.

        It is 2 if the executor computes one iteration while the next one is planned, otherwise 1. With
        pipeline stages it may be higher.
        """

    def launch(self, iteration: Iteration) -> None: ...

    def collect(self) -> Outcome:
        """Wait for the oldest launched iteration and return its outcome."""


class Preparer(Protocol):
    """Compiles constraints in separate threads, before their turns are submitted."""

    def prepare(
        self, attempt_id: int, constraint: Constraint, on_ready: Callable[[], None]
    ) -> bool:
        """Return whether the constraint is ready; if not, another thread calls `on_ready` later."""

    def is_ready(self, attempt_id: int) -> bool: ...

    def forget(self, attempt_id: int) -> None:
        """Forget the constraint of a turn that has ended, even if the turn never began."""


class KvPages(Protocol):
    """Reads and writes the bytes of pages, for a transfer. All pages must be in one process."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of the KV of one token, in all layers."""

    def read(self, places: Sequence[KvPlace]) -> bytes | bytearray:
        """Return the concatenated bytes of these places, after all launched iterations have written."""

    def is_intact(self, place: KvPlace, crc: int) -> bool:
        """Whether a host page is unchanged since it was filled. `crc` is the CRC of its present bytes."""

    def write(self, host_page: int, num_slots: int, data: memoryview, crc: int) -> None:
        """Fill an unused host page."""


class Sink(Protocol):
    def publish(self, events: Sequence[EngineEvent]) -> None: ...


class Observer(Protocol):
    """Receives each message, plan, outcome and event, in order. An observer must not influence the engine."""

    def received(self, message: EngineMessage, now: float) -> None: ...

    def planned(self, iteration: Iteration | None, now: float) -> None: ...

    def committed(self, iteration: Iteration, outcome: Outcome, now: float) -> None: ...

    def published(self, events: Sequence[EngineEvent]) -> None: ...


@dataclass(frozen=True)
class Ports:
    """The connections of an engine to its surroundings."""

    clock: Clock
    mailbox: Mailbox
    sink: Sink
    preparer: Preparer | None = None  # None: turns wait in the executor for their constraints
    pages: KvPages | None = None  # None: KV is not transferred
