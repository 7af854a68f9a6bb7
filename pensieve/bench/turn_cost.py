"""`pensieve bench service --history` measures what a turn costs the service, by its conversation's length.

The same short turns are run in conversations with histories of several lengths.  The engine knows the
tokens of a conversation while it holds KV of it, so neither the store nor the pipe handles the history,
and what the service spends on a turn should not depend on it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from pensieve.bench.bench_daemon import BenchDaemon
from pensieve.bench.process_time import cpu_seconds
from pensieve.bench.report import Report
from pensieve.client import Client, Conversation
from pensieve.errors import InvalidArgument, PensieveError

PIECE_WORDS = 4000  # of a message that fills a history
TURN_TOKENS = 4
ROUNDS = 5  # in each of which every conversation gets its share of the turns


@dataclass(frozen=True)
class TurnCost:
    """Of one turn, the median over the rounds."""

    history_tokens: int
    turns: int
    service_cpu_seconds: float
    first_token_seconds: float
    seconds: float


def measure(
    daemon: BenchDaemon, histories: Sequence[int], num_turns: int, report: Report
) -> list[TurnCost]:
    with Client(daemon.address) as client:
        talks = [_filled(client, num_tokens) for num_tokens in histories]
        filled = [talk.get() for talk in talks]
        samples: list[list[tuple[float, float, float]]] = [[] for _ in talks]
        each = max(num_turns // ROUNDS, 1)
        for _ in range(ROUNDS):
            for talk, state, found in zip(talks, filled, samples, strict=True):
                cpu, began = cpu_seconds(daemon.pid), time.perf_counter()
                firsts = [_turn(talk) for _ in range(each)]
                seconds = (time.perf_counter() - began) / each
                cpu = (cpu_seconds(daemon.pid) - cpu) / each
                found.append((cpu, statistics.median(firsts), seconds))
                talk.rewind(
                    state.revision
                )  # so that turns neither lengthen it nor fill the context
    rows = []
    for state, found in zip(filled, samples, strict=True):
        cpu, first, seconds = (statistics.median(column) for column in zip(*found, strict=True))
        row = TurnCost(state.num_tokens, each * ROUNDS, cpu, first, seconds)
        report.line(
            f"history of {row.history_tokens:7,} tokens: {row.service_cpu_seconds * 1e3:6.2f} ms of the "
            f"service's CPU a turn, first token after {row.first_token_seconds * 1e3:6.2f} ms"
        )
        rows.append(row)
    return rows


def figures(rows: Sequence[TurnCost]) -> dict[str, object]:
    return {"turns": [asdict(row) for row in rows]}


def _filled(client: Client, num_tokens: int) -> Conversation:
    """A conversation with at least so many tokens, the last of which the engine has KV for."""
    talk = client.conversation(f"history-{num_tokens}")
    talk.ask("Good morning.", max_tokens=TURN_TOKENS)
    while (missing := num_tokens - talk.get().num_tokens) > 0:
        before = talk.get().num_tokens
        talk.ask("hello " * min(PIECE_WORDS, missing), max_tokens=TURN_TOKENS)
        if talk.get().num_tokens <= before:
            raise InvalidArgument("history", f"{num_tokens} tokens were not reached")
    return talk


def _turn(talk: Conversation) -> float:
    reply = talk.ask("And now?", max_tokens=TURN_TOKENS, ignore_eos=True)
    if reply.usage.recomputed_tokens:
        raise PensieveError("a history was not on the device: the tiers are too small for this")
    return reply.usage.first_token_seconds
