"""The protocols of what an engine is connected to (clock, executor, preparer, sink, observers)."""

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
        """Seconds on a clock that never goes back."""


class Executor(Protocol):
    """Carries iterations out; core/iteration.py says what the scheduler relies on."""

    @property
    def depth(self) -> int:
        """How many iterations may be launched and not collected.

        1, or 2 if it computes one while the next is planned.
        """

    def launch(self, iteration: Iteration) -> None: ...

    def collect(self) -> Outcome:
        """The outcome of the oldest iteration that has not been collected."""


class Preparer(Protocol):
    """Makes constraints ready, in threads of its own, before their turns are submitted."""

    def prepare(self, turn_id: int, constraint: Constraint, on_ready: Callable[[], None]) -> bool:
        """Whether it is ready now; else another thread calls `on_ready` when it is."""

    def is_ready(self, turn_id: int) -> bool: ...

    def forget(self, turn_id: int) -> None:
        """The turn has ended, and may never have begun."""


class KvPages(Protocol):
    """The bytes of keys and values, for another engine; all pages are of one process."""

    @property
    def slot_bytes(self) -> int:
        """Of KV of one token, in all layers."""

    def read(self, places: Sequence[KvPlace]) -> bytes | bytearray:
        """What is there, one after the other, behind all that was launched."""

    def is_intact(self, place: KvPlace, crc: int) -> bool:
        """Whether a page on the host, whose bytes have this CRC, is what was copied to it."""

    def write(self, host_page: int, num_slots: int, data: memoryview, crc: int) -> None:
        """Fill a page that nothing uses."""


class Sink(Protocol):
    def publish(self, events: Sequence[EngineEvent]) -> None: ...


class Observer(Protocol):
    """Is called with everything that happens, in order; decides nothing."""

    def received(self, message: EngineMessage, now: float) -> None: ...

    def planned(self, iteration: Iteration | None, now: float) -> None: ...

    def committed(self, iteration: Iteration, outcome: Outcome, now: float) -> None: ...

    def published(self, events: Sequence[EngineEvent]) -> None: ...


@dataclass(frozen=True)
class Ports:
    """What an engine reads its time and messages from, and where its events go."""

    clock: Clock
    mailbox: Mailbox
    sink: Sink
    preparer: Preparer | None = None  # None: turns wait in the executor for what they need
    pages: KvPages | None = None  # None: no KV is handed over
