"""Read the arrivals of turns from trace files of JSON lines.

A trace is a stream of `Arrival`s in the order of their times. Each arrival is one message; its conversation
may have had messages before. Each line of a file has one of two formats:

* **Mooncake** (`timestamp` in ms, `input_length`, `output_length`, `hash_ids`): one id per block of 512
  tokens. Equal ids mean equal prefixes. The last block may be incomplete. A request continues an earlier
  request if its ids begin with all ids of the earlier request except the last id. At least two ids must
  match, because the first block is the same in every line. If several earlier requests match, the latest is
  continued. If two requests continue the same request, the second is a fork.
* **plain** (`conversation`, `at` in seconds or `after` in seconds from the end of the previous turn,
  `input_tokens`, `output_tokens`, and optionally `fork_of`).

Lines that cannot be read are counted and listed in `Problems`. The other lines are used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from pensieve.errors import ConfigError


@dataclass(slots=True, frozen=True)
class Arrival:
    """One turn: the time of its message, and the lengths of message and reply."""

    conversation: str
    at: float | None  # seconds; None: `after` seconds after the end of the previous turn
    input_tokens: int  # new tokens
    output_tokens: int
    after: float = 0.0
    history_tokens: int | None = None  # kept tokens of the log; None: all
    fork_of: str = ""  # begins with the first `history_tokens` of this conversation
    log_tokens: int | None = None  # length of the log, if another replica served a part of it


@dataclass
class Problems:
    """The lines that could not be read, and the number of lines that could be read."""

    lines: list[tuple[int, str]] = field(default_factory=list)  # the first few
    count: int = 0
    num_read: int = 0
    files: list[tuple[int, str]] = field(default_factory=list)  # (lines before the file, its path)

    def add(self, line: int, problem: str) -> None:
        self.count += 1
        if len(self.lines) < 10:
            self.lines.append((line, problem))

    def location(self, line: int) -> str:
        """Return a line's number in its own file, from its number over all files."""
        before, path = (
            [each for each in self.files if each[0] < line][-1] if self.files else (0, "")
        )
        suffix = f" of {path}" if len(self.files) > 1 else ""
        return f"line {line - before}{suffix}"


def read(lines: Iterable[str], problems: Problems) -> Iterator[Arrival]:
    """Parse the lines into arrivals; formats may be mixed."""
    mooncake = Mooncake()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            given = json.loads(line)
            if not isinstance(given, dict):
                raise ValueError("not a JSON object")
            arrival = mooncake.arrival(given) if "hash_ids" in given else plain_arrival(given)
        except KeyError as error:
            problems.add(number, f"{error.args[0]} is missing")
        except (ValueError, TypeError) as error:
            problems.add(number, str(error))
        else:
            problems.num_read += 1
            yield arrival


def from_zero(arrivals: Iterable[Arrival]) -> Iterator[Arrival]:
    """Shift the times so that the first message comes at 0."""
    first: float | None = None
    for arrival in arrivals:
        if arrival.at is None:
            yield arrival
            continue
        first = arrival.at if first is None else first
        yield arrival if not first else replace(arrival, at=max(arrival.at - first, 0.0))


def plain_arrival(given: dict[str, object]) -> Arrival:
    name = given["conversation"]
    if not isinstance(name, str) or not name:
        raise ValueError("conversation must be a name")
    at = given.get("at")
    fork_of = given.get("fork_of", "")
    return Arrival(
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
        raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
    return value


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a number of at least 0, not {value!r}")
    return float(value)


class Mooncake:
    """Find the earlier request that a request of a Mooncake trace continues."""

    def __init__(self) -> None:
        # Hash of the ids without the last id -> the latest request.
        self._latest: dict[int, int] = {}
        # Conversation, tokens at the end of the request, whether it was continued.
        self._requests: list[tuple[str, int, bool]] = []
        self._num_forks = 0

    def arrival(self, given: dict[str, object]) -> Arrival:
        at = _number(given["timestamp"], "timestamp") / 1000
        num_inputs = _count(given["input_length"], "input_length")
        num_outputs = _count(given["output_length"], "output_length")
        ids = given["hash_ids"]
        if not isinstance(ids, list) or not all(isinstance(each, int) for each in ids):
            raise ValueError("hash_ids must be a list of whole numbers")
        number = len(self._requests)
        continued, key, last_key = -1, 0, 0
        for count, each in enumerate(ids, 1):
            last_key, key = key, hash((key, each))
            if count >= 2:
                continued = max(continued, self._latest.get(key, -1))
        if len(ids) >= 3:
            self._latest[last_key] = number
        if continued < 0:
            name = f"r{number}"
            self._requests.append((name, num_inputs + num_outputs, False))
            return Arrival(name, at, num_inputs, num_outputs)
        name, length, is_continued = self._requests[continued]
        history = min(length, num_inputs)
        kept = min(history, num_inputs - 1)  # a turn has at least one new token
        fork_of = ""
        if is_continued:
            fork_of, name = name, f"r{number}"
            self._num_forks += 1
        else:
            self._requests[continued] = (name, length, True)
        self._requests.append((name, num_inputs + num_outputs, False))
        return Arrival(name, at, num_inputs - kept, num_outputs, 0.0, kept, fork_of)


def lines_of(paths: Iterable[Path], problems: Problems) -> Iterator[str]:
    """Yield the lines of all files; note in `problems` where each file begins."""
    num_lines = 0
    for path in paths:
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                problems.files.append((num_lines, str(path)))
                for line in file:
                    num_lines += 1
                    yield line
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
