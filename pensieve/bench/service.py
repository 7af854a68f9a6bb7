"""`pensieve bench service` measures how many tokens the service itself delivers.

A real `pensieve serve` on one core, with arithmetic instead of a model; engine and clients have the
other cores.  Every stream is one conversation with one long turn.  It counts the tokens that
arrive at the clients, from the first to the last, and the gaps between the messages of a stream.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import grpc

from pensieve.bench import turn_cost
from pensieve.bench.bench_daemon import BenchDaemon, pinned
from pensieve.bench.process_time import cpu_seconds
from pensieve.bench.report import Report
from pensieve.errors import InvalidArgument
from pensieve.v1 import conversation_pb2 as pb


@dataclass(frozen=True)
class Row:
    tokens_per_second: float
    streams: int
    tokens: int
    seconds: float
    tokens_per_message: float
    gap_p50_seconds: float
    gap_p99_seconds: float
    service_cpu_seconds: float


def run(num_streams: int, num_tokens: int, iteration_seconds: float, report: Report) -> None:
    with _pinned(num_streams, iteration_seconds) as daemon:
        row = asyncio.run(measure(daemon, num_streams, num_tokens))
    report.line(
        f"{row.tokens_per_second:,.0f} tokens/s over {row.streams} streams, "
        f"{row.tokens_per_message:.2f} tokens a message, "
        f"gap p50 {row.gap_p50_seconds * 1e3:.1f} ms, p99 {row.gap_p99_seconds * 1e3:.1f} ms; "
        f"the service used {row.service_cpu_seconds:.1f} s of CPU in {row.seconds:.1f} s"
    )
    report.finish(asdict(row))


def run_histories(histories: Sequence[int], num_turns: int, report: Report) -> None:
    """What a turn costs the service, by the length of its conversation."""
    with _pinned(16, 0.0) as daemon:
        rows = turn_cost.measure(daemon, histories, num_turns, report)
    report.finish(turn_cost.figures(rows))


def _pinned(turns_max: int, iteration_seconds: float) -> AbstractContextManager[BenchDaemon]:
    return pinned(
        [
            *("--turns-max", str(turns_max), "--turns-waiting-max", str(4 * turns_max)),
            *("--engine", f"echo:{iteration_seconds}"),
        ]
    )


async def measure(daemon: BenchDaemon, num_streams: int, num_tokens: int) -> Row:
    gaps: list[float] = []
    counted = num_messages = 0
    first: float | None = None

    async def stream(channel: Any, number: int, length: int) -> None:
        nonlocal counted, num_messages, first
        call = channel.unary_stream(
            "/pensieve.v1.ConversationService/SendMessage",
            request_serializer=pb.SendMessageRequest.SerializeToString,
            response_deserializer=pb.SendMessageResponse.FromString,
        )
        request = pb.SendMessageRequest(
            conversation_id=f"stream-{number}",
            messages=[pb.NewMessage(content=f"Good morning, {number}.")],
            create_if_missing=True,
            sampling=pb.Sampling(max_tokens=length, ignore_eos=True),
        )
        before: float | None = None
        async for response in call(request):
            if response.WhichOneof("event") == "delta":
                now = time.perf_counter()
                first = first or now
                if before is not None:
                    gaps.append(now - before)
                before = now
                counted += len(response.delta.token_ids)
                num_messages += 1

    async with grpc.aio.insecure_channel(daemon.address) as channel:
        await asyncio.gather(*(stream(channel, -1 - number, 5) for number in range(8)))
        counted = num_messages = 0
        gaps.clear()
        first = None
        cpu = cpu_seconds(daemon.pid)
        await asyncio.gather(
            *(stream(channel, number, num_tokens) for number in range(num_streams))
        )
        assert first is not None
        seconds = time.perf_counter() - first
        cpu = cpu_seconds(daemon.pid) - cpu
    if not gaps:
        raise InvalidArgument("tokens", "are so few that each stream was one message")
    gaps.sort()
    return Row(
        tokens_per_second=counted / seconds,
        streams=num_streams,
        tokens=counted,
        seconds=seconds,
        tokens_per_message=counted / num_messages,
        gap_p50_seconds=gaps[len(gaps) // 2],
        gap_p99_seconds=gaps[int(len(gaps) * 0.99)],
        service_cpu_seconds=cpu,
    )
