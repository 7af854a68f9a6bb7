"""Responses with OpenAI's own client: create, stream, continue, fetch, cancel, delete."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from pensieve.api.http.response_history import ResponseHistory
from pensieve.api.http.response_places import NewResponse, ResponsePlaces
from pensieve.api.http.responses import _digest_of
from pensieve.api.openai.request import RequestKind, Served, parse
from pensieve.conversations.binding.chain import ChainEnd
from pensieve.guard.callers import Token
from pensieve.sampling import Sampling
from pensieve.v1 import conversation_pb2 as pb
from tests.api.http.rig_http import MODEL, Answer, HttpRig, http_rig
from tests.conversations.rig_daemon import wait_for

ROLES = {1: "system", 2: "user", 3: "assistant", 4: "tool"}  # values of the proto
SHORT: dict[str, Any] = {"model": MODEL, "max_output_tokens": 8}
LONG: dict[str, Any] = {
    "model": MODEL,
    "max_output_tokens": 4000,
    "extra_body": {"ignore_eos": True},
}


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpRig]:
    with http_rig(Path(tmp_path_factory.mktemp("http")) / "data", model=True) as found:
        yield found


@pytest.fixture
def client(door: HttpRig) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{door.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def respond(door: HttpRig, text: Any, /, *, key: str = "", **fields: Any) -> Answer:
    headers = {"idempotency-key": key} if key else {}
    body = {"model": MODEL, "input": text, "max_output_tokens": 8, **fields}
    return door.ask("POST", "/v1/responses", body, headers)


def contents(door: HttpRig, answer: Answer) -> list[tuple[str, str]]:
    messages = door.rig.messages(answer.headers["x-pensieve-conversation-id"])
    return [(ROLES[each.role], each.content) for each in messages]


def test_a_response_is_made_and_fetched_again(door: HttpRig, client: openai.OpenAI) -> None:
    made = client.responses.create(input="How are you?", **SHORT)
    assert made.id.startswith("resp_")
    assert made.status in ("completed", "incomplete")
    assert made.usage is not None
    assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens
    assert made.output_text
    assert client.responses.retrieve(made.id) == made
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_nobody")


def test_a_stream_tells_its_events_in_order_and_adds_up_to_the_response(
    client: openai.OpenAI,
) -> None:
    text, kinds, numbers = "", [], []
    with client.responses.stream(model=MODEL, input="One, two, three") as stream:
        for event in stream:
            kinds.append(event.type)
            numbers.append(event.sequence_number)
            if event.type == "response.output_text.delta":
                text += event.delta
        final = stream.get_final_response()
    assert numbers == list(range(len(numbers)))
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert text == final.output_text
    fetched = client.responses.retrieve(final.id)
    items: list[Any] = [*fetched.output]
    same: list[Any] = [*final.output]
    assert [each.id for each in items] == [each.id for each in same]
    assert fetched.output_text == final.output_text
    assert fetched.usage == final.usage


def test_what_follows_the_last_response_is_appended_and_its_history_not_computed_again(
    door: HttpRig,
) -> None:
    first = respond(door, "My name is Ann.")
    second = respond(door, "What is my name?", previous_response_id=first.value["id"])
    assert (first.headers["x-pensieve-bound"], second.headers["x-pensieve-bound"]) == (
        "new",
        "appended",
    )
    assert [role for role, _ in contents(door, second)] == ["user", "assistant"] * 2
    usage = second.value["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] > 0
    assert second.headers["x-pensieve-recomputed-tokens"] == "0"
    assert second.value["previous_response_id"] == first.value["id"]


def test_what_follows_an_earlier_response_is_a_fork(door: HttpRig) -> None:
    first = respond(door, "My name is Ann.")
    second = respond(door, "What is my name?", previous_response_id=first.value["id"])
    other = respond(door, "Say it backwards.", previous_response_id=first.value["id"])
    assert other.headers["x-pensieve-bound"] == "forked"
    assert contents(door, other)[:2] == contents(door, first)[:2]
    assert contents(door, other)[2] == ("user", "Say it backwards.")
    assert contents(door, second)[2] == ("user", "What is my name?")


def test_nobody_appends_to_a_fork_whose_response_is_about_to_begin(
    door: HttpRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a chat with the same history would find the fork idle, and append to it."""
    first = respond(door, "My cat is Tom.")
    respond(door, "Who is Tom?", previous_response_id=first.value["id"])
    said = [content for _, content in contents(door, first)[:2]]
    begin = door.rig.daemon.begin
    chats: list[Answer] = []
    is_first = True

    async def begin_late(ask: Any, seconds_left: float | None = None) -> Any:
        nonlocal is_first
        if is_first:
            is_first = False
            chats.append(await asyncio.to_thread(door.chat, *said, "A dog?"))
        return await begin(ask, seconds_left)

    monkeypatch.setattr(door.rig.daemon, "begin", begin_late)
    other = respond(door, "A cat?", previous_response_id=first.value["id"])
    (chat,) = chats
    assert (other.status, chat.status) == (200, 200)
    assert chat.headers["x-pensieve-bound"] == other.headers["x-pensieve-bound"] == "forked"
    assert contents(door, other)[2] == ("user", "A cat?")
    assert contents(door, chat)[2] == ("user", "A dog?")


def test_an_unknown_response_cannot_be_gone_on_from(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(input="?", previous_response_id="resp_0", **SHORT)
    assert missing.value.code == "previous_response_not_found"
    assert missing.value.param == "previous_response_id"


def test_the_same_instructions_are_kept_and_others_are_computed_anew(door: HttpRig) -> None:
    first = respond(door, "Hi.", instructions="Be brief.")
    same = respond(door, "More.", instructions="Be brief.", previous_response_id=first.value["id"])
    assert same.headers["x-pensieve-bound"] == "appended"
    other = respond(door, "More.", instructions="Be long.", previous_response_id=same.value["id"])
    assert other.headers["x-pensieve-recompute-reason"] == "instructions"
    assert contents(door, other)[0] == ("system", "Be long.")
    assert contents(door, other)[1][1] == "Hi."
    assert len(contents(door, other)) == 7
    none = respond(door, "More.", previous_response_id=same.value["id"])
    assert none.headers["x-pensieve-recompute-reason"] == "instructions"
    assert [role for role, _ in contents(door, none)] == ["user", "assistant"] * 3


def test_the_output_of_a_function_needs_its_call(door: HttpRig) -> None:
    output = [{"type": "function_call_output", "call_id": "call_1", "output": "4"}]
    refused = respond(door, output)
    assert (refused.status, refused.error["param"]) == (400, "input")
    call = {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": "{}"}
    said = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "I add."}]
    whole = respond(door, [*said, call, *output])
    assert [role for role, _ in contents(door, whole)] == ["user", "assistant", "tool", "assistant"]


def test_a_response_in_the_background_is_fetched_when_it_is_done(
    door: HttpRig, client: openai.OpenAI
) -> None:
    made = client.responses.create(input="How are you?", background=True, **SHORT)
    assert made.status in ("queued", "in_progress")
    wait_for(lambda: client.responses.retrieve(made.id).status in ("completed", "incomplete"))
    done = client.responses.retrieve(made.id)
    assert done.background
    assert done.output_text
    after = respond(door, "And you?", previous_response_id=made.id)
    assert after.headers["x-pensieve-bound"] == "appended"


def test_a_response_in_the_background_is_cancelled(door: HttpRig, client: openai.OpenAI) -> None:
    made = client.responses.create(input="Count.", background=True, **LONG)
    cancelled = client.responses.cancel(made.id)
    assert cancelled.status == "cancelled"
    assert client.responses.cancel(made.id).status == "cancelled"
    assert client.responses.retrieve(made.id).status == "cancelled"
    assert door.rig.num_live == 0
    with pytest.raises(openai.BadRequestError, match="was cancelled"):
        client.responses.create(input="?", previous_response_id=made.id, **SHORT)
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    foreground = client.responses.create(input="Hi.", **SHORT)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(foreground.id)


def test_a_response_in_the_background_of_a_server_that_stopped_has_failed(tmp_path: Path) -> None:
    data = tmp_path / "data"
    body = {"model": MODEL, "input": "Count.", "background": True, "ignore_eos": True}
    with http_rig(data, model=True) as door:
        made = door.ask("POST", "/v1/responses", body).value
        path = f"/v1/responses/{made['id']}"
        door.rig.call(_stop_keeping(door))
        assert door.ask("GET", path).value["status"] in ("queued", "in_progress")
    with http_rig(data, model=True) as door:
        failed = door.ask("GET", path).value
        assert failed["status"] == "failed"
        assert failed["error"]["code"] == "server_error"
        assert door.ask("DELETE", path).status == 200
        assert door.ask("GET", path).status == 404


def test_a_response_is_on_the_disk_with_its_turn(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with http_rig(data, model=True) as door:
        door.rig.call(_stop_keeping(door))  # after the reply's own transaction
        first = respond(door, "One.")
    with http_rig(data, model=True) as door:
        path = f"/v1/responses/{first.value['id']}"
        assert door.ask("GET", path).value == first.value
        second = respond(door, "Two.", previous_response_id=first.value["id"])
        assert second.headers["x-pensieve-bound"] == "appended"


async def _stop_keeping(door: HttpRig) -> None:
    """Simulate a crash: nothing is written from now on."""
    door.rig.daemon.store.responses.save = lambda response: None  # type: ignore[method-assign]


def test_deleting_the_last_response_deletes_the_conversation_that_was_made_for_it(
    door: HttpRig, client: openai.OpenAI
) -> None:
    first = respond(door, "SECRET-one")
    second = respond(door, "SECRET-two", previous_response_id=first.value["id"])
    conversation = first.headers["x-pensieve-conversation-id"]
    client.responses.delete(second.value["id"])
    assert door.ask("GET", f"/v1/conversations/{conversation}").status == 200
    client.responses.delete(first.value["id"])
    assert door.ask("GET", f"/v1/conversations/{conversation}").status == 404
    assert b"SECRET" not in raw(door)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(first.value["id"])


def test_deleting_a_response_leaves_a_turn_that_follows_it(
    door: HttpRig, client: openai.OpenAI
) -> None:
    first = respond(door, "One.")
    after = client.responses.create(
        input="Count.", stream=True, previous_response_id=first.value["id"], **LONG
    )
    next(iter(after))
    client.responses.delete(first.value["id"])
    assert door.rig.num_live == 1
    after.close()
    wait_for(lambda: door.rig.num_live == 0)


def test_deleting_a_response_leaves_a_conversation_that_was_gone_on_with_meanwhile(
    door: HttpRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = respond(door, "One.")
    responses = door.rig.daemon.store.responses

    for name in ("unneeded_without", "delete"):
        function = getattr(responses, name)

        def before_another_turn(*named: Any, act: Any = function, **more: Any) -> Any:
            removed = act(*named, **more)
            return removed._replace(revision=removed.revision - 1)  # as if a turn had followed

        monkeypatch.setattr(responses, name, before_another_turn)
    assert door.ask("DELETE", f"/v1/responses/{first.value['id']}").status == 200
    assert len(contents(door, first)) == 2


def test_only_a_conversation_that_nobody_has_used_is_discarded(door: HttpRig) -> None:
    first = respond(door, "One.")
    conversation = first.headers["x-pensieve-conversation-id"]
    unneeded: Any = None
    places = ResponsePlaces(door.rig.daemon, unneeded, unneeded)
    door.rig.call(places.discard(conversation, 0, ""))
    assert len(contents(door, first)) == 2
    door.rig.call(places.discard(conversation, 1, ""))
    assert door.ask("GET", f"/v1/conversations/{conversation}").status == 404


@pytest.mark.parametrize("more", [{}, {"instructions": "Be brief."}, {"store": False}])
def test_what_was_taken_back_cannot_be_gone_on_from(
    door: HttpRig, client: openai.OpenAI, more: dict[str, Any]
) -> None:
    first = respond(door, "One.")
    second = respond(door, "Two.", previous_response_id=first.value["id"])
    conversation = first.headers["x-pensieve-conversation-id"]
    reply = second.value["output"][-1]["id"]
    client.conversations.items.delete(reply, conversation_id=conversation)
    refused = respond(door, "Three.", previous_response_id=second.value["id"], **more)
    assert (refused.status, refused.error["code"]) == (404, "previous_response_not_found")
    assert "no longer exists" in refused.error["message"]
    after = respond(door, "Three.", previous_response_id=first.value["id"], **more)
    assert after.status == 200


def test_a_deletion_is_in_the_audit_log_with_the_conversation_that_went(tmp_path: Path) -> None:
    audit_log = tmp_path / "audit.log"
    with http_rig(tmp_path / "data", model=True, http={"audit_log": audit_log}) as door:
        first = respond(door, "One.")
        second = respond(door, "Two.", previous_response_id=first.value["id"])
        for each in (second, first):
            assert door.ask("DELETE", f"/v1/responses/{each.value['id']}").status == 200
    lines = [json.loads(each) for each in audit_log.read_text().splitlines()]
    gone = [each.get("conversation_id", "") for each in lines if each["event"] == "delete"]
    assert gone == ["", first.headers["x-pensieve-conversation-id"]]


def raw(door: HttpRig) -> bytes:
    folder = door.rig.daemon.store.folder.path
    return b"".join(each.read_bytes() for each in folder.glob("conversations.db*"))


def test_a_key_that_comes_again_gets_the_same_response(door: HttpRig) -> None:
    first = respond(door, "How are you?", key="k1")
    again = respond(door, "How are you?", key="k1")
    assert again.value == first.value
    streamed = respond(door, "How are you?", key="k1", stream=True).events
    assert streamed[-1]["response"] == first.value
    assert [each["sequence_number"] for each in streamed] == list(range(len(streamed)))
    deltas = [each["delta"] for each in streamed if each["type"].endswith("text.delta")]
    assert "".join(deltas) == first.value["output"][0]["content"][0]["text"]
    other = respond(door, "Who are you?", key="k1")
    assert (other.status, other.error["param"]) == (400, "idempotency-key")
    assert len(contents(door, first)) == 2


def test_a_key_that_was_stored_by_an_older_server_is_still_known() -> None:
    """Older servers have stored these digests of requests."""
    tool = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
    full = {
        "model": "tiny",
        "input": [{"role": "user", "content": "hi"}],
        "instructions": "Be brief.",
        "temperature": 0.5,
        "max_output_tokens": 9,
        "background": True,
        "tools": [tool],
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_object"}},
        "conversation": "c1",
    }
    plain = {"model": "tiny", "input": "hi"}
    for body, expected in (
        (full, "66112c8c398e98342fae074a"),
        (plain, "e478025a7915213af4b3897e"),
        ({**plain, "instructions": ""}, "e478025a7915213af4b3897e"),
    ):
        request = parse(RequestKind.RESPONSE, body, Served(Sampling()))
        assert _digest_of(NewResponse.of(request, ChainEnd())) == expected


def test_a_key_belongs_to_the_form_of_the_reply_too(door: HttpRig) -> None:
    assert respond(door, "How are you?", key="k3").status == 200
    form = {"format": {"type": "json_object"}}
    other = respond(door, "How are you?", key="k3", text=form)
    assert (other.status, other.error["param"]) == (400, "idempotency-key")


def test_a_retry_gets_a_response_that_runs_in_the_form_that_it_asks_for(door: HttpRig) -> None:
    fields: dict[str, Any] = {
        "key": "k4",
        "background": True,
        "max_output_tokens": 600,
        "ignore_eos": True,
    }
    made = respond(door, "Count.", **fields)
    assert made.value["status"] in ("queued", "in_progress")
    streamed = respond(door, "Count.", stream=True, **fields)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.events[-1]["response"]["id"] == made.value["id"]


def test_two_requests_with_a_key_that_look_at_once_are_one_turn(
    door: HttpRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    find, looked = ResponseHistory.response, []

    async def slowly(self: ResponseHistory, response_id: str, tenant: str) -> Any:
        looked.append(response_id)
        found = await find(self, response_id, tenant)
        await asyncio.sleep(0.3)  # so that the other request comes meanwhile
        return found

    monkeypatch.setattr(ResponseHistory, "response", slowly)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(respond, door, "Say it once.", key="k5") for _ in range(2)]
    first, second = (each.result() for each in both)
    assert looked
    assert (first.status, second.value) == (200, first.value)
    listed = door.rig.stub.ListConversations(pb.ListConversationsRequest(page_size=1000))
    names = [each.conversation_id for each in listed.conversations]
    said = [door.rig.messages(each) for each in names]
    assert sum(each[0].content == "Say it once." for each in said if each) == 1


def test_the_same_request_twice_at_once_is_one_turn(door: HttpRig) -> None:
    fields: dict[str, Any] = {"key": "k2", "max_output_tokens": 200, "ignore_eos": True}
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(respond, door, "Count.", **fields) for _ in range(2)]
    first, second = (each.result() for each in both)
    assert first.status == 200
    assert second.value == first.value
    assert len(contents(door, first)) == 2


def test_a_conversation_made_for_a_turn_that_cannot_begin_is_deleted(door: HttpRig) -> None:
    before = len(door.rig.stub.ListConversations(pb.ListConversationsRequest()).conversations)
    assert respond(door, "a b c " * 20_000).status == 400
    after = door.rig.stub.ListConversations(pb.ListConversationsRequest()).conversations
    assert len(after) == before


def test_logprobs_come_with_the_text_and_are_those_of_the_whole(door: HttpRig) -> None:
    fields: dict[str, Any] = {
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "seed": 5,
    }
    whole = respond(door, "Say something.", **fields).value
    events = respond(door, "Say something.", stream=True, **fields).events
    rows = [
        row
        for each in events
        if each["type"] == "response.output_text.delta"
        for row in each["logprobs"]
    ]
    assert rows == whole["output"][0]["content"][0]["logprobs"]
    assert len(rows) > 1
    assert all(len(row["top_logprobs"]) == 2 for row in rows)


def test_a_client_that_leaves_ends_its_turn(door: HttpRig, client: openai.OpenAI) -> None:
    stream = client.responses.create(input="Count.", stream=True, **LONG)
    for event in stream:
        if event.type == "response.output_text.delta":
            break
    stream.close()
    wait_for(lambda: door.rig.num_live == 0)


def test_errors_have_openais_shape(door: HttpRig) -> None:
    long = respond(door, "a b c " * 20_000)
    assert (long.status, long.error["code"]) == (400, "context_length_exceeded")
    assert long.error["param"] == "input"
    assert respond(door, "?", conversation="conv_nobody").status == 404
    refused = respond(door, "?", store=False, background=True)
    assert (refused.status, refused.error["param"]) == (400, "background")
    made = respond(door, "Hi.").value["id"]
    streamed = door.ask("GET", f"/v1/responses/{made}?stream=true")
    assert (streamed.status, streamed.error["param"]) == (400, "stream")


def test_a_response_that_is_not_stored_leaves_nothing(door: HttpRig, client: openai.OpenAI) -> None:
    whole = respond(door, "SECRET-plan", store=False, seed=3)
    assert whole.status == 200
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(whole.value["id"])
    streamed = respond(door, "SECRET-plan", store=False, seed=3, stream=True).events
    assert streamed[-1]["type"] in ("response.completed", "response.incomplete")
    texts = [
        each["output"][0]["content"][0]["text"] for each in (whole.value, streamed[-1]["response"])
    ]
    assert texts[0] == texts[1]
    assert b"SECRET-plan" not in raw(door)


def test_a_response_that_is_not_stored_goes_on_from_one_that_is(door: HttpRig) -> None:
    first = respond(door, "My name is Ann.", instructions="Be brief.")
    fields: dict[str, Any] = {
        "instructions": "Be brief.",
        "previous_response_id": first.value["id"],
        "seed": 3,
    }
    unstored = respond(door, "What is my name?", store=False, **fields)
    stored = respond(door, "What is my name?", **fields)
    assert unstored.value["usage"]["input_tokens"] == stored.value["usage"]["input_tokens"]
    assert len(contents(door, first)) == len(contents(door, stored))


def test_a_tenant_goes_on_from_its_own_responses_and_sees_no_others(tmp_path: Path) -> None:
    names = ("ada", "bob")
    tokens = [Token(hashlib.sha256(name.encode()).digest(), name) for name in names]
    ada, bob = ({"authorization": f"Bearer {name}"} for name in names)
    with http_rig(tmp_path / "data", http={"tokens": tokens}) as door:

        def places(previous: str | None, headers: Mapping[str, str]) -> Answer:
            body = {"model": MODEL, "input": "Hi.", "max_output_tokens": 4}
            more = {"previous_response_id": previous} if previous else {}
            return door.ask("POST", "/v1/responses", body | more, headers)

        first = places(None, ada)
        name = first.value["id"]
        bound = [first, places(name, ada), places(name, ada)]
        assert [each.headers["x-pensieve-bound"] for each in bound] == ["new", "appended", "forked"]
        assert door.ask("GET", f"/v1/responses/{name}", headers=ada).status == 200
        assert door.ask("GET", f"/v1/responses/{name}", headers=bob).status == 404
        assert places(name, bob).status == 404
