"""`pensieve bench isolation` measures what one tenant notices of another one that does its worst.

A real `pensieve serve` on one core, with arithmetic instead of a model, and two tenants.  The quiet one
talks in a few conversations.  The noisy one (noisy_tenant.py), which may run one turn at once and use ten
tokens per second, comes and goes: a round is some seconds without it and as many with it (another such
tenant each time, which owes nothing yet).  The times to the first token and the gaps of the quiet tenant are
compared.  The noisy one computes only while nobody else wants the core, since its own machine would be
another one.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from pensieve.bench.bench_daemon import pinned
from pensieve.bench.report import Report, percentile
from pensieve.client.channel import metadata_of
from pensieve.errors import InvalidArgument
from pensieve.service.grpc.auth import new_token
from pensieve.v1 import conversation_pb2 as pb
from pensieve.v1 import conversation_pb2_grpc

CONVERSATIONS = 4
PAUSE_SECONDS = 0.05  # of a person, between a reply and the next message
REPLY_TOKENS = 24
TURNS_OF_A_CONVERSATION = 50
QUIET_SECONDS = 2.0  # after the noise has begun or ended


@dataclass
class Times:
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    refused: int = 0


def run(num_rounds: int, seconds: float, iteration_seconds: float, report: Report) -> None:
    quiet, quiet_entry = new_token("quiet", False)
    noisy = [
        new_token(f"noisy-{number}", False, turns_max=1, tokens_per_second=10.0)
        for number in range(num_rounds)
    ]
    alone, beside = Times(), Times()
    codes: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="pensieve-bench-") as folder:
        token_file = Path(folder) / "tokens.toml"
        token_file.write_text(quiet_entry + "".join(entry for _, entry in noisy))
        token_file.chmod(0o600)
        flags = ["--token-file", str(token_file), "--turns-max", "16"]
        with pinned([*flags, "--engine", f"echo:{iteration_seconds}"]) as daemon:
            asyncio.run(measure(daemon.address, quiet, QUIET_SECONDS, Times()))
            for number, (token, _) in enumerate(noisy, 1):
                asyncio.run(measure(daemon.address, quiet, seconds, alone))
                with _noise(daemon.address, token, codes):
                    asyncio.run(measure(daemon.address, quiet, seconds, beside))
                time.sleep(QUIET_SECONDS)
                report.line(f"round {number} of {num_rounds}")
    if not alone.first or not beside.first:
        raise InvalidArgument("seconds", "are too few for a turn")
    rows, figures = [], {}
    for name in ("first", "gaps"):
        for share in (0.5, 0.99):
            before, after = (percentile(getattr(each, name), share) for each in (alone, beside))
            label = f"{name.removesuffix('s')} p{share * 100:g}"
            rows.append(
                [label, f"{before * 1e3:.1f}", f"{after * 1e3:.1f}", f"{after / before:.2f}"]
            )
            figures[label.replace(" ", "_")] = {"alone": before, "beside": after}
    report.table("the quiet tenant, ms", ["", "alone", "beside the noisy one", "ratio"], rows)
    report.line(
        f"{len(alone.first)} and {len(beside.first)} turns, {alone.refused} and {beside.refused} refused; "
        f"the noisy tenant was answered {codes}"
    )
    report.finish({**figures, "refused": beside.refused, "noise": codes})


@contextmanager
def _noise(address: str, token: str, codes: dict[str, int]) -> Iterator[None]:
    """The noisy tenant, from when its calls are answered; its counts of the answers join `codes`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pensieve.bench.noisy_tenant", address, token],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise InvalidArgument("noise", "ended before it began")
        yield
    finally:
        process.terminate()
        rest, _ = process.communicate()
    last = ([line, *rest.splitlines()])[-1]
    for code, count in json.loads(last).items():
        codes[code] = codes.get(code, 0) + count


async def measure(address: str, token: str, seconds: float, times: Times) -> None:
    end = time.perf_counter() + seconds
    async with grpc.aio.insecure_channel(address) as channel:
        stub = conversation_pb2_grpc.ConversationServiceStub(channel)

        async def talk(number: int) -> None:
            turn = 0
            while time.perf_counter() < end:
                name = f"{number}-{time.time_ns()}"
                for _ in range(TURNS_OF_A_CONVERSATION):
                    if time.perf_counter() >= end:
                        return
                    turn += 1
                    await _turn(stub, token, name, times)
                    await asyncio.sleep(PAUSE_SECONDS * (0.5 + (turn * 7 + number * 3) % 10 / 10))

        await asyncio.gather(*(talk(number) for number in range(CONVERSATIONS)))


async def _turn(stub: Any, token: str, name: str, times: Times) -> None:
    request = pb.SendMessageRequest(
        conversation_id=name,
        create_if_missing=True,
        sampling=pb.Sampling(max_tokens=REPLY_TOKENS, ignore_eos=True),
    )
    request.messages.add(content="What did I say a moment ago, and what did you answer me?")
    begun = before = time.perf_counter()
    is_first = True
    try:
        async for event in stub.SendMessage(request, metadata=metadata_of(token), timeout=60.0):
            if event.WhichOneof("event") != "delta":
                continue
            now = time.perf_counter()
            (times.first if is_first else times.gaps).append(now - (begun if is_first else before))
            is_first, before = False, now
    except grpc.aio.AioRpcError:
        times.refused += 1
