"""Which turn goes first: of the turns that wait, and of the prefills that have begun.

The machine is divided among shares.  A share is most often a tenant; core knows its name and its weight.

**Between shares.**  Each share has a counter: the tokens that were computed for it, divided by its weight.
 The waiting share with the lowest counter is next.  (If several are equal, the one whose turn came first.)
This is fair queueing with token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI
2024):

* **Charged** is what is computed: the positions of a prefill as they come into a batch, then each token that
  a turn samples.  Tokens that are found in the cache cost nothing.
* **Lifted**: a share saves up nothing while it does not wait.  When it begins to wait, its counter is raised
  to the lowest of the other shares that have turns, or, if none has, to that of the share that was admitted
  last.

So a share that submits a thousand turns delays another share's next turn by one turn, not by a thousand.
 While two shares wait, they get tokens in the proportion of their weights, up to what their running turns may
still sample.  A prefill that has begun gives way in the same manner.

**Within a share** turns wait in lines, each first come, first served.  There is a pair of lines for each
priority, and the higher priorities go first.  The first line of a pair has the prompts that fit into an
iteration, the second the longer ones.  So a document of a hundred thousand tokens does not keep everybody's
next message waiting, not even if it does not fit into memory.  A line is overdue, and its first turn is next,
if so many turns passed it that came after its first one:

    TURNS_A_PRIORITY      of the next higher priority (twice as many of the one above that, …)
    SHORT_TURNS           with short prompts, of the same priority

(Turns that do not fit into memory may be passed, too: `BlockedTurns` of scheduler.py.)

**Background turns** (of batch jobs) have shares of their own, which are compared only with each other.
 Tokens of a job lift no interactive share, nor the other way round.

Nobody waits for ever.  As long as a share waits, tokens computed for another share raise that share's
counter, and no lower counter can appear.  Within a share each line moves, if slowly.

**Prefills of a share** get the tokens of an iteration by level, and then **the shortest remaining one
first**. So a message that takes one iteration does not wait for the hundred iterations of a document, which
waits one longer.  That is best for the mean time to the first token, and alone it would starve the long ones.
So something is **held back for the oldest prefill**: younger ones leave it HELD_BACK of the tokens that
prompts may take in an iteration, and TOKENS_MIN at least (iteration_builder.py).  Being passed makes it at
most 1 / HELD_BACK times as long.  If there is room for one tile only, the oldest prefill gets the tile.

A waiting turn is admitted beside prefills of its share if it goes before all of them.  Otherwise it would
take pages and no tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from pensieve.core.turn import Turn, TurnState

TURNS_A_PRIORITY = 64
SHORT_TURNS = 8

Line = tuple[int, bool]  # priority, and whether its prompts are short; the greatest is served first


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

    def in_order(self, excluded: Collection[Turn]) -> list[Turn]:
        """The first turn of each line, without the excluded ones: overdue lines by arrival, then by rank."""
        firsts = (self._first_of(line, excluded) for line in self._lines_in_order())
        return [turn for turn in firsts if turn is not None]

    def _first_of(self, line: Line, excluded: Collection[Turn]) -> Turn | None:
        return next((turn for turn in self.lines[line] if turn not in excluded), None)

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
        self._with_turns: dict[str, Share] = {}  # by name
        self._latest: dict[bool, Share] = {}  # admitted last, of background and of others
        self._num_turns = 0
        self.num_prompt_tokens = 0  # of the interactive turns that wait

    def __len__(self) -> int:
        return self._num_turns

    def __contains__(self, turn: object) -> bool:
        return any(each is turn for each in self)

    def __iter__(self) -> Iterator[Turn]:
        """Share by share, and line by line, each as they came."""
        for share in self._with_turns.values():
            for line in sorted(share.lines, reverse=True):
                yield from share.lines[line]

    def next_turn(
        self,
        suspended: Iterable[Turn],
        may_run: Callable[[Turn], bool],
        excluded: Collection[Turn] = (),
    ) -> Turn | None:
        """Of the turns that wait and may run: of the share that has used least, one of the highest level.

        `suspended` turns are in `resume_order`.  One of them goes before new ones of its level, unless its
        share of time was over.  If the first of a share may not run, no other suspended turn of it may.
        """
        first: dict[str, Turn] = {}  # the first suspended one of each share
        for turn in suspended:
            first.setdefault(turn.share, turn)
        waiting = [*filter(may_run, first.values()), *self._heads(may_run, excluded)]
        return min(
            waiting,
            key=lambda turn: (
                self.used(turn),
                -turn.level,
                turn.state is TurnState.QUEUED or turn.moved_back,
                turn.arrival,
            ),
            default=None,
        )

    def _heads(self, may_run: Callable[[Turn], bool], excluded: Collection[Turn]) -> Iterator[Turn]:
        """The next turn of each share that waits."""
        for share in self._with_turns.values():
            turn = next(filter(may_run, share.in_order(excluded)), None)
            if turn is not None:
                yield turn

    def has_other(self, share: str, level: int) -> bool:
        """Whether anybody waits who is of another share, or above this level."""
        return any(
            name != share or max(each.lines)[0] > level for name, each in self._with_turns.items()
        )

    def add(self, turn: Turn) -> None:
        share = self._shares.setdefault(turn.share, Share(turn.share, turn.is_background))
        share.weight = turn.weight
        if not share.lines:
            share.used = max(share.used, self._floor(share))
            self._with_turns[share.name] = share
        share.num_turns += 1
        share.lines.setdefault(self.line_of(turn), deque()).append(turn)
        self._num_turns += 1
        self.num_prompt_tokens += 0 if turn.is_background else turn.num_new_tokens

    def remove(self, turn: Turn) -> None:
        share = self._shares[turn.share]
        share.remove(turn, self.line_of(turn))
        self._num_turns -= 1
        self.num_prompt_tokens -= 0 if turn.is_background else turn.num_new_tokens
        if not share.lines:
            del self._with_turns[share.name]

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
        return turn.options.priority, turn.num_new_tokens <= self._short_tokens_max

    def check(self, num_all: int) -> None:
        """`num_all` is the number of turns that have not ended."""
        num_turns = 0
        assert sum(share.num_turns for share in self._shares.values()) == num_all
        for name, share in self._shares.items():
            assert bool(share.lines) == (name in self._with_turns), (
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
        num_tokens = sum(turn.num_new_tokens for turn in self if not turn.is_background)
        assert num_tokens == self.num_prompt_tokens, "tokens that wait are miscounted"

    def _floor(self, own: Share) -> float:
        others = [
            each.used
            for each in self._shares.values()
            if each.num_turns and each is not own and each.is_background == own.is_background
        ]
        latest = self._latest.get(own.is_background)
        return min(others, default=latest.used if latest is not None else 0.0)


# -- prefills of one share --


def prefill_order(turn: Turn) -> tuple[int, int, int]:
    """The least goes first."""
    return -turn.level, turn.num_missing, turn.arrival


def resume_order(turn: Turn) -> tuple[int, int, int]:
    """Of suspended turns of one share, the least comes back first."""
    return -turn.level, int(turn.moved_back), turn.arrival


def precedes_prefills(turn: Turn, started: Iterable[Turn]) -> bool:
    """Whether it goes before all prefills of its share that have begun."""
    own = prefill_order(turn)
    return all(own < prefill_order(each) for each in started if each.share == turn.share)


def oldest_prefill(turn: Turn, started: Iterable[Turn]) -> Turn | None:
    """The oldest prefill of its share and of no lower level, if that came before this turn."""
    older = [
        each
        for each in started
        if each.share == turn.share and each.arrival < turn.arrival and each.level >= turn.level
    ]
    return min(older, key=lambda each: each.arrival, default=None)
