"""Clients that behave badly, as a process: `python -m tests.conversations.misbehave KIND ADDRESS N`.

abandon   begin N turns, 50 a second, and leave each turn after its first event
slow      begin N turns, and read one event a second
stall     begin N turns, print a line, and read until the test stops the process (SIGSTOP)
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc

from pensieve.v1 import conversation_pb2 as pb
from pensieve.v1 import conversation_pb2_grpc

LENGTH = 1_000_000
ABANDONED_PER_SECOND = 50


async def main(kind: str, address: str, count: int) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = conversation_pb2_grpc.ConversationServiceStub(channel)
        begun = 0

        async def talk(number: int) -> None:
            nonlocal begun
            if kind == "abandon":
                await asyncio.sleep(number / ABANDONED_PER_SECOND)
            call = stub.SendMessage(
                pb.SendMessageRequest(
                    conversation_id=f"{kind}-{number}",
                    messages=[pb.NewMessage(content="hello")],
                    create_if_missing=True,
                    sampling=pb.Sampling(max_tokens=LENGTH, ignore_eos=True),
                )
            )
            async for _ in call:
                begun += 1
                if begun == count:
                    print("begun", flush=True)
                if kind == "abandon":
                    call.cancel()
                    return
                await asyncio.sleep(1.0 if kind == "slow" else 0.0)

        await asyncio.gather(*(talk(number) for number in range(count)), return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
