"""Which waiting turn is admitted next: that of the share that has used least, in that share's own order.

A share is whatever the turns are divided among, most often a tenant; core knows its name and its weight.
Each share has a counter of the tokens that were computed for it, divided by its weight.  The next turn is
that of the waiting share with the lowest counter (of several, the one whose first turn came first), and
within a share the turns keep the order of the queue.  This is fair queueing with token counters (Sheng et
al., "Fairness in Serving Large Language Models", OSDI 2024):

* **Charged** is what is computed: the positions of a prefill as they come into a batch, then each token
  that a turn samples.  What is found in the cache costs nothing.
* **Lifted**: a share that begins to wait has saved up nothing while it did not: its counter is raised to
  the lowest of those that wait, or, if none does, to that of the share that was admitted last.

So a share that has put in a thousand turns delays another one's next turn by one of them, not by a
thousand; and while two shares wait, what they get has the proportion of their weights, up to what their
running turns may still sample.  With a single share this is a plain queue.

A prefill that has begun gives way in the same manner: the tokens of an iteration go to the share that has
used least, so a prompt of a hundred thousand tokens holds up its own share alone.

Nobody waits for ever: as long as a share waits, what is computed for another raises that one's counter,
and no counter that is lower can come.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from pensieve.core.turn import Turn

QUEUE_ORDER = attrgetter("queue_order")


@dataclass(eq=False, slots=True)
class Share:
    name: str
    weight: float = 1.0
    used: float = 0.0  # tokens that were computed for it, divided by its weight
    num_tokens: int = 0  # that were computed for it
    turns: list[Turn] = field(default_factory=list)  # that wait, in queue order


class FairQueue:
    """The turns that wait for their first iteration; all shares that ever had one are remembered."""

    def __init__(self) -> None:
        self._shares: dict[str, Share] = {}
        self._waiting: dict[str, Share] = {}  # those with turns
        self._latest: Share | None = None  # admitted last

    def __len__(self) -> int:
        return sum(len(share.turns) for share in self._waiting.values())

    def __contains__(self, turn: object) -> bool:
        return any(each is turn for each in self)

    def __iter__(self) -> Iterator[Turn]:
        """Share by share, each in its order."""
        for share in self._waiting.values():
            yield from share.turns

    def head(self, busy: Collection[str] = ()) -> Turn | None:
        """The turn that is next, of the shares that are not these."""
        waiting = [share for share in self._waiting.values() if share.name not in busy]
        if not waiting:
            return None
        return min(waiting, key=lambda each: (each.used, each.turns[0].queue_order)).turns[0]

    def add(self, turn: Turn) -> None:
        share = self._shares.setdefault(turn.share, Share(turn.share))
        share.weight = turn.weight
        if not share.turns:
            share.used = max(share.used, self._floor())
            self._waiting[share.name] = share
        insort(share.turns, turn, key=QUEUE_ORDER)

    def remove(self, turn: Turn) -> None:
        share = self._shares[turn.share]
        share.turns.remove(turn)
        if not share.turns:
            del self._waiting[share.name]

    def admit(self, turn: Turn) -> None:
        """Take out a turn that is admitted."""
        self.remove(turn)
        self._latest = self._shares[turn.share]

    def least_used(self, turns: Collection[Turn]) -> Turn | None:
        """The one of these whose share has used least, the first of it."""
        return min(turns, key=lambda each: (self.used(each), each.queue_order), default=None)

    def used(self, turn: Turn) -> float:
        """By its share."""
        return self._shares[turn.share].used

    def charge(self, turn: Turn, num_tokens: int) -> None:
        share = self._shares[turn.share]
        share.used += num_tokens / share.weight
        share.num_tokens += num_tokens

    def num_tokens_of_shares(self) -> dict[str, int]:
        """What was computed for each, by its name."""
        return {name: share.num_tokens for name, share in self._shares.items()}

    def check(self) -> None:
        for name, share in self._shares.items():
            assert bool(share.turns) == (name in self._waiting), (
                f"share {name!r} waits and does not"
            )
            found = [turn.queue_order for turn in share.turns]
            assert found == sorted(found), f"the turns of share {name!r} are out of order"

    def _floor(self) -> float:
        if self._waiting:
            return min(share.used for share in self._waiting.values())
        return self._latest.used if self._latest is not None else 0.0
