"""Which waiting turn is admitted next: of the share that has used least, the first in that share's own order.

A share is whatever the turns are divided among, most often a tenant; core knows its name and its weight.

**Between shares.**  Each has a counter of the tokens that were computed for it, divided by its weight.  The
next turn is that of the waiting share with the lowest counter (of several, the one whose turn came first).
This is fair queueing with token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI
2024):

* **Charged** is what is computed: the positions of a prefill as they come into a batch, then each token
  that a turn samples.  What is found in the cache costs nothing.
* **Lifted**: a share that begins to wait has saved up nothing while it did not: its counter is raised to
  the lowest of the others that have turns, or, if none does, to that of the share that was admitted last.

So a share that has put in a thousand turns delays another one's next turn by one of them, not by a
thousand; and while two shares wait, what they get has the proportion of their weights, up to what their
running turns may still sample.  A prefill that has begun gives way in the same manner.

**Within a share** turns wait in lines, each first come first served: one for every priority, the higher
ones first, and of a priority two, one for prompts that fit into an iteration and behind it one for longer
ones.  A document of a hundred thousand tokens does not keep everybody's next message waiting, and as long
as it does not fit into memory they do not wait for that.  They do not pass it for ever either: a line that
so many turns passed which came after its first one,

    TURNS_A_PRIORITY      of the next higher priority (twice as many of the one above that, …)
    SHORT_TURNS           with short prompts, of the same priority

is overdue, and its first turn is next.  (Turns that do not fit into memory may be passed, too: `BlockedTurns`
of scheduler.py.)

**Background turns** (of batch jobs) have shares of their own, which are compared with each other alone: what
a job has used lifts no interactive share, nor the other way round.

Nobody waits for ever: as long as a share waits, what is computed for another raises that one's counter,
and no counter that is lower can come; and within a share each line moves, if slowly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from pensieve.core.turn import Turn

TURNS_A_PRIORITY = 64
SHORT_TURNS = 8

Line = tuple[int, bool]  # priority, and whether its prompts are short; the greatest is served first


def num_new_tokens(turn: Turn) -> int:
    """Of its prompt."""
    return turn.prompt_end - turn.history_tokens


def _passes_allowed(ahead: Line, behind: Line) -> int:
    return TURNS_A_PRIORITY * (ahead[0] - behind[0]) or SHORT_TURNS


@dataclass(eq=False, slots=True)
class Share:
    name: str
    is_background: bool = False
    weight: float = 1.0
    used: float = 0.0  # tokens that were computed for it, divided by its weight
    num_tokens: int = 0  # that were computed for it
    num_turns: int = 0  # that have not ended
    lines: dict[Line, deque[Turn]] = field(default_factory=dict)  # that have turns
    passed: dict[Line, int] = field(
        default_factory=dict
    )  # since a line moved: turns that passed it

    def in_order(self, but: Collection[Turn]) -> list[Turn]:
        """The first turns of its lines: those that are overdue as they came, then by rank.

        Of each line the first that is none of these few.
        """
        firsts = (self._first_of(line, but) for line in self._lines_in_order())
        return [turn for turn in firsts if turn is not None]

    def _first_of(self, line: Line, but: Collection[Turn]) -> Turn | None:
        return next((turn for turn in self.lines[line] if turn not in but), None)

    def _lines_in_order(self) -> Iterable[Line]:
        if len(self.lines) == 1:
            return self.lines
        ranked = sorted(self.lines, reverse=True)
        first = ranked[0]
        overdue = [
            line for line in ranked[1:] if self.passed.get(line, 0) >= _passes_allowed(first, line)
        ]
        overdue.sort(key=lambda line: self.lines[line][0].arrival)
        return dict.fromkeys((*overdue, *ranked))

    def remove(self, turn: Turn, line: Line) -> None:
        waiting = self.lines[line]
        waiting.remove(turn)
        if not waiting:
            del self.lines[line]
            self.passed.pop(line, None)

    def turn_passes(self, turn: Turn, own: Line) -> None:
        """A turn of this line is admitted."""
        self.passed.pop(own, None)
        for line, waiting in self.lines.items():
            if line < own and waiting[0].arrival < turn.arrival:
                self.passed[line] = self.passed.get(line, 0) + 1


class FairQueue:
    """The turns that wait for their first iteration; all shares that ever had one are remembered."""

    def __init__(self, short_tokens_max: int) -> None:
        """Prompts of at most so many new tokens are short."""
        self._short_tokens_max = short_tokens_max
        self._shares: dict[str, Share] = {}
        self._waiting: dict[str, Share] = {}  # those with turns
        self._latest: dict[bool, Share] = {}  # admitted last, of background and of others
        self._num_turns = 0
        self.num_prompt_tokens = 0  # of the interactive turns that wait

    def __len__(self) -> int:
        return self._num_turns

    def __contains__(self, turn: object) -> bool:
        return any(each is turn for each in self)

    def __iter__(self) -> Iterator[Turn]:
        """Share by share, and line by line, each as they came."""
        for share in self._waiting.values():
            for line in sorted(share.lines, reverse=True):
                yield from share.lines[line]

    def heads(
        self,
        may_come: Callable[[Turn], bool],
        but: Collection[Turn],
    ) -> Iterator[Turn]:
        """Of each share that waits its next turn, of those that may come, and are none of these few."""
        for share in self._waiting.values():
            turn = next(filter(may_come, share.in_order(but)), None)
            if turn is not None:
                yield turn

    def has_other(self, share: str, level: int) -> bool:
        """Whether anybody waits who is of another share, or above this level."""
        return any(
            name != share or max(each.lines)[0] > level for name, each in self._waiting.items()
        )

    def add(self, turn: Turn) -> None:
        share = self._shares.setdefault(turn.share, Share(turn.share, turn.is_background))
        share.weight = turn.weight
        if not share.lines:
            share.used = max(share.used, self._floor(share))
            self._waiting[share.name] = share
        share.num_turns += 1
        share.lines.setdefault(self.line_of(turn), deque()).append(turn)
        self._num_turns += 1
        self.num_prompt_tokens += 0 if turn.is_background else num_new_tokens(turn)

    def remove(self, turn: Turn) -> None:
        share = self._shares[turn.share]
        share.remove(turn, self.line_of(turn))
        self._num_turns -= 1
        self.num_prompt_tokens -= 0 if turn.is_background else num_new_tokens(turn)
        if not share.lines:
            del self._waiting[share.name]

    def admit(self, turn: Turn) -> None:
        """Take out a turn that is admitted."""
        self.remove(turn)
        share = self._latest[turn.is_background] = self._shares[turn.share]
        share.turn_passes(turn, self.line_of(turn))

    def end(self, turn: Turn) -> None:
        """A turn has ended, wherever it was."""
        self._shares[turn.share].num_turns -= 1

    def used(self, turn: Turn) -> float:
        """By its share."""
        return self._shares[turn.share].used

    def charge(self, turn: Turn, num_tokens: int) -> None:
        share = self._shares[turn.share]
        share.used += num_tokens / share.weight
        share.num_tokens += num_tokens

    @property
    def tokens_by_share(self) -> dict[str, int]:
        """That were computed for each, of those that ever had a turn."""
        return {name: share.num_tokens for name, share in self._shares.items()}

    def line_of(self, turn: Turn) -> Line:
        """Where in its share it waits."""
        return turn.options.priority, num_new_tokens(turn) <= self._short_tokens_max

    def check(self, num_all: int) -> None:
        """`num_all` is the number of turns that have not ended."""
        num_turns = 0
        assert sum(share.num_turns for share in self._shares.values()) == num_all
        for name, share in self._shares.items():
            assert bool(share.lines) == (name in self._waiting), (
                f"share {name!r} waits and does not"
            )
            assert set(share.passed) <= set(share.lines), f"share {name!r} counts for no line"
            for line, waiting in share.lines.items():
                assert waiting, f"share {name!r} has an empty line"
                assert {self.line_of(turn) for turn in waiting} == {line}, (
                    f"a turn of share {name!r} waits in the wrong line"
                )
                found = [turn.arrival for turn in waiting]
                assert found == sorted(found), f"the turns of share {name!r} are out of order"
                num_turns += len(waiting)
        assert num_turns == self._num_turns, "turns that wait are miscounted"
        num_tokens = sum(num_new_tokens(turn) for turn in self if not turn.is_background)
        assert num_tokens == self.num_prompt_tokens, "tokens that wait are miscounted"

    def _floor(self, own: Share) -> float:
        others = [
            each.used
            for each in self._shares.values()
            if each.num_turns and each is not own and each.is_background == own.is_background
        ]
        latest = self._latest.get(own.is_background)
        return min(others, default=latest.used if latest is not None else 0.0)
