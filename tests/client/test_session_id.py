"""Each call about a conversation or a job carries its id as metadata for routers.

A router that looks for another key than `session_id` scatters the calls silently. So this test checks the
received metadata of every method in the protos that names a conversation or a job.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest

from pensieve import errors
from pensieve.client import AsyncClient, Client, Retry
from pensieve.client.admin import Admin
from pensieve.v1 import admin_pb2, conversation_pb2, jobs_pb2

TALK, JOB = "trip-42", "nightly~1"
CALLS: dict[str, Callable[[Any], Any]] = {
    "CreateConversation": lambda c: c.conversation(TALK).create(),
    "ImportConversation": lambda c: c.conversation(TALK).create(messages=[{"content": "."}] * 128),
    "GetConversation": lambda c: c.conversation(TALK).get(),
    "DeleteConversation": lambda c: c.conversation(TALK).delete(),
    "SendMessage": lambda c: c.conversation(TALK).send("hello"),
    "CancelTurn": lambda c: c.conversation(TALK).cancel(),
    "ListMessages": lambda c: c.conversation(TALK).messages(),
    "ForkConversation": lambda c: c.conversation(TALK).fork(),
    "RewindConversation": lambda c: c.conversation(TALK).rewind(1),
    "WarmConversation": lambda c: c.conversation(TALK).warm(),
    "CreateJob": lambda c: c.jobs.create(b"{}\n", job_id=JOB),
    "GetJob": lambda c: c.jobs.get(JOB),
    "PauseJob": lambda c: c.jobs.pause(JOB),
    "ResumeJob": lambda c: c.jobs.resume(JOB),
    "CancelJob": lambda c: c.jobs.cancel(JOB),
    "DeleteJob": lambda c: c.jobs.delete(JOB),
    "GetResults": lambda c: c.jobs.results(JOB),
    "WatchJob": lambda c: c.jobs.watch(JOB),
    "ExplainConversation": lambda c: c.explain(TALK),
    "EvictConversation": lambda c: c.evict(TALK),
}
OTHERS: dict[str, Callable[[Any], Any]] = {
    "ListConversations": lambda c: c.conversations(),
    "GetServerInfo": lambda c: c.server_info(),
    "ListPrefixes": lambda c: c.prefixes(),
    "GetPrefix": lambda c: c.prefix("rules").get(),
    "ListJobs": lambda c: c.jobs.list(),
}


class Listener(grpc.GenericRpcHandler):
    """Accepts every method, records its metadata, and does nothing."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[tuple[str, Any]]]] = []

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        name = str(handler_call_details.method).rpartition("/")[2]
        self.calls.append((name, [*handler_call_details.invocation_metadata]))

        def refuse(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "nothing is done here")
            yield b""

        return grpc.stream_stream_rpc_method_handler(refuse)


@pytest.fixture(scope="module")
def listening() -> Iterator[tuple[Listener, list[str]]]:
    listener = Listener()
    server = grpc.server(futures.ThreadPoolExecutor(4), handlers=[listener])
    ports = [server.add_insecure_port("127.0.0.1:0") for _ in range(2)]
    server.start()
    yield listener, [f"127.0.0.1:{port}" for port in ports]
    server.stop(0).wait()


def methods_with_an_id() -> list[str]:
    found = []
    for file in (conversation_pb2, jobs_pb2, admin_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                names = {each.name for each in method.input_type.fields}
                if names & {"conversation_id", "conversation", "job_id", "header"}:
                    found.append(method.name)
    return found


def call_sync(client: Any, call: Callable[[Any], Any]) -> None:
    given = call(client)
    if inspect.isgenerator(given) or hasattr(given, "__next__"):
        list(given)


def call_async(address: Any, call: Callable[[Any], Any]) -> None:
    async def main() -> None:
        async with AsyncClient(address, retry=Retry(retries=0)) as client:
            given = call(client)
            if inspect.isawaitable(given):
                await given
            else:
                async for _ in given:
                    pass

    asyncio.run(main())


def test_the_table_has_every_method_that_names_a_conversation_or_a_job() -> None:
    assert sorted(CALLS) == sorted(methods_with_an_id())
    assert len(CALLS) == 20


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("num_addresses", [1, 2])
def test_each_call_about_a_conversation_or_job_carries_its_id(
    name: str, num_addresses: int, listening: tuple[Listener, list[str]]
) -> None:
    listener, addresses = listening
    is_admin = name in ("ExplainConversation", "EvictConversation")
    given = ",".join(addresses[: 1 if is_admin else num_addresses])
    listener.calls.clear()
    with (
        pytest.raises(errors.PensieveError),
        (Admin if is_admin else Client)(given, token="t", retry=Retry(retries=0)) as client,
    ):
        call_sync(client, CALLS[name])
    if not is_admin:
        with pytest.raises(errors.PensieveError):
            call_async(given, CALLS[name])
    sent = [metadata for called, metadata in listener.calls if called == name]
    assert len(sent) == (1 if is_admin else 2)
    wanted = JOB if "Job" in name or name == "GetResults" else TALK
    for metadata in sent:
        assert [value for key, value in metadata if key == "session_id"] == [wanted]
    others = [metadata for called, metadata in listener.calls if called != name]
    assert all(("session_id", wanted) in metadata for metadata in others)  # e.g. CancelTurn


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls_carry_no_session_id(name: str, listening: tuple[Listener, list[str]]) -> None:
    listener, addresses = listening
    listener.calls.clear()
    client = Client(addresses[0], retry=Retry(retries=0))
    with pytest.raises(errors.PensieveError), client:
        call_sync(client, OTHERS[name])
    ((called, metadata),) = listener.calls
    assert called == name
    assert "session_id" not in dict(metadata)


def test_an_invalid_conversation_id_is_not_sent_as_metadata(
    listening: tuple[Listener, list[str]],
) -> None:
    listener, addresses = listening
    listener.calls.clear()
    with pytest.raises(errors.ServerFault), Admin(addresses[0]) as admin:
        admin.explain("näh\n")
    assert "session_id" not in dict(listener.calls[0][1])
