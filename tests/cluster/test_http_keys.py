"""Which conversation an HTTP request belongs to, from its head and the beginning of its body."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from pensieve.cluster import http_edge
from pensieve.cluster.http_direct import PAST_RAY
from pensieve.cluster.http_edge import HEAD_BYTES, HttpEdge, key_of_body
from pensieve.cluster.http_forward import ADDED, SESSION

CHAT = "/v1/chat/completions"


def seen(
    path: str = CHAT,
    headers: dict[str, str] | None = None,
    chunks: tuple[bytes, ...] = (),
    method: str = "POST",
    encoding: str = "utf-8",
) -> tuple[dict[str, str], bytes, dict[str, Any]]:
    """Headers, body and scope that come out of the middleware."""
    messages = [
        {"type": "http.request", "body": chunk, "more_body": index + 1 < len(chunks)}
        for index, chunk in enumerate(chunks)
    ]
    found: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while chunks:
            message = await receive()
            body += message["body"]
            if not message["more_body"]:
                break
        found.extend((scope, body))

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [(k.encode(), v.encode(encoding)) for k, v in (headers or {}).items()],
    }
    asyncio.run(HttpEdge(app)(scope, receive, None))
    out, body = found
    assert all(v.decode() for k, v in out["headers"] if k == SESSION), "as Ray decodes it"
    return {k.decode(): v.decode("utf-8", "replace") for k, v in out["headers"]}, body, out


def chat(*texts: str, **more: Any) -> bytes:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return json.dumps({"model": "m", "temperature": 0.5, "messages": messages, **more}).encode()


def test_a_session_that_the_client_names_stays_as_it_is() -> None:
    headers, body, _ = seen(headers={"x-session-id": "s-1"}, chunks=(chat("Hello."),))
    assert headers == {"x-session-id": "s-1"}
    assert body == chat("Hello.")


def test_headers_of_other_programs_name_it_too() -> None:
    for name in ("x-smg-routing-key", "x-openwebui-chat-id"):
        headers, _, _ = seen(headers={name: "k-1"}, chunks=(chat("Hello."),))
        assert headers == {name: "k-1", "x-session-id": "k-1", ADDED.decode(): "1"}


def test_a_client_cannot_add_our_mark() -> None:
    headers, _, _ = seen(headers={ADDED.decode(): "1", "x-session-id": "s"}, chunks=(chat("a"),))
    assert headers == {"x-session-id": "s"}


def test_a_chat_has_one_key_however_long_it_grows() -> None:
    first = key_of_body(chat("Hello."))
    assert first
    assert key_of_body(chat("Hello.", "Hi.", "And then?")) == first
    assert key_of_body(chat("Good day.", "Hi.", "And then?")) != first
    assert key_of_body(b'{"system": "Be brief.", ' + chat("Hello.")[1:]) != first
    assert key_of_body(chat("Hello.", system="Be brief.")) == first  # a longer one would lose it


def test_a_body_larger_than_what_is_looked_at_has_the_key_of_its_beginning() -> None:
    long = chat("Hello.", "x" * HEAD_BYTES, "y" * HEAD_BYTES)
    chunks = tuple(long[at : at + 10_000] for at in range(0, len(long), 10_000))
    headers, body, scope = seen(chunks=chunks)
    assert headers["x-session-id"] == key_of_body(chat("Hello."))
    assert body == long
    assert PAST_RAY in scope


def test_a_body_that_is_not_read_whole_goes_through_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_edge, "BODY_BYTES", 100)
    long = chat("Hello.", "x" * 200)
    chunks = (long[:90], long[90:180], long[180:])
    headers, body, scope = seen(headers={"content-length": str(len(long))}, chunks=chunks)
    assert headers["x-session-id"]
    assert body == long
    assert PAST_RAY not in scope


def test_a_name_in_the_body_goes_before_its_text() -> None:
    assert key_of_body(chat("Hello.", conversation="conv-7")) == "conv-7"
    assert key_of_body(chat("Hello.", conversation={"id": "conv-7"})) == "conv-7"
    assert key_of_body(chat("Hello.", previous_response_id="resp-7")) == "resp-7"
    assert key_of_body(chat("Hello.", prompt_cache_key="cache-7")) == "cache-7"


def test_texts_and_items_of_the_other_apis_have_keys() -> None:
    assert key_of_body(b'{"prompt": "Once upon a time"}')
    assert key_of_body(b'{"input": "Hello."}')
    assert key_of_body(b'{"input": [{"role": "user", "content": "Hello."}]}')


def test_what_is_no_json_or_has_no_messages_has_no_key() -> None:
    for body in (
        b"",
        b"nonsense",
        b"{",
        b'{"messages": []}',
        b'{"messages": 7}',
        b"\xff\xfe",
        b"[]",
    ):
        assert key_of_body(body) == "", body


def test_a_conversation_in_the_path_is_the_key() -> None:
    headers, _, _ = seen(path="/v1/conversations/conv-7/items", method="GET")
    assert headers["x-session-id"] == "conv-7"
    headers, _, _ = seen(path="/v1/models", method="GET")
    assert headers == {}


def test_ray_can_read_keys_that_are_not_ascii() -> None:
    headers, _, _ = seen(chunks=(chat("Hello.", prompt_cache_key="Jürgen"),))
    assert headers["x-session-id"] == "Jürgen"
    headers, _, _ = seen(chunks=(chat("Hello.", prompt_cache_key="\ud800"),))
    assert headers["x-session-id"] == "?"
    headers, _, _ = seen(path="/v1/conversations/café", method="GET")
    assert headers["x-session-id"] == "café"
    for name in ("x-openwebui-chat-id", "x-session-id"):
        headers, _, _ = seen(headers={name: "é"}, chunks=(chat("Hello."),))
        assert headers["x-session-id"] == "é"
        headers, _, _ = seen(headers={name: "é"}, chunks=(chat("Hello."),), encoding="latin-1")
        assert headers["x-session-id"] == "\ufffd"


def test_a_body_that_is_nested_too_deeply_has_no_key() -> None:
    for body in (b"[" * 60_000, b'{"messages": [' + b"[" * 60_000):
        headers, sent, _ = seen(chunks=(body,))
        assert headers == {}
        assert sent == body


def test_a_chat_keeps_the_name_behind_its_messages_when_it_grows_beyond_what_is_looked_at() -> None:
    replies = ["x" * 2000] * 80
    for more in (
        {"prompt_cache_key": "chat-7"},
        {"conversation": {"id": "chat-7"}, "stream": True},
    ):
        assert key_of_body(chat("Hello.", **more)) == "chat-7"
        assert key_of_body(chat("Hello.", *replies, **more)) == "chat-7"
    long = chat("Hello.", *replies)
    assert key_of_body(b'{"prompt_cache_key": "chat-7", ' + long[1:]) == "chat-7"
    assert key_of_body(b'{"conversation": {"id": "chat-7"}, ' + long[1:]) == "chat-7"
    chunks = tuple(
        each[at : at + 65_536]
        for each in [chat("Hello.", *replies, prompt_cache_key="chat-7")]
        for at in range(0, len(each), 65_536)
    )
    headers, body, _ = seen(chunks=chunks)
    assert headers["x-session-id"] == "chat-7"
    assert body == b"".join(chunks)


def test_a_name_is_found_wherever_the_beginning_of_a_body_ends() -> None:
    for size in range(HEAD_BYTES - 160, HEAD_BYTES + 40, 4):
        assert key_of_body(chat("Hello.", "x" * size, prompt_cache_key="chat-7")) == "chat-7"


def test_what_is_not_the_end_of_a_body_is_not_taken_for_it() -> None:
    body = b'{"messages": [{"role": "user", "content": "Hello."}], "x": "' + b"x" * HEAD_BYTES
    body += b'", "metadata": {"prompt_cache_key": "mine"}'
    assert key_of_body(body, is_whole=False) == key_of_body(chat("Hello."))


def test_a_name_within_something_else_of_a_long_body_is_none() -> None:
    replies = ["x" * 2000] * 80
    digest = key_of_body(chat("Hello.", *replies))
    said = '"prompt_cache_key": "mine", {"prompt_cache_key": "mine"}'
    assert key_of_body(chat("Hello.", *replies, said)) == digest
    assert key_of_body(chat("Hello.", said, *replies)) == digest
    inner = {"prompt_cache_key": "mine", "conversation": {"id": "mine"}}
    assert key_of_body(chat("Hello.", *replies, metadata=inner)) == digest
    outer = b'{"metadata": ' + json.dumps(inner).encode() + b", " + chat("Hello.", *replies)[1:]
    assert key_of_body(outer) == digest


def test_a_first_message_longer_than_what_is_looked_at_has_one_key_in_all_turns() -> None:
    document = "A document. " * 8000
    keys = {key_of_body(chat(document, *more)) for more in ((), ("Yes.", "No?"), ("x" * 90_000,))}
    assert len(keys) == 1
    assert keys.pop() != ""
    assert key_of_body(chat(document)) != key_of_body(chat("Another. " * 8000))
    completion = b'{"prompt": "' + document.encode() + b'", "max_tokens": '
    assert key_of_body(completion + b"1}") == key_of_body(completion + b"2}") != ""
    system = {"role": "system", "content": "Be brief."}
    of_users = [
        key_of_body(json.dumps({"messages": [system, {"role": "user", "content": text}]}).encode())
        for text in (document, "Another. " * 8000)
    ]
    assert of_users[0] != of_users[1]


def test_a_system_prompt_alone_is_what_a_chat_begins_with() -> None:
    one = [{"role": "system", "content": "Be brief."}]
    first = key_of_body(json.dumps({"messages": one, "model": "a"}).encode())
    assert first == key_of_body(json.dumps({"messages": one, "stream": True}).encode()) != ""


def test_nothing_of_a_body_is_held_back_but_its_beginning() -> None:
    chunks = tuple(b" " * (1 << 20) for _ in range(12))
    _, body, _ = seen(chunks=chunks)
    assert len(body) == 12 << 20


def answered(edge: HttpEdge, request: dict[str, Any], out: list[Any]) -> None:
    """Sends a request for a response; the key that it got is appended to `out`."""

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps(request).encode(), "more_body": False}

    async def send(message: Any) -> None:
        pass

    scope = {"type": "http", "method": "POST", "path": "/v1/responses", "headers": []}
    asyncio.run(edge({**scope, "out": out}, receive, send))


def test_responses_that_go_on_from_one_another_share_the_key_of_the_first() -> None:
    number = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal number
        number += 1
        scope["out"].append(dict(scope["headers"])[b"x-session-id"].decode())
        answer = b'event: response.created\ndata: {"response": {"id": "resp_%d", ' % number
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for at in range(0, len(answer), 10):
            body = answer[at : at + 10]
            await send({"type": "http.response.body", "body": body, "more_body": True})

    edge, keys = HttpEdge(app), list[str]()
    answered(edge, {"input": "Hello."}, keys)
    for each in range(1, 5):
        answered(edge, {"input": "More.", "previous_response_id": f"resp_{each}"}, keys)
    assert len(set(keys)) == 1
    answered(edge, {"input": "x", "previous_response_id": "resp_of_another_proxy"}, keys)
    assert keys[-1] == "resp_of_another_proxy"


def test_a_body_nested_to_any_depth_has_a_key_or_none() -> None:
    """A value may be read and be too deep to be written."""
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        for depth in range(300, 1100):
            deep = opening * depth + "1" + closing * depth
            key_of_body(f'{{"messages": [{deep}]}}'.encode())
            key_of_body(f'{{"system": {deep}, "messages": [1]}}'.encode())


def test_a_very_long_name_is_remembered_by_a_short_key() -> None:
    headers, _, _ = seen(chunks=(chat("Hello.", prompt_cache_key="x" * 5000),))
    assert len(headers["x-session-id"]) == 32
