"""Measure how one tenant's maximum load affects another tenant.

A real `pensieve serve` runs on one core, with a fake model, and serves two tenants. The
quiet tenant has a few conversations. The noisy tenant (noisy_tenant.py) may run one turn at a time and
use ten tokens per second. A round has some seconds without noise, and as many seconds with a new noisy
tenant, whose quota is unused. The measurement compares the quiet tenant's first-token times and gaps. The
noisy tenant's process computes only while the core is idle, because in reality it would run on another
machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from pensieve.bench.report import percentile
from pensieve.client.channel import metadata_of
from pensieve.errors import InvalidArgument
from pensieve.guard.callers import new_token
from pensieve.v1 import conversation_pb2 as pb
from pensieve.v1 import conversation_pb2_grpc
from scripts.measurements.processes import pinned

ROOT = Path(__file__).parents[2]
ITERATION_SECONDS = 0.01
CONVERSATIONS = 4
PAUSE_SECONDS = 0.05  # of the user, between a reply and the next message
REPLY_TOKENS = 24
TURNS_OF_A_CONVERSATION = 50
QUIET_SECONDS = 2.0  # warm-up at the start, and pause after each noisy half of a round
EXPECTED = {"OK", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}  # accepted, too large, beyond a limit


@dataclass
class Times:
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    refused: int = 0


class IsolationTimes(NamedTuple):
    alone: Times  # the quiet tenant without noise
    with_noise: Times
    noise: Counter[str]  # the answers that the noisy tenant got


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="scripts/measure isolation", description=__doc__)
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="rounds, each with a half without and a half with a noisy tenant (default: 3)",
    )
    parser.add_argument("--seconds", type=float, default=15.0, help="per half round (default: 15)")
    arguments = parser.parse_args(given)
    alone, with_noise, noise = compared(arguments.rounds, arguments.seconds)
    print(f"{'the quiet tenant, ms':22}{'alone':>8}{'with the noisy one':>22}{'ratio':>8}")
    for name in ("first", "gaps"):
        for share in (0.5, 0.99):
            before, after = (percentile(getattr(each, name), share) for each in (alone, with_noise))
            label = f"{name} p{share * 100:g}"
            print(f"{label:22}{before * 1e3:8.1f}{after * 1e3:22.1f}{after / before:8.2f}")
    print(
        f"{len(alone.first)} and {len(with_noise.first)} turns, {alone.refused} and "
        f"{with_noise.refused} refused; "
        f"the answers of the noisy tenant: {dict(noise)}"
    )


def compared(num_rounds: int, seconds: float, noise_policy: int = os.SCHED_IDLE) -> IsolationTimes:
    """Measure the quiet tenant without and with noise.

    `noise_policy` is how the operating system schedules the noisy tenant's process.
    """
    quiet, quiet_entry = new_token("quiet", False)
    noisy = [
        new_token(f"noisy-{number}", False, turns_max=1, tokens_per_second=10.0)
        for number in range(num_rounds)
    ]
    found = IsolationTimes(Times(), Times(), Counter())
    with tempfile.TemporaryDirectory(prefix="pensieve-bench-") as folder:
        token_file = Path(folder) / "tokens.toml"
        token_file.write_text(quiet_entry + "".join(entry for _, entry in noisy))
        token_file.chmod(0o600)
        flags = ["--token-file", str(token_file), "--turns-max", "16"]
        with pinned(flags, ITERATION_SECONDS) as daemon:
            asyncio.run(measure(daemon.address, quiet, QUIET_SECONDS, Times()))
            for token, _ in noisy:
                asyncio.run(measure(daemon.address, quiet, seconds, found.alone))
                with _run_noisy_tenant(daemon.address, token, noise_policy, found.noise):
                    asyncio.run(measure(daemon.address, quiet, seconds, found.with_noise))
                time.sleep(QUIET_SECONDS)
    if not found.alone.first or not found.with_noise.first:
        raise InvalidArgument("seconds", "too few: no turn was measured")
    return found


@contextmanager
def _run_noisy_tenant(address: str, token: str, policy: int, codes: Counter[str]) -> Iterator[None]:
    """Run the noisy tenant inside the block, which begins when all EXPECTED answers have come.

    Add the tenant's answers to `codes`.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "scripts.measurements.noisy_tenant", address, token, str(policy)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    try:
        line = "{}"
        while not EXPECTED.issubset(json.loads(line)):
            if not (line := process.stdout.readline()):
                raise InvalidArgument(
                    "noise", "the noisy tenant's process ended before it was ready"
                )
        yield
    finally:
        process.terminate()
        rest, _ = process.communicate()
    codes.update(json.loads(([line, *rest.splitlines()])[-1]))


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


if __name__ == "__main__":
    main()
