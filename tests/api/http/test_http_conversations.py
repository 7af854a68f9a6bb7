"""Conversations over HTTP with OpenAI's own client. gRPC clients see them, too."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.api.http.rig_http import MODEL, HttpRig, http_rig

SHORT: dict[str, Any] = {"model": MODEL, "max_output_tokens": 8}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpRig]:
    with http_rig(Path(tmp_path_factory.mktemp("http")) / "data", model=True) as found:
        yield found


@pytest.fixture
def client(server: HttpRig) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def user(text: str) -> Any:
    return {"type": "message", "role": "user", "content": text}


def texts(client: openai.OpenAI, conversation_id: str, **query: Any) -> list[str]:
    query = {"order": "asc", **query}
    items: Any = client.conversations.items.list(conversation_id, **query)
    return [each.content[0].text for each in items]


def test_a_conversation_is_created_updated_and_deleted(client: openai.OpenAI) -> None:
    made = client.conversations.create(metadata={"topic": "tea"})
    assert made.id.startswith("conv_")
    assert made.object == "conversation"
    assert client.conversations.retrieve(made.id) == made
    changed = client.conversations.update(made.id, metadata={"topic": "milk"})
    assert changed.metadata == {"topic": "milk"}
    assert client.conversations.retrieve(made.id) == changed
    deleted = client.conversations.delete(made.id)
    assert (deleted.id, deleted.deleted) == (made.id, True)
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(made.id)


def test_responses_and_grpc_continue_the_same_conversation(
    server: HttpRig, client: openai.OpenAI
) -> None:
    made = client.conversations.create()
    first = client.responses.create(conversation=made.id, input="My name is Ann.", **SHORT)
    assert first.conversation is not None
    assert first.conversation.id == made.id
    said = server.rig.ask(made.id, "What is my name?", create_if_missing=False)
    after = client.responses.create(conversation=made.id, input="Thanks.", **SHORT)
    stored = [each.content for each in server.rig.messages(made.id)]
    assert stored == [
        "My name is Ann.",
        first.output_text,
        "What is my name?",
        said.text,
        "Thanks.",
        after.output_text,
    ]
    assert texts(client, made.id) == stored


def test_response_items_have_the_same_ids_in_the_conversation(client: openai.OpenAI) -> None:
    made = client.conversations.create()
    response = client.responses.create(conversation=made.id, input="Hello.", **SHORT)
    (question, reply) = client.conversations.items.list(made.id, order="asc")
    assert reply.id == response.output[0].id
    one = client.conversations.items.retrieve(question.id or "", conversation_id=made.id)
    assert one == question
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.retrieve("msg_1", conversation_id=made.id)


def test_items_are_listed_page_by_page_in_both_orders(client: openai.OpenAI) -> None:
    names = [f"item {number}" for number in range(20)]
    made = client.conversations.create(items=[user(each) for each in names])
    client.responses.create(conversation=made.id, input="item 20", **SHORT)
    client.conversations.items.create(made.id, items=[user("item 22")])
    forward = texts(client, made.id, limit=3)
    assert forward[:21] == [*names, "item 20"]
    assert forward[22:] == ["item 22"]
    assert texts(client, made.id, order="desc", limit=5) == forward[::-1]
    page = client.conversations.items.list(made.id, limit=2, order="asc")
    assert page.has_more
    with pytest.raises(openai.BadRequestError, match="limit"):
        client.conversations.items.list(made.id, limit=101)
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.list(made.id, after="msg_0123456789abcdef-0-0")


def test_added_items_are_stored_with_the_next_turn_and_keep_their_ids(
    server: HttpRig, client: openai.OpenAI
) -> None:
    made = client.conversations.create()
    added = client.conversations.items.create(made.id, items=[user("One."), user("Two.")])
    assert server.rig.messages(made.id) == []
    assert [each.id for each in added.data] == [
        each.id for each in client.conversations.items.list(made.id, order="asc")
    ]
    response = client.responses.create(conversation=made.id, input="Three.", **SHORT)
    stored = [each.content for each in server.rig.messages(made.id)]
    assert stored == ["One.", "Two.", "Three.", response.output_text]
    ids = [each.id for each in client.conversations.items.list(made.id, order="asc")]
    assert ids[:2] == [each.id for each in added.data]
    again = client.responses.create(conversation=made.id, input="Four.", **SHORT)
    assert [each.content for each in server.rig.messages(made.id)][4:] == [
        "Four.",
        again.output_text,
    ]


def test_all_pending_items_of_a_conversation_share_one_limit(
    server: HttpRig, client: openai.OpenAI
) -> None:
    long = user("a" * (server.rig.daemon.context_max * 10))
    made = client.conversations.create(items=[long])
    with pytest.raises(openai.BadRequestError, match="cannot fit a context"):
        client.conversations.items.create(made.id, items=[long])
    assert len(texts(client, made.id)) == 1
    many = client.conversations.create()
    path, body = f"/v1/conversations/{many.id}/items", {"items": [user("?")] * 20}
    with ThreadPoolExecutor(7) as pool:
        asked = [pool.submit(server.ask, "POST", path, body) for _ in range(7)]
    assert sorted(each.result().status for each in asked) == [200] * 5 + [400] * 2
    assert len(texts(client, many.id)) == 100


def test_an_unstored_response_sees_the_conversation_and_pending_items(
    server: HttpRig, client: openai.OpenAI
) -> None:
    made = client.conversations.create(items=[user("My name is Ann.")])
    fields: Any = {"conversation": made.id, "input": "What is my name?", **SHORT}
    begins: Any
    for begins in ({"instructions": "Be brief."}, {}):
        unstored = client.responses.create(store=False, **fields, **begins)
        assert "My name is Ann." in texts(client, made.id)  # this item has stayed
        stored = client.responses.create(**fields, **begins)
        assert unstored.usage is not None
        assert stored.usage is not None
        assert unstored.usage.input_tokens == stored.usage.input_tokens
        client.conversations.items.create(made.id, items=[user("And Bob's.")])
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(store=False, instructions="Be long.", **fields)
    assert refused.value.param == "instructions"


def test_a_deleted_pending_item_is_erased_from_the_disk(
    server: HttpRig, client: openai.OpenAI
) -> None:
    made = client.conversations.create(items=[user("One."), user("SECRET-item")])
    last = client.conversations.items.list(made.id).data[0]
    client.conversations.items.delete(last.id or "", conversation_id=made.id)
    folder = server.rig.daemon.store.folder.path
    raw = b"".join(each.read_bytes() for each in folder.glob("conversations.db*"))
    assert b"SECRET-item" not in raw


def test_only_the_last_item_can_be_deleted(server: HttpRig, client: openai.OpenAI) -> None:
    made = client.conversations.create()
    client.responses.create(conversation=made.id, input="One.", **SHORT)
    client.conversations.items.create(made.id, items=[user("Two.")])
    question, reply, pending = client.conversations.items.list(made.id, order="asc")
    for each in (question, reply):
        with pytest.raises(openai.BadRequestError, match="only the last item"):
            client.conversations.items.delete(each.id or "", conversation_id=made.id)
    client.conversations.items.delete(pending.id or "", conversation_id=made.id)
    client.conversations.items.delete(reply.id or "", conversation_id=made.id)
    assert server.rig.messages(made.id) == []
    assert [each.id for each in client.conversations.items.list(made.id)] == [question.id]
    client.conversations.items.delete(question.id or "", conversation_id=made.id)
    assert texts(client, made.id) == []


def test_a_conversation_keeps_its_first_instructions(
    server: HttpRig, client: openai.OpenAI
) -> None:
    made = client.conversations.create()
    given: Any
    for given in ({"instructions": "Be brief."}, {"instructions": "Be brief."}, {}):
        client.responses.create(conversation=made.id, input="Hi.", **SHORT, **given)
    assert [each.content for each in server.rig.messages(made.id)].count("Be brief.") == 1
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(conversation=made.id, input="Hi.", instructions="Be long.", **SHORT)
    assert refused.value.param == "instructions"


def test_a_conversation_refuses_a_second_turn_while_one_runs(
    server: HttpRig, client: openai.OpenAI
) -> None:
    made = client.conversations.create()
    running = client.responses.create(
        conversation=made.id,
        input="Count.",
        background=True,
        model=MODEL,
        max_output_tokens=4000,
        extra_body={"ignore_eos": True, "stop_repetition": 0},
    )
    at_once = client.with_options(max_retries=0)  # by default, the client retries a conflict
    with pytest.raises(openai.ConflictError) as refused:
        at_once.responses.create(conversation=made.id, input="Hi.", **SHORT)
    assert refused.value.code == "turn_running"
    with pytest.raises(openai.ConflictError):
        at_once.conversations.items.create(made.id, items=[user("Two.")])
    client.responses.cancel(running.id)
    assert client.responses.create(conversation=made.id, input="Hi.", **SHORT).output_text
    stored = [each.content for each in server.rig.messages(made.id)]
    assert "Count." not in stored


def test_invalid_conversation_bodies_are_refused(server: HttpRig, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="at most 20"):
        client.conversations.create(items=[user("?")] * 21)
    with pytest.raises(openai.BadRequestError, match="cannot fit a context"):
        client.conversations.create(items=[user("a" * 1_000_000)])
    wrong = server.ask("POST", "/v1/conversations", {"metadata": {"a": 1}})
    assert (wrong.status, wrong.error["param"]) == (400, "metadata")
    unknown = server.ask("POST", "/v1/conversations", {"colour": "red"})
    assert (unknown.status, unknown.error["code"]) == (400, "unsupported_parameter")
    image = {"type": "item_reference", "id": "msg_1"}
    refused = server.ask("POST", "/v1/conversations", {"items": [image]})
    assert (refused.status, refused.error["param"]) == (400, "items[0].type")
    assert server.ask("GET", "/v1/conversations/prefix%3Arules").status == 404


def test_invalid_conversation_ids_are_not_found_and_not_echoed(server: HttpRig) -> None:
    long, held = "x" * 5000, "a\0b"
    asked = [
        server.ask("POST", "/v1/responses", {"model": MODEL, "input": "Hi.", "conversation": each})
        for each in (long, held)
    ] + [server.ask("GET", f"/v1/conversations/{each}/items") for each in (long, "a%00b")]
    assert [each.status for each in asked] == [404] * 4
    assert max(len(each.body) for each in asked) < 300


def test_a_long_history_is_recomputed_with_other_instructions(
    server: HttpRig, client: openai.OpenAI
) -> None:
    talk = [user("Hm."), {"role": "assistant", "content": "Yes?"}] * 150
    first = client.responses.create(input=[*talk, user("And?")], instructions="Be brief.", **SHORT)
    answer = client.responses.with_raw_response.create(
        input="Go on.", instructions="Be long.", previous_response_id=first.id, **SHORT
    )
    assert answer.headers["x-pensieve-recompute-reason"] == "instructions"
    name = answer.headers["x-pensieve-conversation-id"]
    assert len(server.rig.messages(name)) == 1 + 300 + 2 + 2


def test_item_ids_stay_the_same_when_instructions_are_added(
    client: openai.OpenAI,
) -> None:
    made = client.conversations.create(items=[user("One."), user("Two.")])
    before = [each.id for each in client.conversations.items.list(made.id, order="asc")]
    unstored = client.responses.create(
        conversation=made.id, input="Three.", instructions="Be brief.", store=False, **SHORT
    )
    assert unstored.output_text
    response = client.responses.create(
        conversation=made.id, input="Three.", instructions="Be brief.", **SHORT
    )
    items = list(client.conversations.items.list(made.id, order="asc"))
    assert [each.id for each in items][1:3] == before
    assert [each.id for each in items][4:] == [each.id for each in response.output]
    assert len({each.id for each in items}) == len(items)
    for each in items:
        assert client.conversations.items.retrieve(each.id or "", conversation_id=made.id) == each
    pages = client.conversations.items.list(made.id, order="asc", limit=1)
    assert [each.id for each in pages] == [each.id for each in items]
    again = client.responses.create(conversation=made.id, input="Four.", **SHORT)
    assert [each.id for each in client.conversations.items.list(made.id, order="asc")][6:] == [
        each.id for each in again.output
    ]
