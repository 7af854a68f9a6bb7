"""Who says what when.

A trace is a stream of `Visit`s in the order of their times: one message each, of a conversation that may
have had others before.  Recorded ones come from a file, a line at a time:

* **Mooncake** (`timestamp` in ms, `input_length`, `output_length`, `hash_ids`): one id per block of 512
  tokens, equal ids mean equal prefixes, the last id is of a partial block.  A request continues the latest
  earlier one whose ids without the last are a prefix of its own and number two or more; a second one that
  continues the same is a fork.  The first block opens every line and relates nobody.
* **plain** (`conversation`, `at` seconds or `after` seconds from the end of the turn before, `input_tokens`,
  `output_tokens`, and, if wanted, `fork_of`).

What cannot be read is counted and named by its line, and the others are played.  `from_zero` has the clock
begin with the first message.

Drawn ones are conversations like those of published figures: `sharegpt`, `agents`, and single requests,
`requests` and `documents`.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace


@dataclass(slots=True, frozen=True)
class Visit:
    conversation: str
    at: float | None  # seconds; None: `after` the turn before has ended
    input_tokens: int  # new ones
    output_tokens: int
    after: float = 0.0
    history_tokens: int | None = None  # of the log that is kept; None: all of it
    fork_of: str = ""  # begins with the first `history_tokens` of this conversation
    log_tokens: int | None = None  # of its log, where another replica heard a part of it


@dataclass
class Problems:
    """Lines that were not understood."""

    lines: list[tuple[int, str]] = field(default_factory=list)  # the first few
    count: int = 0
    files: list[tuple[int, str]] = field(default_factory=list)  # and how many lines came before

    def add(self, line: int, problem: str) -> None:
        self.count += 1
        if len(self.lines) < 10:
            self.lines.append((line, problem))

    def place(self, line: int) -> str:
        """A line of all, as that of its file."""
        before, path = (
            [each for each in self.files if each[0] < line][-1] if self.files else (0, "")
        )
        named = f" of {path}" if len(self.files) > 1 else ""
        return f"line {line - before}{named}"


def read(lines: Iterable[str], problems: Problems) -> Iterator[Visit]:
    """The format is that of each line."""
    mooncake = Mooncake()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            given = json.loads(line)
            if not isinstance(given, dict):
                raise ValueError("is no object")
            yield mooncake.visit(given) if "hash_ids" in given else plain_visit(given)
        except KeyError as error:
            problems.add(number, f"{error.args[0]} is missing")
        except (ValueError, TypeError) as error:
            problems.add(number, str(error))


def from_zero(visits: Iterable[Visit]) -> Iterator[Visit]:
    """The first message is said at 0: a trace may begin in the middle of a day."""
    first: float | None = None
    for visit in visits:
        if visit.at is None:
            yield visit
            continue
        first = visit.at if first is None else first
        yield visit if not first else replace(visit, at=max(visit.at - first, 0.0))


def plain_visit(given: dict[str, object]) -> Visit:
    name = given["conversation"]
    if not isinstance(name, str) or not name:
        raise ValueError("conversation is a name")
    at = given.get("at")
    fork_of = given.get("fork_of", "")
    return Visit(
        name,
        None if at is None else _number(at, "at"),
        _count(given["input_tokens"], "input_tokens"),
        _count(given["output_tokens"], "output_tokens"),
        _number(given.get("after", 0.0), "after"),
        None,
        str(fork_of or ""),
    )


def _count(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is a whole number of at least 1, not {value!r}")
    return value


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{name} is a number of at least 0, not {value!r}")
    return float(value)


class Mooncake:
    """Finds out which request continues which."""

    def __init__(self) -> None:
        self._latest: dict[int, int] = {}  # a hash of ids without the last -> the latest request
        self._requests: list[
            tuple[str, int, bool]
        ] = []  # conversation, tokens at its end, continued
        self._num_forks = 0

    def visit(self, given: dict[str, object]) -> Visit:
        at = _number(given["timestamp"], "timestamp") / 1000
        num_inputs = _count(given["input_length"], "input_length")
        num_outputs = _count(given["output_length"], "output_length")
        ids = given["hash_ids"]
        if not isinstance(ids, list) or not all(isinstance(each, int) for each in ids):
            raise ValueError("hash_ids is a list of whole numbers")
        number = len(self._requests)
        before, key, last_key = -1, 0, 0
        for count, each in enumerate(ids, 1):
            last_key, key = key, hash((key, each))
            if count >= 2:
                before = max(before, self._latest.get(key, -1))
        if len(ids) >= 3:
            self._latest[last_key] = number
        if before < 0:
            name = f"r{number}"
            self._requests.append((name, num_inputs + num_outputs, False))
            return Visit(name, at, num_inputs, num_outputs)
        name, length, continued = self._requests[before]
        history = min(length, num_inputs)
        kept = min(history, num_inputs - 1)  # a turn brings at least one token
        fork_of = ""
        if continued:
            fork_of, name = name, f"r{number}"
            self._num_forks += 1
        else:
            self._requests[before] = (name, length, True)
        self._requests.append((name, num_inputs + num_outputs, False))
        return Visit(name, at, num_inputs - kept, num_outputs, 0.0, kept, fork_of)


# -- drawn --


@dataclass(frozen=True)
class Habits:
    """How a kind of conversation goes.

    A length is drawn from an exponential distribution around its mean, or, with a spread, from a log-normal
    one around its median.  Turns are geometric, or log-normal as well, around their mean in either case.
    """

    turns_mean: float
    input_tokens: float
    output_tokens: float
    reaction_seconds: float
    context_max: int  # what would be longer is cut off
    turns_spread: float = 0.0
    input_spread: float = 0.0
    output_spread: float = 0.0

    def turns_from(self, least: int) -> float:
        """The mean of the turns of conversations that have so many or more."""
        if least <= 1:
            return self.turns_mean
        draw = random.Random(0)
        found = [turns for _ in range(20_000) if (turns := _turns(draw, self)) >= least]
        return sum(found) / len(found) if found else float(least)


# The spreads are those with which the published figures come out.  ShareGPT: 36 % of the conversations have
# five turns or more, and 0.57 % are longer than the context (here 0.2 %; geometric turns would make it 45 %
# and none).  openchat_sharegpt4, one request with its history as prompt: 1,730 tokens median, 5,696 P90,
# output 415 and 834.  arXiv summaries: 7,059 median, 12,985 P90, output 208 and 371.
HABITS = {
    "sharegpt": Habits(5.56, 37.8, 204.6, 60.0, 16_384, turns_spread=1.13),
    "requests": Habits(1.0, 2000.0, 415.0, 60.0, 8_192, 0.0, 1.2, 0.545),
    "agents": Habits(33.0, 2242.0, 17.0, 5.2, 100_000),
    "documents": Habits(1.0, 7400.0, 208.0, 60.0, 16_384, 0.0, 0.55, 0.45),
}


def drawn(
    habits: Habits,
    conversations_per_second: float,
    seconds: float,
    seed: int = 0,
    *,
    reaction_seconds: float | None = None,
    turns_min: int = 1,
) -> Iterator[Visit]:
    """Conversations arrive at random; each turn comes a random while after the reply before."""
    draw = random.Random(seed)
    reaction = habits.reaction_seconds if reaction_seconds is None else reaction_seconds
    now, number = 0.0, 0
    while (now := now + draw.expovariate(conversations_per_second)) < seconds:
        number += 1
        turns = _turns(draw, habits)
        if turns < turns_min:
            continue
        length = 0
        for turn in range(turns):
            inputs = _length(draw, habits.input_tokens, habits.input_spread)
            outputs = _length(draw, habits.output_tokens, habits.output_spread)
            length += inputs + outputs
            if length >= habits.context_max:
                break
            wait = draw.expovariate(1 / reaction)
            yield Visit(f"d{number}", now if turn == 0 else None, inputs, outputs, wait)


def _turns(draw: random.Random, habits: Habits) -> int:
    if habits.turns_mean <= 1:
        return 1
    if not habits.turns_spread:
        return 1 + int(draw.expovariate(math.log1p(1 / (habits.turns_mean - 1))))
    spread = habits.turns_spread  # rounding up adds a half
    return math.ceil(draw.lognormvariate(math.log(habits.turns_mean - 0.5) - spread**2 / 2, spread))


def _length(draw: random.Random, around: float, spread: float) -> int:
    if spread:
        return 1 + int(draw.lognormvariate(math.log(around), spread))
    return 1 + int(draw.expovariate(1 / around))
