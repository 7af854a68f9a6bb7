"""Declared prefixes through the SDK: requests, results and retries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pensieve import errors
from pensieve.client import AsyncClient, Client, Retry
from pensieve.v1 import conversation_pb2 as pb
from tests.client.scripted import AWAY, ScriptedServer

HALF = "half \ud83d"  # half of a surrogate pair
SHOTS = [
    {"content": "Is it raining?"},
    {"role": "assistant", "content": "It is."},
    {"role": "tool", "content": "3 mm", "tool_call_id": "call1"},
]


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[Client]:
    with Client(server.address, retry=Retry(retries=3), sleep=lambda seconds: None) as client:
        yield client


def test_methods_of_a_prefix_from_create_to_delete(client: Client, server: ScriptedServer) -> None:
    rules = client.prefix("rules")
    assert repr(rules) == "<Prefix 'rules'>"
    declared = rules.create(
        system_prompt="Be brief.",
        tools=[{"name": "f"}],
        template_options={"loud": True},
        messages=SHOTS,
        keep_warm=True,
    )
    assert (declared.prefix_id, declared.num_messages, declared.num_tokens) == ("rules", 4, 9)
    assert (declared.keep_warm, declared.messages, declared.tools) == (True, (), ())
    (sent,) = server.requests("CreatePrefix")
    assert [each.role for each in sent.messages] == [pb.ROLE_USER, pb.ROLE_ASSISTANT, pb.ROLE_TOOL]
    assert sent.messages[2].tool_call_id == "call1"
    found = rules.get()
    assert [(each.role, each.text) for each in found.messages] == [
        ("system", "Be brief."),
        ("user", "Is it raining?"),
        ("assistant", "It is."),
        ("tool", "3 mm"),
    ]
    assert (found.tools, found.template_options) == (({"name": "f"},), {"loud": True})
    with pytest.raises(errors.AlreadyExists):
        rules.create(system_prompt="x")
    rules.delete()
    with pytest.raises(errors.NotFound):
        rules.get()


def test_all_prefixes_are_listed_page_by_page(client: Client, server: ScriptedServer) -> None:
    for number in range(5):
        client.prefix(f"p{number}").create(system_prompt="x")
    assert [each.prefix_id for each in client.prefixes()] == ["p0", "p1", "p2", "p3", "p4"]
    tokens = [page.page_token for page in server.requests("ListPrefixes")]
    assert tokens == ["", "2", "4"]


def test_only_calls_without_side_effects_are_retried(
    client: Client, server: ScriptedServer
) -> None:
    rules = client.prefix("rules")
    rules.create(system_prompt="x")
    retried: dict[str, Callable[[], object]] = {
        "GetPrefix": rules.get,
        "ListPrefixes": lambda: list(client.prefixes()),
    }
    for name, act in retried.items():
        server.calls.clear()
        server.refusals.extend([AWAY, AWAY])
        act()
        assert server.names() == [name] * 3
    not_retried: dict[str, Callable[[], object]] = {
        "CreatePrefix": lambda: rules.create(system_prompt="x"),
        "DeletePrefix": rules.delete,
    }
    for name, act in not_retried.items():
        server.calls.clear()
        server.refusals.append(AWAY)
        with pytest.raises(errors.Unavailable):
            act()
        assert server.names() == [name]


@pytest.mark.parametrize(
    ("act", "field"),
    [
        (lambda client: client.prefix("my rules"), "prefix_id"),
        (lambda client: client.prefix(""), "prefix_id"),
        (lambda client: client.prefix("p").create(system_prompt=HALF), "system_prompt"),
        (lambda client: client.prefix("p").create(tools=[{"name": HALF}]), "tools"),
        (lambda client: client.prefix("p").create(messages=[{"content": HALF}]), "content"),
        (lambda client: client.prefix("p").create(messages=["x"]), "messages"),
        (lambda client: client.prefix("p").create(messages=[{"role": "x", "content": ""}]), "role"),
    ],
)
def test_invalid_arguments_are_refused_before_sending(
    client: Client, server: ScriptedServer, act: Callable[[Any], object], field: str
) -> None:
    with pytest.raises(errors.InvalidArgument) as wrong:
        act(client)
    assert wrong.value.field == field
    assert server.calls == []


def test_prefixes_with_the_async_client(server: ScriptedServer) -> None:
    async def script() -> None:
        async with AsyncClient(server.address) as client:
            rules = client.prefix("rules")
            assert repr(rules) == "<AsyncPrefix 'rules'>"
            await rules.create(system_prompt="Be brief.", messages=SHOTS[:2])
            assert (await rules.get()).messages[0].text == "Be brief."
            assert [each.prefix_id async for each in client.prefixes()] == ["rules"]
            await client.conversation("c").create(prefix_id="rules")
            await rules.delete()
            assert [each async for each in client.prefixes()] == []

    asyncio.run(script())
    assert server.requests("CreateConversation")[0].prefix_id == "rules"
