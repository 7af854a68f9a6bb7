"""A tenant that sends a daemon as much load as it can (isolation.py starts and kills this process).

It does everything at once that one access token allows: requests at and above the maximum size, floods of
reads and creates, texts as long as the context, turns of the highest priority that are abandoned early,
deletions, forks and warms. It counts the status codes of the answers and prints a line of JSON each second.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from pensieve.client.channel import metadata_of
from pensieve.core.turn import PRIORITY_MAX
from pensieve.v1 import conversation_pb2 as pb
from pensieve.v1 import conversation_pb2_grpc

WORKERS = 4  # workers per kind of load
CALLS_BEGUN_MAX = 200  # calls per second and worker, to spare the tenant's own machine
WORDS = "what it is to be remembered by a machine, and what it is not, "
LONG = WORDS * 4_000  # about a quarter of a million characters
GIVE_UP_SECONDS = 30.0


class NoisyTenant:
    def __init__(self, stub: Any, token: str, codes: Counter[str]) -> None:
        self._stub = stub
        self._options = {"metadata": metadata_of(token), "timeout": GIVE_UP_SECONDS}
        self._codes = codes
        self._numbers = itertools.count()
        self._base = self._name()
        self._too_large = itertools.cycle(_requests_too_large())

    def kinds(self) -> list[Callable[[], Awaitable[Any]]]:
        return [
            self._create,
            self._create_and_delete,
            self._list,
            self._read,
            self._send_too_large_request,
            self._send_too_long_text,
            self._leave_early,
            self._fork_and_warm,
        ]

    async def work(self, kind: Callable[[], Awaitable[Any]]) -> None:
        while True:
            try:
                await kind()
                self._codes["OK"] += 1
            except grpc.aio.AioRpcError as error:
                self._codes[error.code().name] += 1
            await asyncio.sleep(1 / CALLS_BEGUN_MAX)

    async def _ask(self, method: str, request: Any) -> None:
        await getattr(self._stub, method)(request, **self._options)

    def _name(self) -> str:
        return f"noise-{os.getpid()}-{next(self._numbers)}"

    async def prepare(self) -> None:
        """Create a conversation to read, fork and write to, and as many others as the limits allow."""
        await self._ask(
            "CreateConversation", pb.CreateConversationRequest(conversation_id=self._base)
        )
        with contextlib.suppress(grpc.aio.AioRpcError):
            for _ in range(30):
                await self._create()

    async def _create(self) -> None:
        request = pb.CreateConversationRequest(
            conversation_id=self._name(), system_prompt=WORDS * 200
        )
        request.metadata.update({"note": "x" * 15_000})
        await self._ask("CreateConversation", request)

    async def _create_and_delete(self) -> None:
        name = self._name()
        request = pb.CreateConversationRequest(conversation_id=name, system_prompt=LONG)
        try:
            await self._ask("CreateConversation", request)
        finally:
            await self._ask(
                "DeleteConversation", pb.DeleteConversationRequest(conversation_id=name)
            )

    async def _list(self) -> None:
        await self._ask("ListConversations", pb.ListConversationsRequest(page_size=1000))

    async def _read(self) -> None:
        await self._ask(
            "ListMessages",
            pb.ListMessagesRequest(conversation_id=self._base, include_token_ids=True),
        )

    async def _send_too_large_request(self) -> None:
        await self._turn(next(self._too_large))

    async def _send_too_long_text(self) -> None:
        request = pb.SendMessageRequest(conversation_id=self._base)
        request.messages.add(content=LONG)
        await self._turn(request)

    async def _leave_early(self) -> None:
        request = pb.SendMessageRequest(
            conversation_id=self._name(),
            create_if_missing=True,
            priority=PRIORITY_MAX,
            sampling=pb.Sampling(max_tokens=10_000, ignore_eos=True),
        )
        request.messages.add(content=WORDS * 10)
        call = self._stub.SendMessage(request, **self._options)
        async for _ in call:
            break
        call.cancel()

    async def _fork_and_warm(self) -> None:
        name = self._name()
        await self._ask(
            "ForkConversation",
            pb.ForkConversationRequest(conversation_id=self._base, new_conversation_id=name),
        )
        await self._ask("WarmConversation", pb.WarmConversationRequest(conversation_id=name))

    async def _turn(self, request: pb.SendMessageRequest) -> None:
        async for _ in self._stub.SendMessage(request, **self._options):
            pass


def _requests_too_large() -> list[pb.SendMessageRequest]:
    requests = [pb.SendMessageRequest(conversation_id="c") for _ in range(3)]
    requests[0].messages.extend(pb.NewMessage() for _ in range(500_000))
    requests[1].metadata.update({str(number): 1.0 for number in range(100_000)})
    requests[2].messages.add(role=pb.ROLE_TOOL, tool_call_id="x" * 3_000_000)
    return requests


async def main(address: str, token: str) -> None:
    options = [("grpc.max_receive_message_length", 64 << 20)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        codes: Counter[str] = Counter()
        stub = conversation_pb2_grpc.ConversationServiceStub(channel)
        tenant = NoisyTenant(stub, token, codes)
        await tenant.prepare()
        workers = [
            asyncio.ensure_future(tenant.work(kind))
            for kind in tenant.kinds()
            for _ in range(WORKERS)
        ]
        while not any(worker.done() for worker in workers):  # a worker ends only by a bug
            await asyncio.sleep(1.0)
            print(json.dumps(codes), flush=True)
        await asyncio.gather(*workers)


if __name__ == "__main__":
    # With SCHED_IDLE, any other process gets the core at once. With nice(19) a client would wait up
    # to 3 ms for the core.
    os.sched_setscheduler(0, int(sys.argv[3]), os.sched_param(0))
    asyncio.run(main(sys.argv[1], sys.argv[2]))
