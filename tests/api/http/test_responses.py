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
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpRig]:
    with http_rig(Path(tmp_path_factory.mktemp("http")) / "data", model=True) as found:
        yield found


@pytest.fixture
def client(server: HttpRig) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def respond(server: HttpRig, text: Any, /, *, key: str = "", **fields: Any) -> Answer:
    headers = {"idempotency-key": key} if key else {}
    body = {"model": MODEL, "input": text, "max_output_tokens": 8, **fields}
    return server.ask("POST", "/v1/responses", body, headers)


def contents(server: HttpRig, answer: Answer) -> list[tuple[str, str]]:
    messages = server.rig.messages(answer.headers["x-pensieve-conversation-id"])
    return [(ROLES[each.role], each.content) for each in messages]


def test_a_response_is_created_and_retrieved(server: HttpRig, client: openai.OpenAI) -> None:
    made = client.responses.create(input="How are you?", **SHORT)
    assert made.id.startswith("resp_")
    assert made.status in ("completed", "incomplete")
    assert made.usage is not None
    assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens
    assert made.output_text
    assert client.responses.retrieve(made.id) == made
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_nobody")


def test_stream_events_are_in_order_and_add_up_to_the_response(
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


def test_following_the_last_response_appends_without_recomputing(
    server: HttpRig,
) -> None:
    first = respond(server, "My name is Ann.")
    second = respond(server, "What is my name?", previous_response_id=first.value["id"])
    assert (first.headers["x-pensieve-bound"], second.headers["x-pensieve-bound"]) == (
        "new",
        "appended",
    )
    assert [role for role, _ in contents(server, second)] == ["user", "assistant"] * 2
    usage = second.value["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] > 0
    assert second.headers["x-pensieve-recomputed-tokens"] == "0"
    assert second.value["previous_response_id"] == first.value["id"]


def test_following_an_earlier_response_forks(server: HttpRig) -> None:
    first = respond(server, "My name is Ann.")
    second = respond(server, "What is my name?", previous_response_id=first.value["id"])
    other = respond(server, "Say it backwards.", previous_response_id=first.value["id"])
    assert other.headers["x-pensieve-bound"] == "forked"
    assert contents(server, other)[:2] == contents(server, first)[:2]
    assert contents(server, other)[2] == ("user", "Say it backwards.")
    assert contents(server, second)[2] == ("user", "What is my name?")


def test_no_request_appends_to_a_fork_before_its_first_turn_begins(
    server: HttpRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a chat with the same history would find the fork idle, and append to it."""
    first = respond(server, "My cat is Tom.")
    respond(server, "Who is Tom?", previous_response_id=first.value["id"])
    said = [content for _, content in contents(server, first)[:2]]
    begin = server.rig.daemon.begin
    chats: list[Answer] = []
    is_first = True

    async def begin_late(ask: Any, seconds_left: float | None = None) -> Any:
        nonlocal is_first
        if is_first:
            is_first = False
            chats.append(await asyncio.to_thread(server.chat, *said, "A dog?"))
        return await begin(ask, seconds_left)

    monkeypatch.setattr(server.rig.daemon, "begin", begin_late)
    other = respond(server, "A cat?", previous_response_id=first.value["id"])
    (chat,) = chats
    assert (other.status, chat.status) == (200, 200)
    assert chat.headers["x-pensieve-bound"] == other.headers["x-pensieve-bound"] == "forked"
    assert contents(server, other)[2] == ("user", "A cat?")
    assert contents(server, chat)[2] == ("user", "A dog?")


def test_an_unknown_previous_response_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(input="?", previous_response_id="resp_0", **SHORT)
    assert missing.value.code == "previous_response_not_found"
    assert missing.value.param == "previous_response_id"


def test_changed_instructions_recompute_the_history(server: HttpRig) -> None:
    first = respond(server, "Hi.", instructions="Be brief.")
    same = respond(
        server, "More.", instructions="Be brief.", previous_response_id=first.value["id"]
    )
    assert same.headers["x-pensieve-bound"] == "appended"
    other = respond(server, "More.", instructions="Be long.", previous_response_id=same.value["id"])
    assert other.headers["x-pensieve-recompute-reason"] == "instructions"
    assert contents(server, other)[0] == ("system", "Be long.")
    assert contents(server, other)[1][1] == "Hi."
    assert len(contents(server, other)) == 7
    none = respond(server, "More.", previous_response_id=same.value["id"])
    assert none.headers["x-pensieve-recompute-reason"] == "instructions"
    assert [role for role, _ in contents(server, none)] == ["user", "assistant"] * 3


def test_a_function_output_requires_its_call(server: HttpRig) -> None:
    output = [{"type": "function_call_output", "call_id": "call_1", "output": "4"}]
    refused = respond(server, output)
    assert (refused.status, refused.error["param"]) == (400, "input")
    call = {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": "{}"}
    said = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "I add."}]
    whole = respond(server, [*said, call, *output])
    assert [role for role, _ in contents(server, whole)] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]


def test_a_background_response_is_retrieved_when_done(
    server: HttpRig, client: openai.OpenAI
) -> None:
    made = client.responses.create(input="How are you?", background=True, **SHORT)
    assert made.status in ("queued", "in_progress")
    wait_for(lambda: client.responses.retrieve(made.id).status in ("completed", "incomplete"))
    done = client.responses.retrieve(made.id)
    assert done.background
    assert done.output_text
    after = respond(server, "And you?", previous_response_id=made.id)
    assert after.headers["x-pensieve-bound"] == "appended"


def test_a_background_response_can_be_cancelled(server: HttpRig, client: openai.OpenAI) -> None:
    made = client.responses.create(input="Count.", background=True, **LONG)
    cancelled = client.responses.cancel(made.id)
    assert cancelled.status == "cancelled"
    assert client.responses.cancel(made.id).status == "cancelled"
    assert client.responses.retrieve(made.id).status == "cancelled"
    assert server.rig.num_live == 0
    with pytest.raises(openai.BadRequestError, match="was cancelled"):
        client.responses.create(input="?", previous_response_id=made.id, **SHORT)
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    foreground = client.responses.create(input="Hi.", **SHORT)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(foreground.id)


def test_a_background_response_fails_if_the_daemon_stops(tmp_path: Path) -> None:
    data = tmp_path / "data"
    body = {"model": MODEL, "input": "Count.", "background": True, "ignore_eos": True}
    body["max_output_tokens"] = 4000  # more than the model computes until the daemon has stopped
    with http_rig(data, model=True) as server:
        made = server.ask("POST", "/v1/responses", body).value
        path = f"/v1/responses/{made['id']}"
        server.rig.call(_stop_keeping(server))
        assert server.ask("GET", path).value["status"] in ("queued", "in_progress")
    with http_rig(data, model=True) as server:
        failed = server.ask("GET", path).value
        assert failed["status"] == "failed"
        assert failed["error"]["code"] == "server_error"
        assert server.ask("DELETE", path).status == 200
        assert server.ask("GET", path).status == 404


def test_a_response_is_stored_in_the_transaction_of_its_turn(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with http_rig(data, model=True) as server:
        # From here on, only a turn's own transaction writes a response.
        server.rig.call(_stop_keeping(server))
        first = respond(server, "One.")
    with http_rig(data, model=True) as server:
        path = f"/v1/responses/{first.value['id']}"
        assert server.ask("GET", path).value == first.value
        second = respond(server, "Two.", previous_response_id=first.value["id"])
        assert second.headers["x-pensieve-bound"] == "appended"


async def _stop_keeping(server: HttpRig) -> None:
    """Simulate a crash: from now on, a response is written only in its turn's transaction."""
    server.rig.daemon.store.responses.save = lambda response: None  # type: ignore[method-assign]


def test_deleting_the_last_response_deletes_its_implicit_conversation(
    server: HttpRig, client: openai.OpenAI
) -> None:
    first = respond(server, "SECRET-one")
    second = respond(server, "SECRET-two", previous_response_id=first.value["id"])
    conversation = first.headers["x-pensieve-conversation-id"]
    client.responses.delete(second.value["id"])
    assert server.ask("GET", f"/v1/conversations/{conversation}").status == 200
    client.responses.delete(first.value["id"])
    assert server.ask("GET", f"/v1/conversations/{conversation}").status == 404
    assert b"SECRET" not in raw(server)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(first.value["id"])


def test_deleting_a_response_keeps_a_running_later_turn(
    server: HttpRig, client: openai.OpenAI
) -> None:
    first = respond(server, "One.")
    after = client.responses.create(
        input="Count.", stream=True, previous_response_id=first.value["id"], **LONG
    )
    next(iter(after))
    client.responses.delete(first.value["id"])
    assert server.rig.num_live == 1
    after.close()
    wait_for(lambda: server.rig.num_live == 0)


def test_deleting_a_response_keeps_a_conversation_that_got_another_turn(
    server: HttpRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = respond(server, "One.")
    responses = server.rig.daemon.store.responses

    for name in ("conversation_unneeded_without", "delete"):
        function = getattr(responses, name)

        def before_another_turn(*named: Any, act: Any = function, **more: Any) -> Any:
            removed = act(*named, **more)
            return removed._replace(revision=removed.revision - 1)  # as if a turn had followed

        monkeypatch.setattr(responses, name, before_another_turn)
    assert server.ask("DELETE", f"/v1/responses/{first.value['id']}").status == 200
    assert len(contents(server, first)) == 2


def test_discard_deletes_only_a_conversation_with_an_unchanged_revision(server: HttpRig) -> None:
    first = respond(server, "One.")
    conversation = first.headers["x-pensieve-conversation-id"]
    unneeded: Any = None
    places = ResponsePlaces(server.rig.daemon, unneeded, unneeded)
    server.rig.call(places.discard(conversation, 0, ""))
    assert len(contents(server, first)) == 2
    server.rig.call(places.discard(conversation, 1, ""))
    assert server.ask("GET", f"/v1/conversations/{conversation}").status == 404


@pytest.mark.parametrize("more", [{}, {"instructions": "Be brief."}, {"store": False}])
def test_a_response_whose_reply_was_deleted_cannot_be_continued(
    server: HttpRig, client: openai.OpenAI, more: dict[str, Any]
) -> None:
    first = respond(server, "One.")
    second = respond(server, "Two.", previous_response_id=first.value["id"])
    conversation = first.headers["x-pensieve-conversation-id"]
    reply = second.value["output"][-1]["id"]
    client.conversations.items.delete(reply, conversation_id=conversation)
    refused = respond(server, "Three.", previous_response_id=second.value["id"], **more)
    assert (refused.status, refused.error["code"]) == (404, "previous_response_not_found")
    assert "no longer exists" in refused.error["message"]
    after = respond(server, "Three.", previous_response_id=first.value["id"], **more)
    assert after.status == 200


def test_the_audit_log_names_the_conversation_deleted_with_a_response(tmp_path: Path) -> None:
    audit_log = tmp_path / "audit.log"
    with http_rig(tmp_path / "data", model=True, http={"audit_log": audit_log}) as server:
        first = respond(server, "One.")
        second = respond(server, "Two.", previous_response_id=first.value["id"])
        for each in (second, first):
            assert server.ask("DELETE", f"/v1/responses/{each.value['id']}").status == 200
    lines = [json.loads(each) for each in audit_log.read_text().splitlines()]
    gone = [each.get("conversation_id", "") for each in lines if each["event"] == "delete"]
    assert gone == ["", first.headers["x-pensieve-conversation-id"]]


def raw(server: HttpRig) -> bytes:
    folder = server.rig.daemon.store.folder.path
    return b"".join(each.read_bytes() for each in folder.glob("conversations.db*"))


def test_a_repeated_idempotency_key_returns_the_same_response(server: HttpRig) -> None:
    first = respond(server, "How are you?", key="k1")
    again = respond(server, "How are you?", key="k1")
    assert again.value == first.value
    streamed = respond(server, "How are you?", key="k1", stream=True).events
    assert streamed[-1]["response"] == first.value
    assert [each["sequence_number"] for each in streamed] == list(range(len(streamed)))
    deltas = [each["delta"] for each in streamed if each["type"].endswith("text.delta")]
    assert "".join(deltas) == first.value["output"][0]["content"][0]["text"]
    other = respond(server, "Who are you?", key="k1")
    assert (other.status, other.error["param"]) == (400, "idempotency-key")
    assert len(contents(server, first)) == 2


def test_request_digests_match_those_of_older_daemons() -> None:
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


def test_an_idempotency_key_with_another_text_format_is_refused(server: HttpRig) -> None:
    assert respond(server, "How are you?", key="k3").status == 200
    form = {"format": {"type": "json_object"}}
    other = respond(server, "How are you?", key="k3", text=form)
    assert (other.status, other.error["param"]) == (400, "idempotency-key")


def test_a_retry_can_stream_a_running_background_response(server: HttpRig) -> None:
    fields: dict[str, Any] = {
        "key": "k4",
        "background": True,
        "max_output_tokens": 600,
        "ignore_eos": True,
    }
    made = respond(server, "Count.", **fields)
    assert made.value["status"] in ("queued", "in_progress")
    streamed = respond(server, "Count.", stream=True, **fields)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.events[-1]["response"]["id"] == made.value["id"]


def test_two_requests_with_one_key_and_simultaneous_lookups_run_one_turn(
    server: HttpRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    find, looked = ResponseHistory.response, []

    async def slowly(self: ResponseHistory, response_id: str, tenant: str) -> Any:
        looked.append(response_id)
        found = await find(self, response_id, tenant)
        await asyncio.sleep(0.3)  # so that the other request comes meanwhile
        return found

    monkeypatch.setattr(ResponseHistory, "response", slowly)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(respond, server, "Say it once.", key="k5") for _ in range(2)]
    first, second = (each.result() for each in both)
    assert looked
    assert (first.status, second.value) == (200, first.value)
    listed = server.rig.stub.ListConversations(pb.ListConversationsRequest(page_size=1000))
    names = [each.conversation_id for each in listed.conversations]
    said = [server.rig.messages(each) for each in names]
    assert sum(each[0].content == "Say it once." for each in said if each) == 1


def test_two_concurrent_requests_with_one_key_run_one_turn(server: HttpRig) -> None:
    fields: dict[str, Any] = {"key": "k2", "max_output_tokens": 200, "ignore_eos": True}
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(respond, server, "Count.", **fields) for _ in range(2)]
    first, second = (each.result() for each in both)
    assert first.status == 200
    assert second.value == first.value
    assert len(contents(server, first)) == 2


def test_no_conversation_is_left_if_the_first_turn_cannot_begin(server: HttpRig) -> None:
    before = len(server.rig.stub.ListConversations(pb.ListConversationsRequest()).conversations)
    assert respond(server, "a b c " * 20_000).status == 400
    after = server.rig.stub.ListConversations(pb.ListConversationsRequest()).conversations
    assert len(after) == before


def test_streamed_logprobs_equal_those_of_the_whole_answer(server: HttpRig) -> None:
    fields: dict[str, Any] = {
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "seed": 5,
    }
    whole = respond(server, "Say something.", **fields).value
    events = respond(server, "Say something.", stream=True, **fields).events
    rows = [
        row
        for each in events
        if each["type"] == "response.output_text.delta"
        for row in each["logprobs"]
    ]
    assert rows == whole["output"][0]["content"][0]["logprobs"]
    assert len(rows) > 1
    assert all(len(row["top_logprobs"]) == 2 for row in rows)


def test_a_disconnect_ends_the_turn(server: HttpRig, client: openai.OpenAI) -> None:
    stream = client.responses.create(input="Count.", stream=True, **LONG)
    for event in stream:
        if event.type == "response.output_text.delta":
            break
    stream.close()
    wait_for(lambda: server.rig.num_live == 0)


def test_errors_have_openais_shape(server: HttpRig) -> None:
    long = respond(server, "a b c " * 20_000)
    assert (long.status, long.error["code"]) == (400, "context_length_exceeded")
    assert long.error["param"] == "input"
    assert respond(server, "?", conversation="conv_nobody").status == 404
    refused = respond(server, "?", store=False, background=True)
    assert (refused.status, refused.error["param"]) == (400, "background")
    made = respond(server, "Hi.").value["id"]
    streamed = server.ask("GET", f"/v1/responses/{made}?stream=true")
    assert (streamed.status, streamed.error["param"]) == (400, "stream")


def test_an_unstored_response_stores_nothing(server: HttpRig, client: openai.OpenAI) -> None:
    whole = respond(server, "SECRET-plan", store=False, seed=3)
    assert whole.status == 200
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(whole.value["id"])
    streamed = respond(server, "SECRET-plan", store=False, seed=3, stream=True).events
    assert streamed[-1]["type"] in ("response.completed", "response.incomplete")
    texts = [
        each["output"][0]["content"][0]["text"] for each in (whole.value, streamed[-1]["response"])
    ]
    assert texts[0] == texts[1]
    assert b"SECRET-plan" not in raw(server)


def test_an_unstored_response_can_continue_a_stored_one(server: HttpRig) -> None:
    first = respond(server, "My name is Ann.", instructions="Be brief.")
    fields: dict[str, Any] = {
        "instructions": "Be brief.",
        "previous_response_id": first.value["id"],
        "seed": 3,
    }
    unstored = respond(server, "What is my name?", store=False, **fields)
    stored = respond(server, "What is my name?", **fields)
    assert unstored.value["usage"]["input_tokens"] == stored.value["usage"]["input_tokens"]
    assert len(contents(server, first)) == len(contents(server, stored))


def test_a_tenant_can_continue_only_its_own_responses(tmp_path: Path) -> None:
    names = ("ada", "bob")
    tokens = [Token(hashlib.sha256(name.encode()).digest(), name) for name in names]
    ada, bob = ({"authorization": f"Bearer {name}"} for name in names)
    with http_rig(tmp_path / "data", http={"tokens": tokens}) as server:

        def respond_as(previous: str | None, headers: Mapping[str, str]) -> Answer:
            body = {"model": MODEL, "input": "Hi.", "max_output_tokens": 4}
            more = {"previous_response_id": previous} if previous else {}
            return server.ask("POST", "/v1/responses", body | more, headers)

        first = respond_as(None, ada)
        name = first.value["id"]
        bound = [first, respond_as(name, ada), respond_as(name, ada)]
        assert [each.headers["x-pensieve-bound"] for each in bound] == ["new", "appended", "forked"]
        assert server.ask("GET", f"/v1/responses/{name}", headers=ada).status == 200
        assert server.ask("GET", f"/v1/responses/{name}", headers=bob).status == 404
        assert respond_as(name, bob).status == 404
