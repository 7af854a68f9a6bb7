"""The journal: everything that decided which iterations were planned, one JSON object per line.

It holds each message (lengths, never token ids or text), each `now`, and of each outcome what the
core took from it: finished copies, which turns sampled a token and whether it was their last, and
failures.  An outcome belongs to the oldest iteration that had none yet, so the order of the lines
says how far planning ran ahead.  Fed back into a fresh scheduler, these give the identical sequence
of iterations: the scheduler reads no clock and no token's value.  `replay` does that and compares a
hash per iteration.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, TextIO

from pensieve.core.cache import CacheConfig, KVCache
from pensieve.core.cost import CostProfile
from pensieve.core.iteration import Iteration, Outcome, Sample, TurnFailure
from pensieve.core.retention import policy_named
from pensieve.core.sampling import Sampling
from pensieve.core.scheduler import Scheduler, SchedulerConfig
from pensieve.core.turn import FinishReason
from pensieve.engine import mailbox
from pensieve.engine.engine import Engine, EngineConfig
from pensieve.engine.mailbox import Event, Mailbox, Message, SubmitTurn

VERSION = 1


def hash_of(iteration: Iteration) -> str:
    slices = [(s.turn.turn_id, s.start, s.stop, s.needs_token) for s in iteration.slices]
    moves = (iteration.copies, iteration.swap_ins, iteration.swap_outs)
    plain = repr((iteration.index, slices, [[tuple(move) for move in part] for part in moves]))
    return hashlib.blake2b(plain.encode(), digest_size=8).hexdigest()


class Journal:
    """An observer that writes; `lines` is a text file opened for appending."""

    def __init__(
        self,
        lines: TextIO,
        engine: EngineConfig,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        policy: str,
        cost: CostProfile,
    ) -> None:
        self._lines = lines
        self._write(
            {
                "version": VERSION,
                "engine": asdict(engine),
                "cache": asdict(cache),
                "scheduler": asdict(scheduler),
                "policy": policy,
                "cost": asdict(cost),
            }
        )

    def received(self, message: Message, now: float) -> None:
        values = {name: getattr(message, name) for name in message.__dataclass_fields__}
        if isinstance(message, SubmitTurn):
            values["tokens"] = len(message.tokens) // 4
            values["sampling"] = {"max_tokens": message.sampling.max_tokens}
        self._write({"message": type(message).__name__, "now": now, "values": values})

    def planned(self, iteration: Iteration | None, now: float) -> None:
        self._write({"plan": now, "iteration": hash_of(iteration) if iteration else None})

    def committed(self, iteration: Iteration, outcome: Outcome, now: float) -> None:
        self._write(
            {
                "commit": now,
                "copies": outcome.finished_copies,
                "samples": [(sample.turn_id, sample.finish) for sample in outcome.samples],
                "failures": [(failure.turn_id, failure.reason) for failure in outcome.failures],
            }
        )

    def published(self, events: Sequence[Event]) -> None:
        return

    def _write(self, entry: dict[str, Any]) -> None:
        self._lines.write(json.dumps(entry, separators=(",", ":")) + "\n")


class _Recorded:
    """A replay has no clock, executor or sink: the journal says what they said."""

    depth = 1

    def now(self) -> float:
        return 0.0

    def launch(self, iteration: Iteration) -> None:
        return

    def collect(self) -> Outcome:
        return Outcome()

    def publish(self, events: Sequence[Event]) -> None:
        return


def replay(lines: Iterable[str]) -> int:
    """Plan again what a journal recorded; how many iterations agreed.  ValueError where one differs."""
    entries = (json.loads(line) for line in lines if line.strip())
    header = next(entries, None)
    if header is None or header.get("version") != VERSION:
        raise ValueError("not a journal that this version can read")
    cache_config = CacheConfig(**header["cache"])
    cost_values = header["cost"]
    points = tuple((int(at), float(seconds)) for at, seconds in cost_values["attention_seconds"])
    cost = CostProfile(points, cost_values["other_seconds"], cost_values["measured"])
    policy = policy_named(header["policy"], cost, cache_config.chunk_tokens)
    scheduler = Scheduler(KVCache(cache_config, policy), SchedulerConfig(**header["scheduler"]))
    recorded = _Recorded()
    config = EngineConfig(**header["engine"])
    engine = Engine(config, scheduler, recorded, recorded, Mailbox(), recorded)
    agreed = 0
    planned: deque[Iteration] = deque()  # and not committed
    for number, entry in enumerate(entries, 2):
        if "message" in entry:
            engine.take(_message(entry), entry["now"])
        elif "plan" in entry:
            iteration = scheduler.plan(entry["plan"])
            scheduler.drain_ended()
            if (hash_of(iteration) if iteration else None) != entry["iteration"]:
                raise ValueError(f"line {number}: the replay plans {iteration}")
            if iteration is not None:
                planned.append(iteration)
                agreed += 1
        else:
            if not planned:
                raise ValueError(f"line {number}: an outcome without an iteration")
            outcome = Outcome(
                tuple(
                    Sample(turn_id, 0, FinishReason(finish) if finish else None)
                    for turn_id, finish in entry["samples"]
                ),
                tuple(entry["copies"]),
                tuple(TurnFailure(turn_id, reason, "") for turn_id, reason in entry["failures"]),
            )
            scheduler.commit(planned.popleft(), outcome, entry["commit"])
    return agreed


def _message(entry: dict[str, Any]) -> Message:
    values = dict(entry["values"])
    if entry["message"] == "SubmitTurn":
        values["tokens"] = bytes(4 * values["tokens"])
        values["sampling"] = Sampling(**values["sampling"])
    message: Message = getattr(mailbox, entry["message"])(**values)
    return message
