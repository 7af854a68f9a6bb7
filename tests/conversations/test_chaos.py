"""1,000 abandoned, 100 stalled and 100 slow readers, beside 50 healthy readers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest

from pensieve.client import Retry
from pensieve.client.admin import Admin
from pensieve.v1 import conversation_pb2 as pb
from pensieve.v1 import conversation_pb2_grpc
from tests.conversations.rig_daemon import ServeProcess, wait_for
from tests.scale import SCALE

NUM_HEALTHY = 50
# Replies are long enough that the healthy readers still read while all turns are abandoned.
NUM_TOKENS, NUM_ABANDONED = (400, 1000) if SCALE > 1 else (150, 300)


def misbehave(kind: str, address: str, count: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.conversations.misbehave", kind, address, str(count)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=Path(__file__).parents[2],
    )


async def run_healthy(address: str, name: str) -> list[float]:
    """Run fifty streams, which must all be complete. Return the gaps between their messages."""
    gaps: list[float] = []

    async with grpc.aio.insecure_channel(address) as channel:
        stub = conversation_pb2_grpc.ConversationServiceStub(channel)

        async def talk(number: int) -> int:
            before, count = None, 0
            request = pb.SendMessageRequest(
                conversation_id=f"{name}-{number}",
                messages=[pb.NewMessage(content="Good morning.")],
                create_if_missing=True,
                sampling=pb.Sampling(max_tokens=NUM_TOKENS, ignore_eos=True),
            )
            async for response in stub.SendMessage(request):
                if response.WhichOneof("event") == "delta":
                    now = time.perf_counter()
                    if before is not None:
                        gaps.append(now - before)
                    before = now
                    count += len(response.delta.token_ids)
            return count

        counts = await asyncio.gather(*(talk(number) for number in range(NUM_HEALTHY)))
    assert counts == [NUM_TOKENS] * NUM_HEALTHY
    return sorted(gaps)


@pytest.mark.timeout(600)
def test_healthy_streams_are_complete_despite_abandoned_stalled_and_slow_streams(
    tmp_path: Path,
) -> None:
    process = ServeProcess(
        tmp_path / "data",
        *("--turns-max", "512"),
        engine="echo:0.05",
        parameters={
            "config": {"live_turns_max": 2000, "grace_seconds": 0.5},
            "listening": {"keepalive_seconds": 3.0, "ping_timeout_seconds": 5.0},
        },
    )
    address = process.start()
    with Admin(f"unix:{tmp_path / 'data' / 'admin.sock'}", retry=Retry(retries=0)) as admin:
        alone = asyncio.run(run_healthy(address, "alone"))
        stalled = misbehave("stall", address, 100)
        assert stalled.stdout is not None
        assert stalled.stdout.readline() == "begun\n"
        os.kill(stalled.pid, signal.SIGSTOP)
        slow = misbehave("slow", address, 100)
        assert slow.stdout is not None
        assert slow.stdout.readline() == "begun\n"
        abandoned = misbehave("abandon", address, NUM_ABANDONED)
        beside = asyncio.run(run_healthy(address, "beside"))
        abandoned.wait(300)
        wait_for(lambda: admin.stats().turns_running <= 100)  # only the slow readers are left
        during = admin.stats()
        slow.kill()
        killed = time.perf_counter()
        wait_for(lambda: admin.stats().turns_running == 0)
        print(f"{time.perf_counter() - killed:.2f} s until the last turns had ended")
        stalled.kill()
        p99 = [gaps[int(len(gaps) * 0.99)] for gaps in (alone, beside)]
        print(
            f"p99 gap alone {p99[0] * 1e3:.1f} ms, beside {p99[1] * 1e3:.1f} ms: "
            f"{p99[1] / p99[0]:.2f} x"
        )
        after = admin.stats()
        assert during.turns_running > 0
        assert (after.turns_queued, after.turns_suspended, after.engine_restarts) == (0, 0, 0)
        assert after.conversations_stored >= NUM_ABANDONED + 100 + 100 + 2 * NUM_HEALTHY
        assert admin.check() == []
        for child in (stalled, slow, abandoned):
            child.wait()
            assert child.stdout is not None
            child.stdout.close()
    assert process.stop() == 0
