"""Enumerate all small worlds: two conversations, a few pages, and every combination of choices.

A program calls `choose(n)` several times. A `Chooser` runs the program once for each sequence of answers,
depth first. Each run replays the answers of the previous run, except that it adds one to the last answer
that is not yet the largest.

At each step a world chooses between an iteration and one client action. Whenever the executor is polled, the
world also chooses which outstanding copies have finished. After its last choice, a world runs until
everything has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.core.world import Shape, World
from tests.fakes import LedgerExecutor


class Chooser:
    def __init__(self) -> None:
        self.answers: list[int] = []
        self._bounds: list[int] = []
        self._place = 0

    def choose(self, count: int) -> int:
        """Return one of 0 .. count - 1."""
        if count == 1:
            return 0
        if self._place == len(self.answers):
            self.answers.append(0)
            self._bounds.append(count)
        assert self._bounds[self._place] == count, "the program is not deterministic"
        self._place += 1
        return self.answers[self._place - 1]

    def runs(self) -> Iterator[None]:
        """Yield once for each sequence of answers."""
        while True:
            self._place = 0
            yield
            del self.answers[self._place :], self._bounds[self._place :]
            while self.answers and self.answers[-1] + 1 == self._bounds[-1]:
                self.answers.pop()
                self._bounds.pop()
            if not self.answers:
                return
            self.answers[-1] += 1


class ChosenExecutor(LedgerExecutor):
    """Copies finish when the chooser says so. Without a chooser, they finish at the next poll."""

    chooser: Chooser | None = None

    def _land_some(self) -> None:
        for copy_id in self.outstanding:
            if self.chooser is None or self.chooser.choose(2):
                self._land(copy_id)


@dataclass(frozen=True)
class SmallWorld:
    """Runs the `actions` in any order, each at most as often as it is listed.

    Conversation `a` already has a turn. Conversation `b` begins with its first turn, or as a fork of `a`.
    """

    shape: Shape
    actions: tuple[str, ...]
    num_choices: int  # number of actions and iterations
    first_tokens: int = 3  # tokens of the first prompt in `a`; the reply adds one
    prompt_tokens: int = 3


class ChosenWorld(World):
    def __init__(self, small: SmallWorld, chooser: Chooser) -> None:
        super().__init__(0, small.shape)
        shape, self.small = small.shape, small
        self.executor: ChosenExecutor = ChosenExecutor(
            *(shape.device_pages, shape.host_pages, shape.chunk_tokens, 0, 0.0, 0.0, shape.stops),
            staging_pages=shape.staging_pages,
        )
        self.logs["a"], self.commits["a"] = [], [0]
        self.born = {"a"}
        self.submit("a", prompt=[7] * small.first_tokens, reply_max=1)
        self.run_until_idle()
        self.executor.chooser = chooser

    def may(self, action: str) -> bool:
        verb, name = action.split()
        idle = name in self.logs and name not in self.turns
        match verb:
            case "ask" | "urge" | "visit":
                return idle or name not in self.born
            case "fork":
                return name in self.logs and "b" not in self.born
            case "warm" | "rewind":
                return idle and bool(self.logs[name])
            case "cancel":
                return name in self.turns
        return name in self.logs

    def do(self, action: str) -> None:
        verb, name = action.split()
        match verb:
            case "ask" | "urge" | "visit":
                self.born.add(name)
                self.logs.setdefault(name, [])
                self.commits.setdefault(name, [0])
                self.submit(
                    name,
                    prompt=[ord(name)] * self.small.prompt_tokens,
                    reply_max=2,
                    priority=int(verb == "urge"),
                    share="visitor" if verb == "visit" else "",
                )
            case "warm":
                self.submit(name, warm=True)
            case "rewind":
                self.rewind(name, self.small.first_tokens)
            case "fork":
                self.born.add("b")
                shared = self.small.first_tokens
                self.logs["b"], self.commits["b"] = self.logs[name][:shared], [0, shared]
                self.cache.fork(name, shared, "b", self.clock.now())
            case "cancel":
                self.cancel(name)
            case "delete":
                self.delete(name)
            case "evict":
                self.cache.evict(name, self.clock.now())


def enumerate_worlds(small: SmallWorld) -> int:
    """Return the number of worlds. An error has a note with the choices that led to it."""
    chooser, num_worlds = Chooser(), 0
    for _ in chooser.runs():
        done: list[str] = []
        try:
            run_chosen(small, chooser, done)
        except BaseException as error:
            error.add_note(f"{small.shape} after {done}, choices {chooser.answers}")
            raise
        num_worlds += 1
    return num_worlds


def run_chosen(small: SmallWorld, chooser: Chooser, done: list[str]) -> None:
    world = ChosenWorld(small, chooser)
    left = list(small.actions)
    for _ in range(small.num_choices):
        possible = ["step", *dict.fromkeys(action for action in left if world.may(action))]
        action = possible[chooser.choose(len(possible))]
        done.append(action)
        if action == "step":
            world.step()
        else:
            left.remove(action)
            world.do(action)
            world.clock.advance(1.0)
    world.executor.chooser = None
    world.run_until_idle()
