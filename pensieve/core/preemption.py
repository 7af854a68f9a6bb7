"""Which running turns give their places to a waiting one: by priority within a share, by need between shares.

Before an iteration is planned, the turn that is next may find no place: as many turns run as may, or the
running turns leave too few pages.  Others then give up their places, if the turn is *entitled* to them:

* **In its own share**, it has a higher level than they.  A turn's level is its priority, and one more each
  time that it lost its place in this way.  So no turn is preempted without end, and a preempted turn is back
  before new turns of the level that preempted it.
* **In its own share and level**, if time is shared (`time_share` tokens), they have had so many tokens of
  their replies since they were admitted.  They go to the end of the queue, as if they had come now.  So if
  more turns run than fit, each has its first token after a round, and not after the replies of those before
  it.
* **Background turns** (background_room.py) give way to any interactive turn, all of them at once, because
  others may wait behind it.  No turn gives way to them.
* **Another share** gives way if it has used no less (fair_queue.py), and if it would still hold no less of
  what is missing (pages, or places), over its weight, than the share that gets them.  So a share that filled
  the memory while nobody else wanted it gives a part back when somebody does, until all have theirs.  It
  cannot take that back the same way, so places do not go to and fro.

A background turn goes first, then a turn of the other share that holds most, then a warm, then the latest
turn of the lowest level.  Nobody gives way to a warm.  Nobody gives way if that would not be enough: for the
turn's pages, or for all remaining turns to meet the objective together.  The reserve for generating turns is
kept if possible.

The turn that others gave way to is next until it runs (`claimant`), also before these others, which have
risen to its level.  It gives the claim up to a turn of a higher level, to a share that has used less, and if
the running turns have meanwhile grown into its pages.

**A preempted turn loses its place**, and nothing that it has computed.  It is suspended, as if a page had
been missing (scheduler.py).  Its chunks stay where they are until somebody takes their pages, and leave for
the host by the policy.  Chunks that are still held when it resumes are not computed again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping

from pensieve.core.cache import KVCache
from pensieve.core.fair_queue import FairQueue
from pensieve.core.prefix_tree import Branch
from pensieve.core.turn import PRIORITY_MIN, Turn

Place = tuple[str, int]  # a share, and a level of it


class Preemption:
    def __init__(
        self,
        cache: KVCache,
        queued: FairQueue,
        has_room_for: Callable[[Turn, Collection[Turn]], bool],
        time_share: int,
    ) -> None:
        """`has_room_for` tells whether a turn may run beside others; `time_share` 0: places are kept."""
        self._cache, self._queued, self._used = cache, queued, queued.used
        self._has_room_for, self._time_share = has_room_for, time_share
        self.claimant: Turn | None = None  # it is next, because others gave way to it
        self._places: dict[int, Place] = {}  # of the turns that run, by id
        self._num_running: Counter[Place] = Counter()  # in each

    def began(self, turn: Turn) -> None:
        """It runs."""
        level = PRIORITY_MIN - 1 if turn.warm else turn.level
        place = self._places[turn.turn_id] = (turn.share, level)
        self._num_running[place] += 1
        if turn is self.claimant:
            self.claimant = None

    def ended(self, turn: Turn) -> None:
        """It has given up its place, or never had one."""
        if (place := self._places.pop(turn.turn_id, None)) is not None:
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
        for turn_id, (share, _) in self._places.items():
            assert share == running[turn_id].share, f"turn {turn_id} has another share's place"
        counts = dict(Counter(self._places.values()))  # plain, so that a count of zero differs
        assert dict(self._num_running) == counts, "running turns are miscounted"
        claims = self.claimant is not None and self.claimant.turn_id in running
        assert not claims, "a turn that runs still claims a place"

    def is_impossible(self, suspended: Collection[Turn]) -> bool:
        """Check quickly that all turns are of one share, and that no waiting turn is above a running one."""
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
        """Return the running turns that give way; `first` is next among those that wait."""
        before, self.claimant = self.claimant, None
        turn = before if before is not None and not self._outranks(first, before) else first
        if turn is None or (turn is not before and not self._may_give(turn, running)):
            return []
        num_pages, pages_left = self._cache.room_beside(running)(turn)
        spare = self._cache.config.reserve_pages if turn is not before else 0
        fits = num_pages <= pages_left and self._has_room_for(turn, running)
        chosen: list[Turn] = []
        if not fits or num_pages + spare > pages_left:
            chosen = self._chosen(turn, running, num_pages, num_pages + spare - pages_left, spare)
        if any(each.is_background for each in chosen):
            chosen += [each for each in running if each.is_background and each not in chosen]
        if chosen or (turn is before and fits):
            self.claimant = turn
        return chosen

    def _outranks(self, first: Turn | None, claimant: Turn) -> bool:
        if first is None:
            return False
        if first.share == claimant.share:
            return first.level > claimant.level
        return self._used(first) < self._used(claimant)

    def _may_give(self, waiting: Turn, running: Collection[Turn]) -> bool:
        return any(each.share != waiting.share or self._is_below(each, waiting) for each in running)

    def _is_below(self, turn: Turn, waiting: Turn) -> bool:
        """Of its share, and has to give way to it."""
        if turn.warm or waiting.level > turn.level:
            return True
        return waiting.level == turn.level and 0 < self._time_share <= turn.outputs_since

    def _chosen(
        self, waiting: Turn, running: Collection[Turn], num_pages: int, pages_over: int, spare: int
    ) -> list[Turn]:
        """Who gives way to one that lacks so many pages, of which it can do without the spare ones."""
        by_pages = pages_over > 0  # else it lacks a place
        left = {turn.turn_id: turn for turn in running}
        if by_pages:  # of which a streamed turn holds none
            running = [turn for turn in running if not turn.streamed]
        held = _held(running, by_pages)
        would_hold = (num_pages if by_pages else 1) / waiting.weight + held.get(waiting.share, 0.0)
        used = self._used(waiting)

        def goes_after(turn: Turn) -> tuple[bool, int, int, int]:
            """The greatest goes first: a warm, the lowest level, who has had most, the latest."""
            had = turn.outputs_since if self._time_share and turn.level == waiting.level else 0
            return turn.warm, -turn.level, had, turn.arrival

        by_share: dict[str, list[Turn]] = {}  # who goes first is last
        for turn in sorted(running, key=goes_after):
            if turn.share != waiting.share or self._is_below(turn, waiting):
                by_share.setdefault(turn.share, []).append(turn)
        num_holders: dict[Branch, int] = {}  # of the turns that are left
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
            del left[victim.turn_id]
            held[share] -= (len(victim.chunks) if by_pages else 1) / victim.weight
            for branch in self._cache.path_of(victim):
                num_holders[branch] -= 1
                pages_over -= 0 if num_holders[branch] else len(branch.chunks)
        return chosen


def turn_to_suspend(running: Collection[Turn]) -> Turn:
    """Choose when a page is missing: a background turn, a warm, or the lowest and latest of the share that
    holds most."""
    held = _held(running)
    return max(
        running,
        key=lambda turn: (
            turn.is_background,
            *(turn.warm, held[turn.share], -turn.level, turn.arrival),
        ),
    )


def _held(running: Collection[Turn], by_pages: bool = True) -> dict[str, float]:
    """By each share: pages of its running turns, or how many they are, over its weight."""
    held: dict[str, float] = {}
    for turn in running:
        taken = (len(turn.chunks) if by_pages else 1) / turn.weight
        held[turn.share] = held.get(turn.share, 0.0) + taken
    return held
