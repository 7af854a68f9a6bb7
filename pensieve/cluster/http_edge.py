"""The key of an HTTP request, found in Ray Serve's HTTP proxy.

Ray's proxy routes by the header `x-session-id` and looks at nothing else.  This middleware
(RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names `middlewares`) adds that header to a request without it,
and `ADDED` beside it, so that the replica takes both away again.  Without the middleware everything works;
requests without `x-session-id` then go to any replica.  Ray reads the header as UTF-8, so whatever a client
has sent as its key becomes that.

The key is, in this order: the header of another program for the same thing; in the path, the conversation;
in the body, `conversation`, `previous_response_id` or `prompt_cache_key`; else a digest of how the messages
begin, up to and with the first one of the user: it is the same in all requests of one chat, and chats that
begin alike (a system prompt, forks) share it, which is where their KV is.

Of the body at most HEAD_BYTES are looked at.  They are passed on as they came; a body that is whole by then
also goes with the request's scope, which saves the replica the way back to the proxy to fetch it (several
ms before the first token).
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

SESSION = b"x-session-id"
ADDED = b"x-pensieve-key-added"
BODY = "pensieve.body"  # in the scope
HEADERS = (b"x-smg-routing-key", b"x-openwebui-chat-id")
NAMED = ("conversation", "previous_response_id", "prompt_cache_key")
HEAD_BYTES = 64 << 10
CHATS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
CONVERSATION_PATH = re.compile(r"/v1/(?:conversations|responses)/([^/]+)")
TURNS = re.compile(r'"(?:messages|input)"\s*:\s*\[')
SYSTEM = re.compile(r'"(?:system|instructions)"\s*:\s*')
TEXT = re.compile(r'"(?:prompt|input)"\s*:\s*(?=")')


NO_VALUE = (
    ValueError,
    RecursionError,
)  # not JSON, or too deep: the daemon says what is wrong with it


def middlewares() -> list[Any]:
    """For RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH."""
    from starlette.middleware import Middleware

    return [Middleware(HttpEdge)]


class HttpEdge:
    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = [each for each in scope["headers"] if each[0] != ADDED]
        named = dict(headers)
        if SESSION in named:
            headers = [
                (name, _utf8(value) if name == SESSION else value) for name, value in headers
            ]
            await self._app({**scope, "headers": headers}, receive, send)
            return
        first: list[Any] = []
        key = next((_utf8(named[each]).decode() for each in HEADERS if each in named), "")
        if not key and (match := CONVERSATION_PATH.match(scope["path"])):
            key = match[1]
        if not key and scope["method"] == "POST" and scope["path"] in CHATS:
            first = await _head(receive)
            key = key_of_body(b"".join(each.get("body", b"") for each in first))
        if key:
            headers += [(SESSION, key.encode("utf-8", "replace")), (ADDED, b"1")]

        more: dict[str, Any] = {"headers": headers}
        if first and not first[-1].get("more_body", False):
            more[BODY] = b"".join(each.get("body", b"") for each in first)

        async def again() -> Any:
            return first.pop(0) if first else await receive()

        await self._app({**scope, **more}, again, send)


def key_of_body(head: bytes) -> str:
    """The key in a JSON body, or in its beginning; "" for none."""
    text = head.decode("utf-8", "replace")
    try:
        whole = json.loads(text)
    except NO_VALUE:
        whole = None
    if isinstance(whole, dict):
        for name in NAMED:
            value = whole.get(name)
            value = value.get("id") if isinstance(value, dict) else value
            if isinstance(value, str) and value:
                return value
    return _digest_of_beginning(text)


def _utf8(value: bytes) -> bytes:
    return value.decode("utf-8", "replace").encode()


async def _head(receive: Any) -> list[Any]:
    messages, size = [], 0
    while size < HEAD_BYTES:
        message = await receive()
        messages.append(message)
        size += len(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body", False):
            break
    return messages


def _digest_of_beginning(text: str) -> str:
    digest = hashlib.blake2b(digest_size=16)
    found = False
    if (system := SYSTEM.search(text)) and (value := _value_at(text, system.end())):
        digest.update(json.dumps(value[0]).encode())
        found = True
    if turns := TURNS.search(text):
        at = turns.end()
        while value := _value_at(text, at):
            digest.update(json.dumps(value[0]).encode())
            found = True
            if not isinstance(value[0], dict) or value[0].get("role", "user") == "user":
                break
            at = _after_comma(text, value[1])
    elif (prompt := TEXT.search(text)) and (value := _value_at(text, prompt.end())):
        digest.update(str(value[0])[:1024].encode())
        found = True
    return digest.hexdigest() if found else ""


def _value_at(text: str, at: int) -> tuple[Any, int] | None:
    """The JSON value that begins here, and where it ends; None where it is not whole."""
    while at < len(text) and text[at].isspace():
        at += 1
    try:
        return json.JSONDecoder().raw_decode(text, at)
    except NO_VALUE:
        return None


def _after_comma(text: str, at: int) -> int:
    comma = text.find(",", at)
    return comma + 1 if comma >= 0 else len(text)
