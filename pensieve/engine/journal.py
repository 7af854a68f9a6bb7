"""Record the inputs of the scheduler in a journal, and replay them.

A journal has one JSON object per line. It records:

* each message, with lengths instead of token ids and text;
* the time of each call (`now`);
* which chunks were found by their content, because a replay has no content;
* of each outcome, the parts that the core uses: finished copies, failures, and which turns sampled a token
  and whether the token ended the reply.

An outcome belongs to the oldest iteration that has no outcome yet. So the order of the lines shows how many
iterations were planned ahead. A new scheduler plans identical iterations from these lines, because it reads
neither a clock nor the values of tokens. `Replay` does that and compares a hash for each iteration. The
predicted seconds of an iteration are recorded only for human readers. A replay predicts them again.

A restarted engine appends to the journal, so a journal has the lines of one or more engines. The lines of an
engine begin with its configuration. Every line is written at once. A killed engine leaves at most one
incomplete line, which is accepted. Any other unreadable line is damage.

If a journal cannot be written (for example on a full disk), the engine logs a warning and stops recording,
because a journal with a gap would not replay. The engine itself continues.
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
from pensieve.core.cache import CacheConfig, KVCache
from pensieve.core.content import ContentIndex, Found
from pensieve.core.cost import CostProfile, IterationCost
from pensieve.core.iteration import Iteration, Outcome, SampledToken, TurnFailure
from pensieve.core.policies.registry import policy_named
from pensieve.core.prefix_tree import CachedConversation, Chunk
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.core.tiers import IsIntact
from pensieve.core.turn import Turn
from pensieve.engine import codec
from pensieve.engine.engine import Engine, EngineConfig, EngineConfigs
from pensieve.engine.mailbox import Mailbox
from pensieve.engine.messages import EngineEvent, EngineMessage, SubmitTurn
from pensieve.engine.ports import Ports
from pensieve.errors import ConfigError, one_line
from pensieve.sampling import Sampling

log = logging.getLogger("pensieve")
VERSION = 7
HEADER_BYTES_MAX = 1 << 20


class JournalError(ValueError):
    """A journal does not replay; `line` is the number of the line."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(f"line {line}: {problem}")
        self.line = line
        self.problem = problem


class NotAJournal(JournalError):
    """The file is not a journal, or another version wrote it."""


def opened(path: Path) -> TextIO:
    """Open the file of a journal to append; every line is written at once.

    Raises ConfigError if the file is not a journal of this version.
    """
    if path.is_file() and path.stat().st_size:
        with path.open("rb") as existing:
            first = existing.readline(HEADER_BYTES_MAX)
        try:
            header = json.loads(first)
            _check_version(header if isinstance(header, dict) else {}, 1)
        except (ValueError, RecursionError) as error:
            problem = error.problem if isinstance(error, NotAJournal) else "not a journal"
            raise ConfigError(f"cannot append to {path}: it is {problem}") from error
    file = path.open("a", encoding="utf-8", buffering=1)
    if path.is_file() and path.stat().st_size:
        with path.open("rb") as existing:
            existing.seek(-1, 2)
            if existing.read() != b"\n":  # its writer was killed
                # After an error, the line break stays in the buffer and is written with the next line.
                with contextlib.suppress(OSError):
                    file.write("\n")
    return file


def hash_of(iteration: Iteration) -> str:
    slices = [(s.attempt_id, s.start, s.stop, s.needs_token) for s in iteration.slices]
    moves = (iteration.copies, iteration.swap_ins, iteration.swap_outs)
    plain = repr((iteration.index, slices, [[tuple(move) for move in part] for part in moves]))
    digest = hashlib.blake2b(plain.encode(), digest_size=8)
    for first, stop, *pages in iteration.groups:
        digest.update(array("i", (first, stop)).tobytes())
        for part in pages:
            digest.update(part.tobytes())
    return digest.hexdigest()


class Journal:
    """An observer that writes a journal to `lines`, a text file opened to append.

    `model` describes the model and the device. No replay depends on it, but costs fitted to a journal do.
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
        self._damaged: list[
            int
        ] = []  # host pages found damaged while the next iteration is planned
        self._found: list[
            tuple[int, str, int]
        ] = []  # results of lookups by content (number, holder, tokens)
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
        """Wrap `is_intact` so that the journal records damaged host pages, on which the plan depends."""

        def noted(host_page: int) -> bool:
            intact = is_intact(host_page)
            if not intact:
                self._damaged.append(host_page)
            return intact

        return noted

    def note_found(self, number: int, found: Found) -> None:
        """Record what a lookup has found (`ContentIndex.note_found`)."""
        if self._lines is None:
            return
        self._found.append((number, found.holder.conversation_id, found.num_tokens))

    @property
    def given_up(self) -> bool:
        return self._lines is None

    def received(self, message: EngineMessage, now: float) -> None:
        if isinstance(message, SubmitTurn):  # a client's text must not enter the journal
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
                "samples": [(sample.attempt_id, sample.stopped) for sample in outcome.samples],
                "failures": [(failure.attempt_id, failure.reason) for failure in outcome.failures],
            }
        )

    def published(self, events: Sequence[EngineEvent]) -> None:
        return

    def _write(self, entry: dict[str, Any]) -> None:
        if self._lines is None:
            return
        if self._found:  # lookups of this entry, or of the message before it
            entry["found"], self._found = self._found, []
        try:
            self._lines.write(json.dumps(entry, separators=(",", ":")) + "\n")
        except OSError as error:
            log.warning("stopped recording the journal: it cannot be written (%s)", error.strerror)
            lines, self._lines = self._lines, None
            with contextlib.suppress(OSError):
                lines.close()


class _Recorded:
    """Stands in for clock, executor and sink: a replay gets their values from the journal."""

    depth = 1

    def now(self) -> float:
        return 0.0

    def launch(self, iteration: Iteration) -> None:
        return

    def collect(self) -> Outcome:
        return Outcome()

    def publish(self, events: Sequence[EngineEvent]) -> None:
        return


class _RecordedContent(ContentIndex):
    """Repeats the results of lookups that the journal has recorded."""

    def __init__(self, cache: KVCache) -> None:
        super().__init__(cache.config.chunk_tokens)
        self._conversations = cache.conversations
        self.recorded: dict[int, tuple[str, int]] = {}  # by number of the lookup

    def register(self, turn: Turn, chunk: Chunk) -> None:
        return

    def find_for_turn(self, turn: Turn, conversation: CachedConversation) -> Found | None:
        return self._next()

    def find_for_ended(self, conversation: CachedConversation, has_twins: bool) -> Found | None:
        return self._next() if conversation.identities is not None else None

    def _next(self) -> Found | None:
        self.num_lookups += 1
        if self.num_lookups not in self.recorded:
            return None
        holder, num_tokens = self.recorded.pop(self.num_lookups)
        return Found(self._conversations[holder], num_tokens)


class Replayed(NamedTuple):
    """An iteration that was replayed as recorded, with the recorded times.

    `begun` is the time when the computation of the iteration began. This is the time when it was planned, or
    when the previous iteration ended, whichever is later.
    """

    iteration: Iteration
    begun: float
    ended: float
    finished_copies: tuple[int, ...]


class Replay:
    """Replay a journal. Iterating yields each committed iteration; none is kept in memory.

    Raises JournalError if the replay plans an iteration that differs from the recorded one, or if the journal
    is unreadable.
    """

    def __init__(self, lines: Iterable[str]) -> None:
        self.num_agreed = 0  # iterations planned as recorded
        self.num_engines = 0
        self.cut_off: list[int] = []  # numbers of incomplete lines, left by killed engines
        self.model: dict[str, Any] = {}  # of the last engine
        self.written_by = ""  # version of the package; another version may plan other iterations
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
                reason = one_line(error)
                raise JournalError(number, f"cannot be replayed ({reason})") from error
            self.num_agreed += entry.get("iteration") is not None
            if replayed is not None:
                yield replayed

    def _entries(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield every complete line with its number.

        A damaged line is an error unless a new engine begins after it, or it is the last line.
        """
        damaged = 0  # the number of the previous line, if it was damaged
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
    """Raised if the planned iteration is not the recorded one."""


class _ReplayedEngine:
    """One engine of a journal, which plans its iterations again from the recorded values."""

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
        self._damaged: set[int] = set()  # host pages recorded as damaged
        ports = Ports(recorded, Mailbox(), recorded)
        self._engine = Engine(
            configs, policy, recorded, ports, is_intact=lambda page: page not in self._damaged
        )
        self._scheduler = self._engine.scheduler
        self._content = _RecordedContent(self._scheduler.cache)
        self._scheduler.cache.content = self._content
        # Iterations that are not committed yet, with the times when they were planned.
        self._planned: deque[tuple[Iteration, float]] = deque()
        self._ended = float("-inf")  # when the previous iteration was committed
        self._message: tuple[EngineMessage, float] | None = (
            None  # to be taken before the next entry
        )

    def take(self, entry: dict[str, Any]) -> Replayed | None:
        for lookup, holder, num_tokens in entry.get("found", ()):
            self._content.recorded[lookup] = (holder, num_tokens)
        if self._message is not None:
            self._engine.take(*self._message)
            self._message = None
        if "message" in entry:
            message = codec.decode_named(entry["message"], entry["values"])
            # The results of its lookups are in the next entry.
            self._message = message, entry["now"]
            return None
        if "plan" in entry:
            now = entry["plan"]
            self._damaged = set(entry.get("damaged", ()))
            iteration = self._scheduler.plan(now)
            self._scheduler.drain_ended()
            if (hash_of(iteration) if iteration else None) != entry["iteration"]:
                raise _Differs(_describe(iteration))
            if iteration is not None:
                self._planned.append((iteration, now))
            return None
        now = entry["commit"]
        if not self._planned:
            raise ValueError("an outcome without an iteration")
        outcome = Outcome(
            tuple(
                SampledToken(attempt_id, 0, stopped=stopped)
                for attempt_id, stopped in entry["samples"]
            ),
            tuple(entry["copies"]),
            tuple(TurnFailure(attempt_id, reason, "") for attempt_id, reason in entry["failures"]),
        )
        iteration, planned = self._planned.popleft()
        self._scheduler.commit(iteration, outcome, now)
        begun, self._ended = max(planned, self._ended), now
        return Replayed(iteration, begun, now, outcome.finished_copies)


def _check_version(header: Mapping[str, Any], line: int) -> None:
    if "version" not in header:
        raise NotAJournal(line, "not a journal")
    if header["version"] != VERSION:
        raise NotAJournal(
            line, f"a journal of version {header['version']}; this program reads {VERSION}"
        )


def replay(lines: Iterable[str]) -> int:
    """Replay a whole journal; return the number of iterations.

    Raises JournalError if an iteration differs.
    """
    replaying = Replay(lines)
    for _ in replaying:
        pass
    if not replaying.num_engines:
        raise NotAJournal(1, "not a journal: it is empty")
    return replaying.num_agreed


def _describe(iteration: Iteration | None) -> str:
    """Describe an iteration in words, for people who compare two iterations."""
    if iteration is None:
        return "nothing"
    slices = ", ".join(f"turn {s.attempt_id} [{s.start}, {s.stop})" for s in iteration.slices[:8])
    more = ", …" if len(iteration.slices) > 8 else ""
    moves = (
        (len(iteration.copies), "copies"),
        (len(iteration.swap_ins), "swap-ins"),
        (len(iteration.swap_outs), "swap-outs"),
    )
    copies = "".join(f", {count} {kind}" for count, kind in moves if count)
    return f"iteration {iteration.index}: {slices or 'no slices'}{more}{copies}"
