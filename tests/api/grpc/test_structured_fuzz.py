"""Valid messages with extreme values, for every method of a daemon: each is answered, and nothing breaks.

The bytes of test_fuzz.py are seldom a valid message. These messages are always valid, so they get further.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from google.protobuf import descriptor

from pensieve.client import Client
from pensieve.client.admin import Admin
from pensieve.v1 import admin_pb2, conversation_pb2, jobs_pb2, status_pb2
from tests.conversations.extremes import with_one_extreme_value, with_random_extreme_values
from tests.conversations.rig_daemon import ServeProcess
from tests.scale import SCALE, SEED

NUM_MESSAGES = 3_000 * SCALE
NUM_WORKERS = 32
EVENTS_MAX = 20  # events of a stream to read before leaving it
GROWN_MAX = 192 << 20
NEVER = {"UNKNOWN", "INTERNAL", "DEADLINE_EXCEEDED", "UNAVAILABLE"}
LEFT_OUT = {"/pensieve.v1.AdminService/Drain"}  # this would end the daemon


class Method(NamedTuple):
    path: str
    request: Any  # message class of the request
    streams: bool


def methods() -> list[Method]:
    """Return all methods of the daemon, except excluded ones."""
    found = []
    for module in (conversation_pb2, jobs_pb2, admin_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            assert isinstance(service, descriptor.ServiceDescriptor)
            for each in service.methods:
                path = f"/{service.full_name}/{each.name}"
                if path not in LEFT_OUT:
                    request = getattr(each.input_type, "_concrete_class")  # noqa: B009
                    found.append(Method(path, request, each.server_streaming))
    check = "/grpc.health.v1.Health/"
    found.append(Method(f"{check}Check", status_pb2.HealthCheckRequest, False))
    found.append(Method(f"{check}Watch", status_pb2.HealthCheckRequest, True))
    return found


def requests(count: int, seed: int) -> Iterator[tuple[Method, bytes]]:
    """Yield requests: first each field at each extreme alone, then random combinations."""
    every = methods()
    for method in every:
        for request in with_one_extreme_value(method.request):
            if method.request is conversation_pb2.SendMessageRequest and not request.messages:
                request.conversation_id = request.conversation_id or "c1"
                request.messages.add(content="hello")
                request.create_if_missing = True
            yield method, request.SerializeToString()
    choose = random.Random(seed)
    for _ in range(count):
        method = choose.choice(every)
        request = with_random_extreme_values(method.request, choose)
        if hasattr(request, "conversation_id") and choose.random() < 0.7:
            request.conversation_id = choose.choice(("c1", "c2", "c3"))
        yield method, request.SerializeToString()


async def send(address: str, count: int, seed: int) -> Counter[str]:
    codes: Counter[str] = Counter()
    remaining = requests(count, seed)
    async with grpc.aio.insecure_channel(address) as channel:

        async def worker() -> None:
            for method, packed in remaining:
                try:
                    if method.streams:
                        many: Any = channel.unary_stream(method.path)
                        call = many(packed, timeout=120)
                        events = 0
                        async for _ in call:
                            events += 1
                            if events == EVENTS_MAX or "Watch" in method.path:
                                call.cancel()
                                break
                    else:
                        one: Any = channel.unary_unary(method.path)
                        await one(packed, timeout=120)
                    codes["OK"] += 1
                except grpc.aio.AioRpcError as error:
                    code = error.code().name
                    if code == "UNAVAILABLE" and method.path.endswith("DeleteConversation"):
                        code = "ERASURE_PENDING"  # the flood of reads delays the erasure
                    codes[code] += 1
                    if code in NEVER:
                        print(method.path, packed[:2000], code, error.details())

        await asyncio.gather(*(worker() for _ in range(NUM_WORKERS)))
    return codes


def rss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


@pytest.mark.timeout(300 * SCALE)
def test_extreme_values_are_answered_and_cause_no_failure(tmp_path: Path) -> None:
    process = ServeProcess(tmp_path / "data", parameters={"config": {"grace_seconds": 0.2}})
    process.start()
    local = f"unix:{tmp_path / 'data' / 'admin.sock'}"  # allows every method
    pid, engine = process.process.pid, process.engine_pid()
    codes = asyncio.run(send(local, 0, SEED))
    before = rss(pid)
    codes += asyncio.run(send(local, NUM_MESSAGES, SEED + 1))
    print(dict(codes))
    assert not NEVER & set(codes)
    assert codes["OK"] > NUM_MESSAGES / 20
    assert codes["INVALID_ARGUMENT"] > NUM_MESSAGES / 20
    assert rss(pid) - before < GROWN_MAX
    assert process.process.poll() is None
    assert process.engine_pid() == engine, "the engine was restarted"
    with Client(process.address) as client, Admin(local) as admin:
        assert client.conversation("after").ask("still well?", max_tokens=4).revision == 1
        assert admin.check() == []
    assert process.stop() == 0


def test_every_field_of_every_request_is_tried() -> None:
    tried: dict[str, set[str]] = {}
    for method, packed in requests(0, 0):
        request = method.request.FromString(packed)
        tried.setdefault(method.path, set()).update(each.name for each, _ in request.ListFields())
    for method in methods():
        wanted = {field.name for field in method.request.DESCRIPTOR.fields}
        assert tried.get(method.path, set()) == wanted, method.path
