"""Decide which waiting turn is admitted next, and which begun prefill gets tokens first.

A *share* is an owner of turns, usually a tenant. The core knows only its name and weight.

**Between shares.** Each share has a counter: the tokens that were computed for the share, divided by its
weight. The waiting share with the lowest counter is next. Of two equal counters, the share whose turn arrived
first is next. This is fair queueing with token counters (Sheng et al., "Fairness in Serving Large Language
Models", OSDI 2024):

* **Charge.** A share is charged for each position of a prefill when the position enters a batch, and for each
  sampled token. Cached tokens cost nothing.
* **Lift.** A share accumulates no credit while it does not wait. When a share begins to wait, its counter is
  raised to the lowest counter of the other shares that have turns. If no other share has turns, its counter
  is raised to the counter of the share that was admitted last.

So a share that submits a thousand turns delays another share's next turn by one turn, not by a thousand.
While two shares wait, they get tokens in proportion to their weights. Turns that already run continue to
sample, which can shift this ratio. The order also applies to the further tokens of prefills that have begun.

**Within a share**, turns wait in lines, first come, first served. Each priority has two lines: one for short
prompts, which fit into an iteration, and one line for longer prompts. Higher priorities go first. Within a
priority, short prompts go first. So a document of a hundred thousand tokens does not block other messages,
even if the document does not fit into memory. A line is overdue if too many turns that arrived later were
admitted from other lines. Then its first turn is next. The limits are:

    TURNS_A_PRIORITY      turns of the next higher priority (twice as many for the priority above that, …)
    SHORT_TURNS           turns with short prompts, of the same priority

(Other turns may also pass turns that do not fit into memory: `BlockedTurns` in scheduler.py.)

**Background turns** (of batch jobs) have separate shares, which are compared only with each other. Background
tokens lift no interactive share, and interactive tokens lift no background share.

No turn waits for ever. While a share waits, tokens that are computed for other shares raise the counters of
those shares, and no counter ever falls. Within a share, the limits keep each line moving.

**Prefills of a share** get tokens by level first. The level is the priority, plus one for each preemption.
Within a level, the **shortest remaining prefill** goes first. So a message that needs one iteration does not
wait for a document that needs a hundred iterations. The document ends one iteration later. This order
minimizes the mean time to the first token, but alone it would starve long prompts. So a part of each
iteration is **held back for the oldest prefill**: the fraction HELD_BACK of the prompt tokens, and at least
TOKENS_MIN tokens (iteration_builder.py). The oldest prefill therefore takes at most 1 / HELD_BACK times as
long as it would take alone. If there is room for only one tile (TOKENS_MIN tokens), the oldest prefill gets
the tile in every TILE_EVERY-th iteration.

With `first_come`, prompts of a level go in the order of arrival instead, as in algorithm 3 of Sarathi-Serve.
There is one line for each priority, nothing is held back, and a message may wait for a long document.

While prefills of its share are running, a waiting turn is admitted only if it goes before all of them.
Otherwise it would take pages and get no tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from pensieve.core.turn import Turn, TurnState

TURNS_A_PRIORITY = 64
SHORT_TURNS = 8

Line = tuple[int, bool]  # (priority, has short prompts); the greatest is served first


def _passes_allowed(ahead: Line, behind: Line) -> int:
    return TURNS_A_PRIORITY * (ahead[0] - behind[0]) or SHORT_TURNS


@dataclass(eq=False, slots=True)
class Share:
    name: str
    is_background: bool = False
    weight: float = 1.0
    used: float = 0.0  # computed tokens divided by the weight
    num_tokens: int = 0  # tokens computed for the share
    num_turns: int = 0  # turns that have not ended
    lines: dict[Line, deque[Turn]] = field(default_factory=dict)  # only lines with turns
    # For each line: turns that passed it since a turn of this line was admitted.
    passed: dict[Line, int] = field(default_factory=dict)

    def in_order(self, excluded: Collection[Turn]) -> list[Turn]:
        """Return, for each line, its first turn that is not excluded.

        Overdue lines come first, by arrival; then the other lines, by priority and with short prompts first.
        """
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
        """Add 1 to the count of each lower line whose first turn has waited longer than this turn."""
        self.passed.pop(own, None)
        for line, waiting in self.lines.items():
            if line < own and waiting[0].arrival < turn.arrival:
                self.passed[line] = self.passed.get(line, 0) + 1


class FairQueue:
    """The turns that wait for their first iteration. Remembers every share that ever had a turn."""

    def __init__(self, short_tokens_max: int, first_come: bool = False) -> None:
        """`short_tokens_max`: the maximum number of new tokens of a short prompt."""
        self._short_tokens_max = short_tokens_max
        self._first_come = first_come
        self._shares: dict[str, Share] = {}
        self._with_turns: dict[str, Share] = {}  # by name
        self._latest: dict[
            bool, Share
        ] = {}  # the share admitted last, by whether it is a background share
        self._num_turns = 0
        self.num_prompt_tokens = 0  # tokens of the waiting interactive turns

    def __len__(self) -> int:
        return self._num_turns

    def __contains__(self, turn: object) -> bool:
        return any(each is turn for each in self)

    def __iter__(self) -> Iterator[Turn]:
        """Iterate share by share, line by line, in order of arrival."""
        for share in self._with_turns.values():
            for line in sorted(share.lines, reverse=True):
                yield from share.lines[line]

    def next_turn(
        self,
        suspended: Iterable[Turn],
        may_run: Callable[[Turn], bool],
        excluded: Collection[Turn] = (),
    ) -> Turn | None:
        """Return the next waiting turn that may run.

        It is of the highest level in the share with the lowest counter.

        `suspended` turns are in `resume_order`. A suspended turn goes before new turns of its level, except
        if it was suspended because its time was used up (`Turn.moved_back`). If a share's first suspended
        turn may not run, its other suspended turns may not run either.
        """
        first: dict[str, Turn] = {}  # the first suspended turn of each share
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
        """Yield the next turn of each waiting share."""
        for share in self._with_turns.values():
            turn = next(filter(may_run, share.in_order(excluded)), None)
            if turn is not None:
                yield turn

    def has_other(self, share: str, level: int) -> bool:
        """Whether a turn of another share waits, or a turn above this level."""
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
        """Remove a turn because it is admitted."""
        self.remove(turn)
        share = self._latest[turn.is_background] = self._shares[turn.share]
        share.turn_passes(turn, self.line_of(turn))

    def end(self, turn: Turn) -> None:
        """Note that a turn has ended, in any state."""
        self._shares[turn.share].num_turns -= 1

    def used(self, turn: Turn) -> float:
        """Return the counter of the turn's share."""
        return self._shares[turn.share].used

    def charge(self, name: str, num_tokens: int) -> None:
        share = self._shares[name]
        share.used += num_tokens / share.weight
        share.num_tokens += num_tokens

    @property
    def tokens_by_share(self) -> dict[str, int]:
        """Tokens computed for each share."""
        return {name: share.num_tokens for name, share in self._shares.items()}

    def line_of(self, turn: Turn) -> Line:
        """Return the line of its share in which a turn waits."""
        is_short = self._first_come or turn.num_new_tokens <= self._short_tokens_max
        return turn.options.priority, is_short

    # -- prefills of one share --

    def prefill_order(self, turn: Turn) -> tuple[int, int, int]:
        """Sort key of prefills: the lowest key goes first."""
        return -turn.level, 0 if self._first_come else turn.num_missing, turn.arrival

    def precedes_prefills(self, turn: Turn, started: Iterable[Turn]) -> bool:
        """Whether a turn goes before all begun prefills of its share."""
        own, share = self.prefill_order(turn), turn.share
        return all(own < self.prefill_order(each) for each in started if each.share == share)

    def check(self, num_all: int) -> None:
        """Check the invariants; `num_all` is the number of turns that have not ended."""
        num_turns = 0
        assert sum(share.num_turns for share in self._shares.values()) == num_all
        for name, share in self._shares.items():
            assert bool(share.lines) == (name in self._with_turns), (
                f"share {name!r} is listed as waiting but has no turns, or has turns but is not listed"
            )
            assert set(share.passed) <= set(share.lines), (
                f"share {name!r} counts turns that passed an empty line"
            )
            for line, waiting in share.lines.items():
                assert waiting, f"share {name!r} has an empty line"
                assert {self.line_of(turn) for turn in waiting} == {line}, (
                    f"a turn of share {name!r} waits in the wrong line"
                )
                arrivals = [turn.arrival for turn in waiting]
                assert arrivals == sorted(arrivals), f"the turns of share {name!r} are out of order"
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


def resume_order(turn: Turn) -> tuple[int, int, int]:
    """Sort key of a share's suspended turns: the lowest key resumes first."""
    return -turn.level, int(turn.moved_back), turn.arrival


def oldest_prefill(turn: Turn, started: Iterable[Turn]) -> Turn | None:
    """Return the oldest prefill that has begun, arrived before this turn, and has no lower level.

    Only prefills of the turn's share count.
    """
    older = [
        each
        for each in started
        if each.share == turn.share and each.arrival < turn.arrival and each.level >= turn.level
    ]
    return min(older, key=lambda each: each.arrival, default=None)
