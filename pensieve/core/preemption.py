"""Choose running turns to preempt: by priority within a share, by need between shares.

A *share* is an owner of turns, usually a tenant (fair_queue.py). A *place* is the right to run. There may be
no place for the next turn, because the maximum number of turns runs, or because the running turns leave too
few pages. Then running turns are preempted if the next turn is *entitled* to their places:

* **Same share, lower level.** A turn's level is its priority, plus one for each time that it was preempted by
  this rule. So a turn is preempted only a few times. When it resumes, it goes before new turns of the level
  that preempted it.
* **Same share and level, if time is shared** (`time_share` tokens): a turn is preempted after `time_share`
  tokens of its reply since it was admitted. It goes to the end of the queue, like a turn that arrives now. So
  if there are more turns than places, no turn waits for whole replies before its first token.
* **Background turns** (background_room.py) are preempted for any interactive turn. All of them are preempted
  at once, because more interactive turns may be waiting. No turn is preempted for a background turn.
* **Another share** loses a turn if two conditions hold. First, it has used at least as much as the waiting
  share (fair_queue.py). Second, it holds more of the missing resource (pages or places) than the waiting
  share would hold afterwards. Holdings are divided by weights. So a share that has filled the memory gives
  up a part when another share arrives. The second condition keeps the shares from preempting each other in
  turn.

Victims are chosen in this order: background turns, turns of the other share that holds most, warms (turns
that only compute KV in advance), and the latest turn of the lowest level. No turn is preempted for a warm.
Turns are preempted only if the next turn then gets its pages and all running turns together meet the
objective. The reserve for generating turns is kept if possible.

The turn for which others were preempted is the *claimant*. It is next until it runs, even before its victims,
which may have risen to its level. It loses the claim in three cases: a turn of a higher level waits, a share
that has used less waits, or the running turns have grown into its pages.

**A preempted turn loses its place**, but no computed KV. It is suspended, as if a page had been missing
(scheduler.py). Its chunks stay until another turn takes their pages, or the policy moves them to the host.
Chunks that are still cached when the turn resumes are not recomputed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping

from pensieve.core.cache import KVCache
from pensieve.core.fair_queue import FairQueue
from pensieve.core.prefix_tree import Branch
from pensieve.core.turn import PRIORITY_MIN, Turn

Place = tuple[str, int]  # (share, level)


class Preemption:
    def __init__(
        self,
        cache: KVCache,
        queued: FairQueue,
        has_room_for: Callable[[Turn, Collection[Turn]], bool],
        time_share: int,
    ) -> None:
        """`has_room_for`: whether a turn may run beside others. `time_share` 0: time is not shared."""
        self._cache, self._queued, self._used = cache, queued, queued.used
        self._has_room_for, self._time_share = has_room_for, time_share
        self.claimant: Turn | None = None  # the turn for which others were preempted
        self._places: dict[int, Place] = {}  # of the running turns, by id
        self._num_running: Counter[Place] = Counter()  # by place

    def began(self, turn: Turn) -> None:
        """Note that a turn runs."""
        level = PRIORITY_MIN - 1 if turn.warm else turn.level
        place = self._places[turn.attempt_id] = (turn.share, level)
        self._num_running[place] += 1
        if turn is self.claimant:
            self.claimant = None

    def ended(self, turn: Turn) -> None:
        """Note that a turn has given up its place, or has ended without a place."""
        if (place := self._places.pop(turn.attempt_id, None)) is not None:
            self._num_running[place] -= 1
            if not self._num_running[place]:
                del self._num_running[place]
        elif turn is self.claimant:
            self.claimant = None

    def check(self, running: Mapping[int, Turn]) -> None:
        """Check the places and their counts against the turns that run."""
        assert self._places.keys() == running.keys(), (
            "the turns with a place are not the running turns"
        )
        for attempt_id, (share, _) in self._places.items():
            assert share == running[attempt_id].share, (
                f"turn {attempt_id} has another share's place"
            )
        # Plain dicts are compared: Counters are equal even if one has an entry of 0.
        counts = dict(Counter(self._places.values()))
        assert dict(self._num_running) == counts, "running turns are miscounted"
        claims = self.claimant is not None and self.claimant.attempt_id in running
        assert not claims, "a turn that runs still claims a place"

    def is_impossible(self, suspended: Collection[Turn]) -> bool:
        """Whether no turn can be preempted: one share, and no waiting turn above a running turn. Fast."""
        if not suspended and not len(self._queued):
            return True
        if self.claimant is not None or self._time_share or len(self._num_running) > 1:
            return False
        return all(
            not self._queued.has_other(*place)
            and not any(each.share != place[0] or each.level > place[1] for each in suspended)
            for place in self._num_running
        )

    def victims(self, first: Turn | None, running: Collection[Turn]) -> list[Turn]:
        """Return the running turns that give way; `first` is the next waiting turn."""
        former, self.claimant = self.claimant, None
        turn = former if former is not None and not self._outranks(first, former) else first
        if turn is None or (turn is not former and not self._any_can_give_way(turn, running)):
            return []
        num_pages, pages_left = self._cache.room_beside(running)(turn)
        spare = self._cache.config.reserve_pages if turn is not former else 0
        fits = num_pages <= pages_left and self._has_room_for(turn, running)
        chosen: list[Turn] = []
        if not fits or num_pages + spare > pages_left:
            chosen = self._choose(turn, running, num_pages, num_pages + spare - pages_left, spare)
        if any(each.is_background for each in chosen):
            chosen += [each for each in running if each.is_background and each not in chosen]
        if chosen or (turn is former and fits):
            self.claimant = turn
        return chosen

    def _outranks(self, first: Turn | None, claimant: Turn) -> bool:
        if first is None:
            return False
        if first.share == claimant.share:
            return first.level > claimant.level
        return self._used(first) < self._used(claimant)

    def _any_can_give_way(self, waiting: Turn, running: Collection[Turn]) -> bool:
        """Whether a running turn may have to give way to a waiting turn."""
        return any(each.share != waiting.share or self._is_below(each, waiting) for each in running)

    def _is_below(self, turn: Turn, waiting: Turn) -> bool:
        """Whether a running turn of the same share must give way to a waiting turn."""
        if turn.warm or waiting.level > turn.level:
            return True
        return waiting.level == turn.level and 0 < self._time_share <= turn.outputs_since

    def _choose(
        self, waiting: Turn, running: Collection[Turn], num_pages: int, pages_over: int, spare: int
    ) -> list[Turn]:
        """Return the victims for a turn that lacks `pages_over` pages, `spare` of which are optional."""
        by_pages = pages_over > 0  # otherwise the turn lacks a place
        left = {turn.attempt_id: turn for turn in running}
        if by_pages:  # streamed turns hold no device pages
            running = [turn for turn in running if not turn.streamed]
        held = _holdings(running, by_pages)
        would_hold = (num_pages if by_pages else 1) / waiting.weight + held.get(waiting.share, 0.0)
        used = self._used(waiting)

        def goes_after(turn: Turn) -> tuple[bool, int, int, int]:
            """Sort key of victims. The greatest is chosen first: warms, lowest level, most tokens, latest."""
            shares_time = self._time_share and turn.level == waiting.level
            num_tokens = turn.outputs_since if shares_time else 0
            return turn.warm, -turn.level, num_tokens, turn.arrival

        by_share: dict[str, list[Turn]] = {}  # the first victim is last
        for turn in sorted(running, key=goes_after):
            if turn.share != waiting.share or self._is_below(turn, waiting):
                by_share.setdefault(turn.share, []).append(turn)
        num_holders: dict[Branch, int] = {}  # among the turns that keep their places
        for turn in running:
            for branch in self._cache.path_of(turn):
                num_holders[branch] = num_holders.get(branch, 0) + 1
        chosen: list[Turn] = []
        while pages_over > 0 or not self._has_room_for(waiting, left.values()):
            others = [
                (turns[-1].is_background, held[share], share)
                for share, turns in by_share.items()
                if share != waiting.share
                and turns
                and (
                    turns[-1].is_background
                    or (used <= self._used(turns[-1]) and would_hold < held[share])
                )
            ]
            share = max(others)[-1] if others else waiting.share
            if not by_share.get(share):
                enough = pages_over <= spare and self._has_room_for(waiting, left.values())
                return chosen if enough else []
            victim = by_share[share].pop()
            chosen.append(victim)
            del left[victim.attempt_id]
            held[share] -= (len(victim.chunks) if by_pages else 1) / victim.weight
            for branch in self._cache.path_of(victim):
                num_holders[branch] -= 1
                pages_over -= 0 if num_holders[branch] else len(branch.chunks)
        return chosen


def turn_to_suspend(running: Collection[Turn]) -> Turn:
    """Choose the turn to suspend for a missing page.

    The order is: background turns, warms, turns of the share that holds most. Of several such turns, the
    latest turn of the lowest level is chosen.
    """
    held = _holdings(running)
    return max(
        running,
        key=lambda turn: (
            turn.is_background,
            *(turn.warm, held[turn.share], -turn.level, turn.arrival),
        ),
    )


def _holdings(running: Collection[Turn], by_pages: bool = True) -> dict[str, float]:
    """Return the pages (or the number) of each share's running turns, divided by the turns' weights."""
    held: dict[str, float] = {}
    for turn in running:
        taken = (len(turn.chunks) if by_pages else 1) / turn.weight
        held[turn.share] = held.get(turn.share, 0.0) + taken
    return held
