"""A conversation that is created with a history: its tokens, its turns, and which histories are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.struct_pb2 import Struct, Value

from pensieve.client import AsyncClient, Client
from pensieve.errors import AlreadyExists, ContextFull, InvalidArgument, NotFound
from pensieve.v1 import conversation_pb2 as pb
from tests.conversations.rig_daemon import DaemonRig, details
from tests.conversations.test_declared_prefixes import SHORT, SHOTS, log_of

RULES = "Answer in one short sentence."
METADATA = Struct(fields={"a": Value(number_value=1)})


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonRig]:
    with DaemonRig(tmp_path_factory.mktemp("given") / "data") as rig:
        yield rig


def create(rig: DaemonRig, name: str, **fields: Any) -> Any:
    fields.setdefault("messages", SHOTS)
    request = pb.CreateConversationRequest(conversation_id=name, **fields)
    return rig.stub.CreateConversation(request).conversation


def test_a_given_history_has_the_same_tokens_as_messages_sent_in_a_turn(rig: DaemonRig) -> None:
    made = create(rig, "given", system_prompt=RULES, metadata=METADATA)
    assert (made.revision, made.num_messages, dict(made.metadata)) == (0, 5, {"a": 1})
    assert made.num_tokens > 20
    assert [each.content for each in rig.messages("given")] == [
        RULES,
        *(each.content for each in SHOTS),
    ]
    rig.ask("given", "And now? ", sampling=SHORT)
    create(rig, "brought", system_prompt=RULES, messages=())
    messages = [*SHOTS, pb.NewMessage(content="And now? ")]
    request = pb.SendMessageRequest(conversation_id="brought", messages=messages, sampling=SHORT)
    assert [*rig.stub.SendMessage(request)][-1].HasField("completed")
    for text in ("So?", "And then?"):
        assert log_of(rig, "given") == log_of(rig, "brought")
        for name in ("given", "brought"):
            rig.ask(name, text, sampling=SHORT)
    assert log_of(rig, "given") == log_of(rig, "brought")


def test_a_rewind_and_a_fork_at_revision_zero_keep_the_given_history(rig: DaemonRig) -> None:
    made = create(rig, "kept")
    rig.ask("kept", "Is it late?", sampling=SHORT)
    fork = rig.stub.ForkConversation(
        pb.ForkConversationRequest(
            conversation_id="kept", at_revision=0, new_conversation_id="fork"
        )
    ).conversation
    rig.stub.RewindConversation(pb.RewindConversationRequest(conversation_id="kept", to_revision=0))
    found = rig.stub.GetConversation(pb.GetConversationRequest(conversation_id="kept"))
    assert found.conversation.num_messages == fork.num_messages == len(SHOTS)
    assert found.conversation.num_tokens == fork.num_tokens == made.num_tokens
    for name in ("kept", "fork"):
        rig.ask(name, "Is it far?", sampling=SHORT)
    assert log_of(rig, "kept") == log_of(rig, "fork")


def test_tool_calls_thinking_and_names_are_returned_as_given(rig: DaemonRig) -> None:
    call = {
        "id": "call1",
        "type": "function",
        "function": {"name": "rain", "arguments": '{"mm": [1, 2.5, null], "where": "Oslo"}'},
    }
    given: list[dict[str, Any]] = [
        {"role": "user", "content": "Is it raining?", "name": "Ada"},
        {
            "role": "assistant",
            "content": "I ask.",
            "tool_calls": [call],
            "reasoning_content": "Let me see.",
        },
        {"role": "tool", "content": "3 mm", "tool_call_id": "call1"},
        {"role": "assistant", "content": "It is."},
    ]
    with Client(rig.server.address) as client:
        conversation = client.conversation("calls")
        conversation.create(messages=given)
        user, calling, tool, last = conversation.messages()
        assert (user.name, user.tool_calls, user.thinking) == ("Ada", (), "")
        assert (calling.text, calling.tool_calls, calling.thinking) == (
            *("I ask.", (call,), "Let me see."),
        )
        assert (tool.tool_call_id, last.text) == ("call1", "It is.")


def test_an_invalid_history_is_refused_with_its_field_name(rig: DaemonRig) -> None:
    assistant = pb.ROLE_ASSISTANT
    twice = pb.ToolCall(name="f", arguments='{"a": 1, "a": 2}')
    cases: list[tuple[list[pb.NewMessage], dict[str, Any], str]] = [
        ([pb.NewMessage(content="")], {}, "content"),
        ([pb.NewMessage(role=pb.ROLE_SYSTEM, content="x")], {}, "messages"),
        ([pb.NewMessage(content="x", thinking="y")], {}, "messages[0]"),
        ([pb.NewMessage(content="x", tool_calls=[pb.ToolCall(name="f")])], {}, "messages[0]"),
        (
            [pb.NewMessage(role=assistant, tool_calls=[twice])],
            {},
            "messages[0].tool_calls[0].arguments",
        ),
        (
            [pb.NewMessage(role=assistant, tool_calls=[pb.ToolCall(name="f", arguments="[]")])],
            {},
            "messages[0].tool_calls[0].arguments",
        ),
        (
            [pb.NewMessage(role=assistant, tool_calls=[pb.ToolCall()])],
            {},
            "messages[0].tool_calls[0].name",
        ),
        (
            [
                pb.NewMessage(
                    role=assistant,
                    tool_calls=[pb.ToolCall(name="f", arguments=f'{{"a": "{"x" * 200_000}"}}')],
                )
            ]
            * 2,
            {},
            "messages",
        ),
        ([pb.NewMessage(content="x")] * 128, {}, "messages"),
        ([pb.NewMessage(content="x")], {"prefix_id": "rules"}, "prefix_id"),
    ]
    for messages, more, field in cases:
        with pytest.raises(grpc.RpcError) as caught:
            create(rig, "refused", messages=messages, **more)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert details(caught.value)["BadRequest"].field_violations[0].field == field
    with pytest.raises(grpc.RpcError) as caught:
        rig.stub.GetConversation(pb.GetConversationRequest(conversation_id="refused"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def pieces(*given: Any, complete: bool = True) -> Iterator[pb.ImportConversationRequest]:
    """Yield the import's first request, which creates the conversation, and then lists of messages."""
    yield pb.ImportConversationRequest(conversation=given[0])
    for messages in given[1:]:
        yield pb.ImportConversationRequest(messages=messages)
    if complete:
        yield pb.ImportConversationRequest(complete=True)


def test_a_history_imported_in_pieces_equals_a_history_created_at_once(
    rig: DaemonRig,
) -> None:
    whole = pb.CreateConversationRequest(
        conversation_id="at-once", system_prompt=RULES, messages=SHOTS, metadata=METADATA
    )
    assert rig.stub.CreateConversation(whole).conversation.num_messages == len(SHOTS) + 1
    first = pb.CreateConversationRequest(
        conversation_id="in-pieces",
        system_prompt=RULES,
        messages=SHOTS[:1],
        metadata=METADATA,
    )
    made = rig.stub.ImportConversation(pieces(first, SHOTS[1:2], [], SHOTS[2:])).conversation
    assert (made.num_messages, made.metadata) == (len(SHOTS) + 1, METADATA)
    assert log_of(rig, "in-pieces") == log_of(rig, "at-once")


def test_both_clients_create_a_history_longer_than_one_request(rig: DaemonRig) -> None:
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "!"},
    ]
    turns = [*turns * 70, {"role": "system", "content": "Be brief now."}, *turns]
    wanted = [(each["role"], each["content"]) for each in turns]
    with Client(rig.server.address) as client:
        made = client.conversation("threads").create(messages=turns)
        assert (made.conversation_id, made.num_messages, made.revision) == ("threads", 143, 0)
        assert [(m.role, m.text) for m in client.conversation("threads").messages()] == wanted
        assert client.conversation("threads").ask("And?", max_tokens=2).revision == 1
        with pytest.raises(AlreadyExists):
            client.conversation("threads").create(messages=turns)

    async def main() -> list[tuple[str, str]]:
        async with AsyncClient(rig.server.address) as client:
            talk = client.conversation("tasks")
            await talk.create(messages=turns)
            return [(each.role, each.text) async for each in talk.messages()]

    assert asyncio.run(main()) == wanted


def test_an_incomplete_or_invalid_import_creates_no_conversation(rig: DaemonRig) -> None:
    new = pb.CreateConversationRequest(conversation_id="broken")
    some = [pb.NewMessage(content="x")] * 100
    wrong = [pb.NewMessage(content="x", thinking="y")]
    endless = [some] * (rig.daemon.context_max // 100 + 1)
    cases: list[tuple[Iterator[pb.ImportConversationRequest], str]] = [
        (pieces(new, SHOTS, complete=False), "complete"),
        (iter([]), "conversation"),
        (iter([pb.ImportConversationRequest(messages=SHOTS, complete=True)]), "conversation"),
        (pieces(new, some, wrong), "messages[100]"),
        (pieces(new, [*some, *some]), "messages"),
        (pieces(new, *endless, complete=False), "messages"),
        (pieces(new, [pb.NewMessage(role=pb.ROLE_SYSTEM, content="x")]), "messages"),
    ]
    for given, field in cases:
        with pytest.raises(grpc.RpcError) as caught:
            rig.stub.ImportConversation(given)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert details(caught.value)["BadRequest"].field_violations[0].field == field
    with Client(rig.server.address) as client, pytest.raises(NotFound):
        client.conversation("broken").get()


def test_a_history_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with DaemonRig(tmp_path / "data") as rig, Client(rig.server.address) as client:
        rain = [{"content": "rain " * (rig.daemon.context_max - 10)}]
        with pytest.raises(ContextFull):
            client.conversation("c").create(messages=rain)
        with pytest.raises(InvalidArgument, match="messages"):
            client.conversation("c").create(messages=[{"content": "x" * 2_000_000}])
        assert list(client.conversations()) == []
