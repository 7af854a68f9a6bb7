"""Records what decided which iterations were planned, and plans them again from that.

A journal has one JSON object per line: each message (lengths, never token ids or text), each `now`, and of
each outcome what the core took from it: finished copies, which turns sampled a token and whether it ended
the reply, and failures.  An outcome belongs to the oldest iteration that has none yet, so the order of the
lines shows how far planning was ahead.  Given to a fresh scheduler, these lines produce the identical
iterations, because the scheduler reads no clock and no token's value.  `Replay` does that and compares a
hash per iteration.  What an iteration was predicted to take is recorded for whoever reads the file: a replay
predicts it again.

A restarted engine appends to the journal of the one before, so a journal holds one or more engines, and
each begins with its configuration.  Every line is written at once.  An engine that is killed leaves at most
one incomplete line, which is accepted; anything else that cannot be read is damage.

A journal that cannot be written, on a full disk say, is given up with a warning, and its engine goes on
without: with a gap it would not replay.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from pensieve import __version__
from pensieve.core.cache import CacheConfig
from pensieve.core.cost import CostProfile, IterationCost
from pensieve.core.iteration import Iteration, Outcome, SampledToken, TurnFailure
from pensieve.core.policies.registry import policy_named
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.core.tiers import IsIntact
from pensieve.engine import codec
from pensieve.engine.engine import Engine, EngineConfig, EngineConfigs
from pensieve.engine.mailbox import Mailbox
from pensieve.engine.messages import EngineEvent, EngineMessage, SubmitTurn
from pensieve.engine.ports import Ports
from pensieve.errors import ConfigError, one_line
from pensieve.sampling import Sampling

log = logging.getLogger("pensieve")
# 3: no predictions, no objective for the first token; 2: no cost of iterations; 1: outcomes held how a turn
# ended, and messages a turn's whole log
VERSION = 5

HEADER_BYTES_MAX = 1 << 20


class JournalError(ValueError):
    """A journal does not replay; `line` is where."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(f"line {line}: {problem}")
        self.line = line
        self.problem = problem


class NotAJournal(JournalError):
    """It is something else, or another version wrote it."""


def opened(path: Path) -> TextIO:
    """The file of a journal, opened to append; every line reaches the file at once.

    ConfigError if something else is in it, or what another version wrote: one could read neither.
    """
    if path.is_file() and path.stat().st_size:
        with path.open("rb") as before:
            first = before.readline(HEADER_BYTES_MAX)
        try:
            header = json.loads(first)
            _check_version(header if isinstance(header, dict) else {}, 1)
        except (ValueError, RecursionError) as error:
            problem = error.problem if isinstance(error, NotAJournal) else "not a journal"
            raise ConfigError(f"cannot append to {path}: it is {problem}") from error
    file = path.open("a", encoding="utf-8", buffering=1)
    if path.is_file() and path.stat().st_size:
        with path.open("rb") as before:
            before.seek(-1, 2)
            if before.read() != b"\n":  # its writer was killed
                with contextlib.suppress(OSError):  # then it waits in the file's buffer
                    file.write("\n")
    return file


def hash_of(iteration: Iteration) -> str:
    slices = [(s.turn_id, s.start, s.stop, s.needs_token) for s in iteration.slices]
    moves = (iteration.copies, iteration.swap_ins, iteration.swap_outs)
    plain = repr((iteration.index, slices, [[tuple(move) for move in part] for part in moves]))
    digest = hashlib.blake2b(plain.encode(), digest_size=8)
    for first, stop, *pages in iteration.groups:
        digest.update(array("i", (first, stop)).tobytes())
        for part in pages:
            digest.update(part.tobytes())
    return digest.hexdigest()


class Journal:
    """An observer that writes a journal; `lines` is a text file opened for appending.

    `model` describes what computed.  No replay depends on it, but costs that are fitted to a journal do.
    """

    def __init__(
        self,
        lines: TextIO,
        engine: EngineConfig,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        policy: str,
        cost: CostProfile,
        model: Mapping[str, Any] | None = None,
    ) -> None:
        self._lines: TextIO | None = lines
        self._damaged: list[int] = []  # host pages, found while the next iteration is planned
        self._write(
            {
                "version": VERSION,
                "written_by": __version__,
                "engine": asdict(engine),
                "cache": asdict(cache),
                "scheduler": asdict(scheduler),
                "policy": policy,
                "cost": asdict(cost),
                "model": dict(model or {}),
            }
        )

    def noting(self, is_intact: IsIntact) -> IsIntact:
        """The same, but that the journal has each host page that is not: the plan depends on it."""

        def noted(host_page: int) -> bool:
            intact = is_intact(host_page)
            if not intact:
                self._damaged.append(host_page)
            return intact

        return noted

    @property
    def given_up(self) -> bool:
        return self._lines is None

    def received(self, message: EngineMessage, now: float) -> None:
        if isinstance(message, SubmitTurn):  # no text of a client enters the journal
            sampling = Sampling(max_tokens=message.options.sampling.max_tokens)
            options = replace(message.options, sampling=sampling, constraint=None)
            message = replace(message, options=options)
        items, _ = codec.encode(message)
        self._write({"message": items[0], "now": now, "values": codec.named(items)})

    def planned(self, iteration: Iteration | None, now: float) -> None:
        entry = {"plan": now, "iteration": hash_of(iteration) if iteration else None}
        if iteration is not None and iteration.predicted_seconds:
            entry["predicted"] = float(f"{iteration.predicted_seconds:.6g}")
        damaged, self._damaged = self._damaged, []
        self._write(entry | ({"damaged": damaged} if damaged else {}))

    def committed(self, iteration: Iteration, outcome: Outcome, now: float) -> None:
        self._write(
            {
                "commit": now,
                "copies": outcome.finished_copies,
                "samples": [(sample.turn_id, sample.stopped) for sample in outcome.samples],
                "failures": [(failure.turn_id, failure.reason) for failure in outcome.failures],
            }
        )

    def published(self, events: Sequence[EngineEvent]) -> None:
        return

    def _write(self, entry: dict[str, Any]) -> None:
        if self._lines is None:
            return
        try:
            self._lines.write(json.dumps(entry, separators=(",", ":")) + "\n")
        except OSError as error:
            log.warning("the journal is given up: it cannot be written (%s)", error.strerror)
            lines, self._lines = self._lines, None
            with contextlib.suppress(OSError):
                lines.close()


class _Recorded:
    """Stands for clock, executor and sink: a replay takes from the journal what they gave."""

    depth = 1

    def now(self) -> float:
        return 0.0

    def launch(self, iteration: Iteration) -> None:
        return

    def collect(self) -> Outcome:
        return Outcome()

    def publish(self, events: Sequence[EngineEvent]) -> None:
        return


class Replayed(NamedTuple):
    """An iteration that was planned again as it was recorded, with the times of the recording.

    `begun` is when its computation began: when it was planned, or, if the iteration before was still being
    computed then, when that one ended.
    """

    iteration: Iteration
    begun: float
    ended: float
    finished_copies: tuple[int, ...]


class Replay:
    """Plans again what a journal recorded; iterating yields each committed iteration, and keeps none.

    JournalError where the replay plans something else, or where the journal cannot be understood.
    """

    def __init__(self, lines: Iterable[str]) -> None:
        self.num_agreed = 0  # iterations planned as they were recorded
        self.num_engines = 0
        self.cut_off: list[int] = []  # numbers of the lines that a killed engine did not finish
        self.model: dict[str, Any] = {}  # of the last engine
        self.written_by = ""  # the version of the package; another one may plan other iterations
        self._lines = lines

    def __iter__(self) -> Iterator[Replayed]:
        engine: _ReplayedEngine | None = None
        for number, entry in self._entries():
            try:
                if "version" in entry or engine is None:
                    _check_version(entry, number)
                    engine = _ReplayedEngine(entry)
                    self.num_engines += 1
                    self.model = dict(entry.get("model") or {})
                    self.written_by = str(entry.get("written_by", ""))
                    continue
                replayed = engine.take(entry)
            except _Differs as difference:
                raise JournalError(number, f"the replay plans {difference}") from None
            except NotAJournal:
                raise
            except (
                ArithmeticError,
                AssertionError,
                AttributeError,
                LookupError,
                MemoryError,
                TypeError,
                ValueError,
            ) as error:
                why = one_line(error)
                raise JournalError(number, f"cannot be replayed ({why})") from error
            self.num_agreed += entry.get("iteration") is not None
            if replayed is not None:
                yield replayed

    def _entries(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Every complete line and its number; a damaged one is reported when the next line is known."""
        damaged = 0  # the number of the line before, if it was damaged
        for number, line in enumerate(self._lines, 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
                whole = isinstance(entry, dict)
            except (ValueError, RecursionError):
                whole = False
            if damaged:
                if not (whole and "version" in entry):
                    if damaged == 1:
                        raise NotAJournal(1, "not a journal")
                    raise JournalError(damaged, "is damaged")
                self.cut_off.append(damaged)
            damaged = 0 if whole else number
            if whole:
                yield number, entry
        if damaged == 1:
            raise NotAJournal(1, "not a journal")
        if damaged:
            self.cut_off.append(damaged)


class _Differs(Exception):
    """The iteration that was planned is not the one that was recorded."""


class _ReplayedEngine:
    """One engine of a journal, which plans its iterations again."""

    def __init__(self, header: dict[str, Any]) -> None:
        cache = CacheConfig(**header["cache"])
        known = header["cost"]
        points = tuple((int(at), float(seconds)) for at, seconds in known["attention_seconds"])
        cost = CostProfile(
            points, known["other_seconds"], known["measured"], known.get("copy_seconds", 0.0)
        )
        policy = policy_named(header["policy"], cost, cache.chunk_tokens)
        scheduler = {**header["scheduler"], "cost": IterationCost(**header["scheduler"]["cost"])}
        configs = EngineConfigs(
            cache, SchedulerConfig(**scheduler), EngineConfig(**header["engine"])
        )
        recorded = _Recorded()
        self._damaged: set[int] = set()  # host pages, as they were found
        ports = Ports(recorded, Mailbox(), recorded)
        self._engine = Engine(
            configs, policy, recorded, ports, is_intact=lambda page: page not in self._damaged
        )
        self._scheduler = self._engine.scheduler
        self._planned: deque[tuple[Iteration, float]] = (
            deque()
        )  # those not committed yet, and when they were planned
        self._ended = float("-inf")  # when the iteration before was committed

    def take(self, entry: dict[str, Any]) -> Replayed | None:
        if "message" in entry:
            message = codec.decode_named(entry["message"], entry["values"])
            self._engine.take(message, entry["now"])
            return None
        if "plan" in entry:
            now = entry["plan"]
            self._damaged = set(entry.get("damaged", ()))
            iteration = self._scheduler.plan(now)
            self._scheduler.drain_ended()
            if (hash_of(iteration) if iteration else None) != entry["iteration"]:
                raise _Differs(_described(iteration))
            if iteration is not None:
                self._planned.append((iteration, now))
            return None
        now = entry["commit"]
        if not self._planned:
            raise ValueError("an outcome without an iteration")
        outcome = Outcome(
            tuple(
                SampledToken(turn_id, 0, stopped=stopped) for turn_id, stopped in entry["samples"]
            ),
            tuple(entry["copies"]),
            tuple(TurnFailure(turn_id, reason, "") for turn_id, reason in entry["failures"]),
        )
        iteration, planned = self._planned.popleft()
        self._scheduler.commit(iteration, outcome, now)
        begun, self._ended = max(planned, self._ended), now
        return Replayed(iteration, begun, now, outcome.finished_copies)


def _check_version(header: Mapping[str, Any], line: int) -> None:
    if "version" not in header:
        raise NotAJournal(line, "not a journal")
    if header["version"] != VERSION:
        raise NotAJournal(line, f"a journal of version {header['version']}; this reads {VERSION}")


def replay(lines: Iterable[str]) -> int:
    """Replay a whole journal; returns how many iterations agreed.  JournalError where one differs."""
    replaying = Replay(lines)
    for _ in replaying:
        pass
    if not replaying.num_engines:
        raise NotAJournal(1, "not a journal: it is empty")
    return replaying.num_agreed


def _described(iteration: Iteration | None) -> str:
    """An iteration in words, for a person who compares two."""
    if iteration is None:
        return "nothing"
    slices = ", ".join(f"turn {s.turn_id} [{s.start}, {s.stop})" for s in iteration.slices[:8])
    more = ", …" if len(iteration.slices) > 8 else ""
    moves = (
        (len(iteration.copies), "copies"),
        (len(iteration.swap_ins), "swap-ins"),
        (len(iteration.swap_outs), "swap-outs"),
    )
    rest = "".join(f", {count} {kind}" for count, kind in moves if count)
    return f"iteration {iteration.index}: {slices or 'no slices'}{more}{rest}"
