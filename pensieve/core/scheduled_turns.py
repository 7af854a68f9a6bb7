"""The turns of a scheduler, each in one of its states; the scheduler moves them from one to the other.

    queued      wait for their first iteration (fair_queue.py)
    running     hold pages, of the device or of the host; in order of admission
    suspended   have held some, and those that are ready, in `resume_order`

A turn that has ended or was suspended is *releasing* as long as it has an uncommitted slice: it is among
those that run, because its pages are still its own, and keeps no place.
"""

from __future__ import annotations

from collections import deque

from pensieve.core.audit import TurnsByState, audit_turns
from pensieve.core.cache import KVCache
from pensieve.core.cache_values import Admission
from pensieve.core.fair_queue import FairQueue
from pensieve.core.iteration import TurnStart
from pensieve.core.scheduler_counters import SchedulerCounters
from pensieve.core.turn import Ended, Turn, TurnState


class ScheduledTurns:
    def __init__(self, cache: KVCache, short_tokens_max: int) -> None:
        self.cache = cache
        self.counters = SchedulerCounters()
        self.running: dict[int, Turn] = {}
        self.suspended: deque[Turn] = deque()
        self.queued = FairQueue(short_tokens_max)
        self._turns: dict[int, Turn] = {}  # every turn that has not ended
        self._releasing: dict[int, Turn] = {}
        self._ended: list[Ended] = []  # ends that no outcome brings
        self._started: list[TurnStart] = []  # since the last iteration
        self._forgotten: list[int] = []  # turns that have ended since the last iteration
        self._disturbed: list[Turn] = []  # streamed turns whose chunks were discarded
        self._num_background = 0
        self._size = cache.config.chunk_tokens

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    def turns(self) -> list[Turn]:
        """Every turn that has not finished."""
        return [turn for turn in self._turns.values() if turn.finish is None]

    def turn(self, turn_id: int) -> Turn | None:
        """One that has not given up its pages."""
        return self._turns.get(turn_id)

    def turn_of(self, conversation_id: str) -> Turn | None:
        """The conversation's turn that has not finished."""
        return next(
            (turn for turn in self.turns() if turn.conversation_id == conversation_id), None
        )

    def drain_ended(self) -> list[Ended]:
        """Turns that ended without an outcome: cancelled, or warmed."""
        ended, self._ended = self._ended, []
        return ended

    def check(self, now: float) -> None:
        """Recompute every invariant of the cache and of the turns in it."""
        self.cache.check(now)
        self.queued.check(len(self._turns))
        sets = self.running, self.suspended, self.queued, self._releasing
        audit_turns(TurnsByState(self._turns, *sets), self.cache.conversations, self._size)

    def _changes(self) -> tuple[int, ...]:
        """What planning itself can change, after which it is worth another attempt."""
        counters = self.counters
        ends = len(self._ended), counters.readied, counters.suspensions
        return *ends, self.cache.counters.damaged

    @property
    def _has_interactive(self) -> bool:
        """Somebody waits for a reply."""
        return len(self._turns) > self._num_background

    def _somebody_waits(self) -> bool:
        """Whether a turn waits; an interactive one, where there are such."""
        if not self._has_interactive:
            return bool(self.suspended) or len(self.queued) > 0
        resting = any(not turn.is_background for turn in self.suspended)
        return resting or self.queued.num_prompt_tokens > 0

    def _keeps_place(self, turn: Turn) -> bool:
        """It runs, and has not given up its pages."""
        return turn.state is TurnState.RUNNING and turn.turn_id not in self._releasing

    def _trust_copy(self, admission: Admission) -> None:
        """As far as what it copies: whoever wrote that is taken to have written the copy, too."""
        if admission.copied is None:
            return
        source, target = admission.copied
        for writer in self._turns.values():
            if source in writer.written:
                writer.written[target] = None

    def _discard(self, turn: Turn, now: float) -> None:
        """What it has computed is not to be trusted, by whoever uses it."""
        for chunk in self.cache.discard(turn, now):
            for other in self.running.values():
                if chunk.index < len(other.chunks) and other.chunks[chunk.index] is chunk:
                    other.frontier = min(other.frontier, chunk.index * self._size)
                    if other.streamed and other is not turn:
                        self._disturbed.append(other)


def start_of(turn: Turn) -> TurnStart:
    """What an executor has to know of a turn that begins."""
    options = turn.options
    return TurnStart(turn.turn_id, turn.tokens[:], options.sampling, options.constraint)
