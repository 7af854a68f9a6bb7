"""Ten times the load that can be served: throughput stays, and a refusal has a retry time."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import grpc

from pensieve.client.admin import Admin
from pensieve.v1 import conversation_pb2 as pb
from pensieve.v1 import conversation_pb2_grpc, status_pb2
from tests.conversations.rig_daemon import ServeProcess

CAPACITY = 16  # turns that can run at once
TURN = pb.Sampling(max_tokens=20, ignore_eos=True)


async def load(address: str, turns_per_second: float | None, seconds: float) -> dict[str, Any]:
    """Send turns at a fixed rate, even if turns fail. With None, keep CAPACITY turns running instead."""
    delivered, completed, refused, codes, retries = 0, 0, [], set(), True
    began = time.monotonic()
    end = began + seconds

    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = conversation_pb2_grpc.ConversationServiceStub(channel)

        async def say(number: int) -> None:
            nonlocal delivered, completed, retries
            asked = time.monotonic()
            request = pb.SendMessageRequest(
                conversation_id=f"c{number}",
                messages=[pb.NewMessage(content="hello")],
                create_if_missing=True,
                sampling=TURN,
            )
            try:
                async for response in stub.SendMessage(request):
                    if response.WhichOneof("event") == "delta":
                        delivered += len(response.delta.token_ids)
                completed += 1
            except grpc.aio.AioRpcError as error:
                refused.append(time.monotonic() - asked)
                codes.add(error.code())
                packed = dict(error.trailing_metadata() or ())["grpc-status-details-bin"]
                kinds = [each.type_url for each in status_pb2.Status.FromString(packed).details]
                retries &= any(kind.endswith("RetryInfo") for kind in kinds)

        async def send_repeatedly(number: int) -> None:
            while time.monotonic() < end:
                await say(number)

        if turns_per_second is None:
            await asyncio.gather(*(send_repeatedly(number) for number in range(2 * CAPACITY)))
        else:
            tasks, number = [], 0
            while (now := time.monotonic()) < end:
                while began + number / turns_per_second <= now:
                    number += 1
                    tasks.append(asyncio.create_task(say(1000 + number)))
                await asyncio.sleep(0.002)
            await asyncio.gather(*tasks)
        took = time.monotonic() - began
    refused.sort()
    assert delivered == completed * TURN.max_tokens, "an accepted turn is cut short"
    return {
        "tokens_per_second": delivered / took,
        "turns_per_second": delivered / took / TURN.max_tokens,
        "refused": len(refused),
        "refused_p99_seconds": refused[int(len(refused) * 0.99)] if refused else 0.0,
        "codes": codes,
        "all_have_retry_info": retries,
    }


def rss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def test_ten_times_the_load_does_not_slow_accepted_turns(tmp_path: Path) -> None:
    process = ServeProcess(
        tmp_path / "data",
        *("--turns-max", str(CAPACITY)),
        engine="echo:0.02",
        parameters={"config": {"live_turns_max": 2 * CAPACITY + 8}},
    )
    address = process.start()
    pid = process.process.pid
    with Admin(f"unix:{tmp_path / 'data' / 'admin.sock'}") as admin:

        def measure(turns_per_second: float | None, seconds: float) -> tuple[dict[str, Any], float]:
            """Run this load. Return its outcome, and the tokens per iteration."""
            before = admin.stats()
            outcome = asyncio.run(load(address, turns_per_second, seconds))
            after = admin.stats()
            num_iterations = after.iterations - before.iterations
            return outcome, (after.output_tokens - before.output_tokens) / num_iterations

        peak, peak_goodput = measure(None, 4)
        before = rss_bytes(pid)
        over, over_goodput = measure(10 * peak["turns_per_second"], 6)
        grown = rss_bytes(pid) / before
        print(
            f"goodput {over['tokens_per_second'] / peak['tokens_per_second']:.0%} of "
            f"{peak['tokens_per_second']:,.0f} tokens/s, {over_goodput:.1f} and {peak_goodput:.1f} an "
            f"iteration; {over['refused']} refused, p99 after "
            f"{over['refused_p99_seconds'] * 1e3:.1f} ms; memory x {grown:.3f}"
        )
        assert peak["refused"] == 0
        assert over["refused"] > 100
        assert over["codes"] == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert over["all_have_retry_info"]
        assert over_goodput > 0.7 * peak_goodput  # per iteration, for slow machines
        assert grown < 1.3
        assert admin.check() == []
    assert process.stop() == 0
