"""`pensieve bench service`: how many tokens the service itself delivers.

A real `pensieve serve` on one core, with arithmetic in the model's place; engine and clients have the
other cores.  Every stream is one conversation with one long turn.  What is counted are tokens that
arrived at the clients, from the first to the last, and the gaps between the messages of a stream.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pensieve.errors import Unavailable

START_SECONDS = 60.0


def add_parser(kinds: Any) -> None:
    parser = kinds.add_parser(
        "service",
        help="tokens per second that the service delivers, without a model",
        description=(__doc__ or "").split("\n\n", 1)[1],
    )
    parser.add_argument(
        "--streams", type=int, default=256, metavar="N", help="turns at once (default: 256)"
    )
    parser.add_argument(
        "--tokens", type=int, default=400, metavar="N", help="of each turn (default: 400)"
    )
    parser.add_argument(
        "--iteration-seconds",
        type=float,
        default=0.0,
        metavar="S",
        help="that the engine takes for an iteration, which is one token of each turn (default: 0)",
    )
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    parser.set_defaults(run=command)


def command(arguments: argparse.Namespace) -> int:
    with serving(arguments.streams, arguments.iteration_seconds) as address:
        row = asyncio.run(measure(address, arguments.streams, arguments.tokens))
    if arguments.json:
        print(json.dumps(row))
        return 0
    print(
        f"{row['tokens_per_second']:,.0f} tokens/s over {row['streams']} streams, "
        f"{row['tokens_per_message']:.2f} tokens a message, "
        f"gap p50 {row['gap_p50_seconds'] * 1e3:.1f} ms, p99 {row['gap_p99_seconds'] * 1e3:.1f} ms; "
        f"the service used {row['service_cpu_seconds']:.1f} s of CPU in {row['seconds']:.1f} s"
    )
    return 0


@contextlib.contextmanager
def serving(turns_max: int, iteration_seconds: float) -> Iterator[str]:
    """A daemon pinned to the first core, its engine to the others; its address."""
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="pensieve-bench-") as folder:
        ready = Path(folder) / "ready"
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "pensieve", "serve", "--engine", "echo"),
                *("--data", str(Path(folder) / "data"), "--address", "127.0.0.1:0"),
                *("--ready-file", str(ready), "--turns-max", str(turns_max)),
                *("--turns-waiting-max", str(4 * turns_max)),
                *("--echo-seconds", str(iteration_seconds)),
            ],
            stderr=subprocess.DEVNULL,
        )
        try:
            deadline = time.monotonic() + START_SECONDS
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise Unavailable("the daemon did not start")
                time.sleep(0.01)
            for pid, allowed in ((process.pid, cores[:1]), (_child(process.pid), cores[1:])):
                for thread in os.listdir(f"/proc/{pid}/task"):
                    os.sched_setaffinity(int(thread), allowed or cores)
            os.sched_setaffinity(0, cores[1:] or cores)
            yield ready.read_text().strip()
        finally:
            os.sched_setaffinity(0, cores)
            process.send_signal(signal.SIGTERM)
            process.wait()


def _child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


async def measure(address: str, num_streams: int, num_tokens: int) -> dict[str, Any]:
    import grpc

    from pensieve.v1 import conversation_pb2 as pb

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

    async with grpc.aio.insecure_channel(address) as channel:
        await asyncio.gather(*(stream(channel, -1 - number, 5) for number in range(8)))
        counted = num_messages = 0
        gaps.clear()
        first = None
        pid = _child(os.getpid())
        cpu = _cpu_seconds(pid)
        await asyncio.gather(
            *(stream(channel, number, num_tokens) for number in range(num_streams))
        )
        assert first is not None
        seconds = time.perf_counter() - first
        cpu = _cpu_seconds(pid) - cpu
    gaps.sort()
    return {
        "tokens_per_second": counted / seconds,
        "streams": num_streams,
        "tokens": counted,
        "seconds": seconds,
        "tokens_per_message": counted / num_messages,
        "gap_p50_seconds": gaps[len(gaps) // 2],
        "gap_p99_seconds": gaps[int(len(gaps) * 0.99)],
        "service_cpu_seconds": cpu,
    }


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
