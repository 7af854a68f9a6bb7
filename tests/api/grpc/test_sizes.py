"""Size limits of requests. Everything that was accepted can be read."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format, struct_pb2

from pensieve.api.grpc import json_values, sizes, translate
from pensieve.conversations.daemon_config import DaemonConfig
from pensieve.conversations.heads import ConversationSettings
from pensieve.conversations.live_turn import LiveTurn, ReplyTokens
from pensieve.core.iteration import Logprob
from pensieve.errors import InvalidArgument
from pensieve.store.records import PAGE_BYTES_MAX, NewConversation
from pensieve.text import Part
from pensieve.v1 import conversation_pb2 as pb
from tests.conversations.rig_daemon import DaemonRig, details

MIB = 1 << 20
DEFAULT_BYTES_MAX = 4 * MIB  # the default limit of gRPC clients for received messages
PAGE = Path(__file__).resolve().parents[3] / "docs" / "security.md"


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonRig]:
    with DaemonRig(tmp_path_factory.mktemp("sizes") / "data") as rig:
        yield rig


def struct(size: int) -> struct_pb2.Struct:
    """Return a Struct of about this many bytes, without long texts."""
    given = struct_pb2.Struct()
    given.update({"a": [1.5] * (size // 11)})
    return given


def text(size: int) -> struct_pb2.Struct:
    given = struct_pb2.Struct()
    given.update({"a": "x" * size})
    return given


def nulls(count: int) -> struct_pb2.Struct:
    given = struct_pb2.Struct()
    given.update({"a": [None] * count})
    return given


SEND, CREATE = pb.SendMessageRequest, pb.CreateConversationRequest
HELLO = [pb.NewMessage(content="hello")]
LARGE: list[tuple[str, Callable[[], Any], str]] = [
    (
        "SendMessage",
        lambda: SEND(conversation_id="c", messages=HELLO, metadata=struct(3 * MIB)),
        "metadata",
    ),
    (
        "SendMessage",
        lambda: SEND(conversation_id="c", messages=[pb.NewMessage()] * 1_000_000),
        "messages",
    ),
    (
        "SendMessage",
        lambda: SEND(
            conversation_id="c",
            messages=[pb.NewMessage(role=pb.ROLE_TOOL, content="x", tool_call_id="y" * 2 * MIB)],
        ),
        "messages[0].tool_call_id",
    ),
    (
        "SendMessage",
        lambda: SEND(conversation_id="c", messages=HELLO, request_id="r" * MIB),
        "request_id",
    ),
    (
        "SendMessage",
        lambda: SEND(
            conversation_id="c", messages=HELLO, sampling=pb.Sampling(stop=[""] * 1_000_000)
        ),
        "sampling",
    ),
    (
        "SendMessage",
        lambda: SEND(
            conversation_id="c",
            messages=HELLO,
            sampling=pb.Sampling(logit_bias=dict.fromkeys(range(100000), 1.0)),
        ),
        "sampling",
    ),
    (
        "SendMessage",
        lambda: SEND(conversation_id="c", messages=[pb.NewMessage(content="x" * (3 * MIB + 1))]),
        "messages",
    ),
    ("CreateConversation", lambda: CREATE(metadata=struct(20 << 10)), "metadata"),
    ("CreateConversation", lambda: CREATE(template_options=text(17 << 10)), "template_options"),
    ("CreateConversation", lambda: CREATE(tools=[text(100)] * 300), "tools"),
    ("CreateConversation", lambda: CREATE(tools=[text(100 << 10)] * 3), "tools"),
    ("CreateConversation", lambda: CREATE(tools=[nulls(20_000)]), "tools"),
    ("CreateConversation", lambda: CREATE(system_prompt="x" * (MIB + 1)), "system_prompt"),
    (
        "ForkConversation",
        lambda: pb.ForkConversationRequest(conversation_id="c", metadata=text(17 << 10)),
        "metadata",
    ),
    (
        "GetConversation",
        lambda: pb.GetConversationRequest(conversation_id="c" * 5000),
        "conversation_id",
    ),
    (
        "ListConversations",
        lambda: pb.ListConversationsRequest(page_token="7" * 5000),
        "page_token",
    ),
]


@pytest.mark.parametrize(("method", "make", "field"), LARGE)
def test_the_refusal_of_a_large_field_names_the_field(
    rig: DaemonRig, method: str, make: Callable[[], Any], field: str
) -> None:
    with pytest.raises(grpc.RpcError) as error:
        for _ in iter_of(getattr(rig.stub, method)(make())):
            pass
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    (violation,) = details(error.value)["BadRequest"].field_violations
    assert violation.field == field
    assert re.search("[0-9]", violation.description), "the limit is named"


def iter_of(answer: Any) -> Any:
    return answer if hasattr(answer, "__next__") else iter((answer,))


@pytest.mark.parametrize("make", [make for _, make, field in LARGE if field != "tools"])
def test_a_request_that_is_expensive_to_parse_is_refused_before_parsing(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = make()
    with pytest.raises(InvalidArgument):
        sizes.check(type(request), request.SerializeToString())


def test_fields_of_a_nested_request_keep_their_limits() -> None:
    kind = pb.ImportConversationRequest
    tools, hello = [text(100)] * 256, [pb.NewMessage(content="x")] * 127
    inner = CREATE(conversation_id="c", tools=tools, messages=hello)
    sizes.check(kind, kind(conversation=inner, messages=hello).SerializeToString())
    for wrong, field in (
        (kind(conversation=CREATE(tools=[*tools, text(1)])), "conversation.tools"),
        (kind(conversation=CREATE(messages=[*hello, *hello])), "conversation.messages"),
        (kind(messages=[*hello, *hello]), "messages"),
        (
            kind(messages=[pb.NewMessage(tool_calls=[pb.ToolCall()] * 65)]),
            "messages[0].tool_calls",
        ),
    ):
        with pytest.raises(InvalidArgument) as refused:
            sizes.check(kind, wrong.SerializeToString())
        assert refused.value.field == field


def test_unknown_fields_count_towards_the_limits() -> None:
    with pytest.raises(InvalidArgument, match="fields"):
        sizes.check(SEND, b"\xf8\x3f\x01" * 600)
    with pytest.raises(InvalidArgument, match="65,536"):
        sizes.check(pb.GetConversationRequest, b"\xfa\x3f\x80\x80\x08" + b"x" * (128 << 10))
    sizes.check(pb.GetConversationRequest, b"\x0a\x01c\xfa\x3f\x02hi")


@pytest.mark.parametrize("repeated", [b"\x08\x01", b"\x12\x00", b"\x78\x01"])
def test_a_message_of_a_million_fields_is_refused_before_it_is_parsed(repeated: bytes) -> None:
    """Parsing such a request would block all streams for 13 ms."""
    inner = pb.NewMessage(content="x" * 2_999_995)
    raw = bytearray(SEND(messages=[*HELLO, inner]).SerializeToString())
    raw[-inner.ByteSize() :] = repeated * 1_500_000
    assert len(SEND.FromString(bytes(raw)).messages) == 2
    with pytest.raises(InvalidArgument, match=r"messages\[1\]: has more than 72 fields"):
        sizes.check(SEND, bytes(raw))


def test_malformed_bytes_pass_the_size_check() -> None:
    for raw in (
        b"\xff" * 40,
        b"\x0a\xff\xff\xff\xff\x0f",
        b"\x0f",
        b"\x0a",
        b"\x09\x01",
        b"\x80" * 99,
    ):
        sizes.check(SEND, raw)


def largest(conversation_id: str) -> pb.CreateConversationRequest:
    request = CREATE(
        conversation_id=conversation_id,
        system_prompt="a ü " * (100 << 10),
        tools=[text((64 << 10) - 200) for _ in range(4)],
        metadata=text((16 << 10) - 100),
    )
    sizes.check(CREATE, request.SerializeToString())
    return request


def test_large_conversations_fit_the_default_message_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DaemonRig(tmp_path / "data") as rig:
        # The built-in model's context is too short. Stored messages do not depend on the context.
        history = rig.daemon.conversations._history
        monkeypatch.setattr(history, "check_settings", lambda settings: None)
        num_large = 12
        for number in range(num_large):
            request = largest(f"c{number}")
            created = rig.stub.CreateConversation(request).conversation
            assert created.tools == request.tools
            assert created.metadata == request.metadata
            assert not created.fields_left_out
        got = rig.stub.GetConversation(pb.GetConversationRequest(conversation_id="c3")).conversation
        assert got.tools == created.tools
        listed, token, num_pages = [], "", 0
        while token or not num_pages:
            page = rig.stub.ListConversations(pb.ListConversationsRequest(page_token=token))
            assert page.ByteSize() <= PAGE_BYTES_MAX + 4096
            listed += [each.conversation_id for each in page.conversations]
            token, num_pages = page.next_page_token, num_pages + 1
        assert listed == [f"c{number}" for number in reversed(range(num_large))]
        assert 1 < num_pages < num_large
        messages = rig.stub.ListMessages(pb.ListMessagesRequest(conversation_id="c3")).messages
        assert messages[0].content == largest("").system_prompt


def test_pages_of_messages_are_limited_by_bytes_and_omit_no_message(tmp_path: Path) -> None:
    config = DaemonConfig(grace_seconds=0.2)
    with DaemonRig(tmp_path / "data", config=config) as rig:
        for number in range(6):
            messages = [pb.NewMessage(content=f"{number}")] * 60
            request = SEND(
                conversation_id="c",
                messages=messages,
                create_if_missing=True,
                sampling=pb.Sampling(max_tokens=2, ignore_eos=True),
                metadata=text(15 << 10),
            )
            for _ in rig.stub.SendMessage(request):
                pass
        found, token, num_pages = [], "", 0
        while token or not num_pages:
            page = rig.stub.ListMessages(
                pb.ListMessagesRequest(conversation_id="c", page_size=1000, page_token=token)
            )
            assert page.ByteSize() <= DEFAULT_BYTES_MAX
            found += [each.index for each in page.messages]
            token, num_pages = page.next_page_token, num_pages + 1
        assert found == list(range(6 * 61))
        assert num_pages > 2

        async def read() -> Any:
            page = rig.daemon.reader.message_page
            return await rig.daemon.threads.in_read_thread("", page, "c", 0, 1000)

        one = rig.call(read())
        assert 1 < len(one.messages) < 200, "no more is read than is wanted"
        assert one.has_more


def test_a_page_of_conversations_is_limited_by_its_protobuf_size(tmp_path: Path) -> None:
    """Numbers take five times as many bytes in a protobuf message as in the stored JSON."""
    with DaemonRig(tmp_path / "data") as rig:
        metadata = struct_pb2.Struct()
        metadata.update({"a": [1] * 1480})
        num_conversations = 160
        made = [
            rig.stub.CreateConversation.future(CREATE(conversation_id=f"c{n}", metadata=metadata))
            for n in range(num_conversations)
        ]
        for each in made:
            each.result()
        for page_size in (7, 1000):
            listed, token, num_pages = [], "", 0
            while token or not num_pages:
                page = rig.stub.ListConversations(
                    pb.ListConversationsRequest(page_size=page_size, page_token=token)
                )
                assert page.ByteSize() <= PAGE_BYTES_MAX + 4096
                listed += [each.conversation_id for each in page.conversations]
                token, num_pages = page.next_page_token, num_pages + 1
            assert sorted(listed) == sorted(f"c{n}" for n in range(num_conversations))
            assert num_pages == (23 if page_size == 7 else 2)


def test_building_a_page_does_not_block_the_event_loop(tmp_path: Path) -> None:
    with DaemonRig(tmp_path / "data") as rig:
        metadata = struct_pb2.Struct()
        metadata.update({"a": [{"b": 1.5}] * 500})
        for number in range(60):
            rig.stub.CreateConversation(CREATE(conversation_id=f"c{number}", metadata=metadata))
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                beats += 1
                await asyncio.sleep(0)

        task = asyncio.run_coroutine_threadsafe(beat(), rig._loop)
        page = rig.stub.ListConversations(pb.ListConversationsRequest())
        task.cancel()
        assert len(page.conversations) == 60
        assert beats > 60


def test_oversized_fields_stored_by_an_older_version_are_left_out_of_lists(tmp_path: Path) -> None:
    with DaemonRig(tmp_path / "data") as rig:
        for number in range(3):
            settings = ConversationSettings(
                f"old{number}",
                tools=[{"name": "x" * (3 * MIB)}],
                template_options={"enable_thinking": True},
                metadata={"a": [{}] * 30_000},
            )
            rig.call(store_without_checks(rig, settings))
        page = rig.stub.ListConversations(pb.ListConversationsRequest())
        assert len(page.conversations) == 1
        assert page.next_page_token
        (old,) = page.conversations
        assert sorted(old.fields_left_out) == ["metadata", "tools"]
        assert json_format.MessageToDict(old.template_options) == {"enable_thinking": True}
        request = pb.GetConversationRequest(conversation_id="old0")
        assert rig.stub.GetConversation(request).conversation.num_messages == 0


async def store_without_checks(rig: DaemonRig, settings: ConversationSettings) -> None:
    new = NewConversation(
        settings.conversation_id,
        "fingerprint",
        tools=list(settings.tools),
        template_options=dict(settings.template_options),
        metadata=dict(settings.metadata),
    )
    await rig.daemon.threads.in_store("", rig.daemon.store.create_conversation, new)


VALUES: dict[str, Any] = {
    "a": [1, 1.5, True, False, None, "ü", [], {}, {"b": [{"c": -0.25}]}],
    "": "",
    "x": {},
}


def test_json_survives_the_conversion_to_protobuf_and_back() -> None:
    made = json_values.one_struct(VALUES)
    plain = struct_pb2.Struct()
    json_format.ParseDict(VALUES, plain)
    assert made == plain
    again = json_values.one_object("metadata", made)
    assert again == VALUES
    assert [type(each) for each in again["a"][:3]] == [int, float, bool]


def test_values_that_are_not_json_are_refused_with_the_field_name() -> None:
    for value in (
        struct_pb2.Value(),
        struct_pb2.Value(number_value=float("nan")),
        struct_pb2.Value(number_value=float("inf")),
    ):
        with pytest.raises(InvalidArgument, match="metadata"):
            json_values.one_object("metadata", struct_pb2.Struct(fields={"a": value}))


def test_the_limits_are_documented() -> None:
    written = PAGE.read_text(encoding="utf-8")
    for size in (
        sizes.TEXT_BYTES_MAX,
        sizes.SYSTEM_PROMPT_BYTES_MAX,
        sizes.TOOLS_BYTES_MAX,
        sizes.METADATA_BYTES_MAX,
        sizes.SAMPLING_BYTES_MAX,
        sizes.REQUEST_BYTES_MAX,
    ):
        words = f"{size // MIB} MiB" if size >= MIB else f"{size >> 10} KiB"
        assert words in written, words
    for number in (sizes.TOOLS_MAX, sizes.MESSAGES_MAX, json_values.VALUES_MAX):
        assert f"{number:,}" in written, number


def test_a_reply_that_is_read_late_is_split_into_small_messages() -> None:
    """With twenty alternatives for each of 16,000 tokens, the reply has six megabytes."""
    count = 16_000
    top = tuple(Logprob(100_000 + rank, -0.1 * rank) for rank in range(20))
    live = LiveTurn(
        1,
        "c",
        0,
        1,
        ReplyTokens(
            list(range(count)),
            [f"{number} " for number in range(count)],
            parts=[Part.TEXT] * count,
            logprobs=[(-0.5, top)] * count,
        ),
    )
    deltas = list(translate.deltas(live.reply.span(0, count)))
    assert max(each.ByteSize() for each in deltas) < MIB
    assert [token for each in deltas for token in each.token_ids] == live.reply.token_ids
    assert "".join(each.text for each in deltas) == "".join(live.reply.texts)
    assert sum(len(each.logprobs) for each in deltas) == count
