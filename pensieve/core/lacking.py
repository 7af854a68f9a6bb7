"""Turns that are next in one plan and do not fit into memory, and who may be admitted before them.

A short message behind a long history may need most of the device.  Until running turns have ended it waits,
and those behind it that fit need not: new ones, as long as no turn that lacks pages was passed by PASSES_MAX
others, and only such as need nothing from the host: an iteration with swap-ins has no swap-outs, and these
are what the turn waits for.  One that was suspended, or that others gave way to, is not passed.
"""

from __future__ import annotations

from pensieve.core.cache import KVCache
from pensieve.core.cache_values import Shortage
from pensieve.core.turn import Turn, TurnState

PASSES_MAX = 8
TURNS_MAX = 4  # that lack pages, in one plan


class Lacking:
    def __init__(self, cache: KVCache, background: bool = False, may_admit: bool = True) -> None:
        """Of background turns, or of the others."""
        self._cache = cache
        self.background = background
        self.turns: list[Turn] = []
        self.required_pages = 0  # of the first
        self.may_admit = may_admit  # whoever is next

    def add(self, turn: Turn, shortage: Shortage | None, is_claimant: bool) -> None:
        """It does not fit; None: it waits for a commit."""
        if not self.turns and shortage is not None:
            self.required_pages = shortage.required_pages
        self.turns.append(turn)
        is_passed = turn.state is TurnState.QUEUED and not is_claimant and shortage is not None
        self.may_admit = is_passed and self._may_pass()

    def puts_aside(self, turn: Turn) -> bool:
        """Whether it waits because of these: it needs something from the host."""
        if not self.turns or self._cache.is_at_hand(turn):
            return False
        self.turns.append(turn)
        self.may_admit = turn.state is TurnState.QUEUED and self._may_pass()
        return True

    def passed(self) -> None:
        """Another turn is admitted."""
        for turn in self.turns:
            turn.num_passed += 1
        self.may_admit = self._may_pass()

    def _may_pass(self) -> bool:
        return len(self.turns) < TURNS_MAX and all(
            turn.num_passed < PASSES_MAX for turn in self.turns
        )
