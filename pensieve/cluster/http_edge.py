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

**A long body** is read up to BODY_BYTES before it is passed on (the daemon answers none before its end), and
looked at in two places: the first HEAD_BYTES, where the messages begin, and the last TAIL_BYTES, where names
stand that clients write behind the messages.  So a chat keeps its name when it grows.  Of a first message
that does not end in the head the digest has the first CHARACTERS.  A name in the middle of a long body, or
anywhere behind BODY_BYTES, is not found.

**A response has the key of the request that made it**, if this proxy has passed it on (the last IDS_MAX): its
id is in what the daemon sends back.  So responses that go on from one another (`previous_response_id`), each
with an id of its own, stay with one replica.  Another proxy knows nothing of it and takes the id itself for
the key: that is right, since any replica forwards a request to the owner of its conversation, but it is a hop
more.

A request without a body, or with one that has been read whole, goes to the daemon past Ray (http_direct.py);
another body's messages go on through Ray as they came.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from typing import Any

from pensieve.cluster.homes import short
from pensieve.cluster.http_direct import HttpDirect, RaysAnswer
from pensieve.cluster.http_forward import ADDED, SESSION, has_body

HEADERS = (b"x-smg-routing-key", b"x-openwebui-chat-id")
NAMED = ("conversation", "previous_response_id", "prompt_cache_key")
HEAD_BYTES = 64 << 10
TAIL_BYTES = 4 << 10
BODY_BYTES = 8 << 20
CHARACTERS = 1024
IDS_MAX = 100_000
CHATS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
CONVERSATION_PATH = re.compile(r"/v1/(?:conversations|responses)/([^/]+)")
RESPONSES = "/v1/responses"
RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[A-Za-z0-9_-]{1,128})"')
STRING = r'"(?:[^"\\]|\\.)*"'
NAME = re.compile(  # whole, with its value
    rf'(?<!\\)"(?P<name>{"|".join(NAMED)})"\s*:\s*(?P<inner>\{{\s*"id"\s*:\s*)?(?P<value>{STRING})'
)
TOKEN = re.compile(rf"{STRING}|[\[\]{{}}]")
TURNS = re.compile(r'"(?:messages|input)"\s*:\s*\[')
SYSTEM = re.compile(r'"(?:system|instructions)"\s*:\s*')
COMMA = re.compile(r"\s*,")
TEXT = re.compile(r'"(?:prompt|input)"\s*:\s*(?=")')
# Not JSON, or nested too deeply: the daemon says what is wrong with it.
NO_VALUE = (ValueError, RecursionError)


def middlewares() -> list[Any]:
    """For RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH."""
    from starlette.middleware import Middleware

    return [Middleware(HttpEdge)]


class HttpEdge:
    """One for each proxy; used by its loop."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._direct = HttpDirect(app)
        self._keys: OrderedDict[str, str] = OrderedDict()  # of responses, by their ids

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_chat = scope["method"] == "POST" and scope["path"] in CHATS
        first, body = await _beginning(receive) if is_chat else ([], b"")
        is_whole = bool(first) and first[-1]["type"] == "http.request" and not _goes_on(first[-1])
        headers = [each for each in scope["headers"] if each[0] != ADDED]
        named = dict(headers)
        if SESSION in named:
            headers = [
                (each, _utf8(value) if each == SESSION else value) for each, value in headers
            ]
        elif key := self._key(scope, named, body, is_whole):
            headers += [(SESSION, key.encode("utf-8", "replace")), (ADDED, b"1")]
            if is_chat and scope["path"] == RESPONSES:
                send = self._learning(send, key)

        async def again() -> Any:
            return first.pop(0) if first else await receive()

        scope = {**scope, "headers": headers}
        if is_whole or not has_body(scope):
            await self._direct(scope, body if is_whole else None, again, send)
        else:
            await self._app(scope, again, RaysAnswer(send))

    def _key(self, scope: Any, named: dict[bytes, bytes], body: bytes, is_whole: bool) -> str:
        """What names it, or an empty string."""
        key = next((_utf8(named[each]).decode() for each in HEADERS if each in named), "")
        if not key and (match := CONVERSATION_PATH.match(scope["path"])):
            key = match[1]
        key = key or key_of_body(body, is_whole)
        return self._keys.get(key, short(key))

    def _learning(self, send: Any, key: str) -> Any:
        """Finds the id of the response in how its body begins."""
        beginning = bytearray()

        async def learn(message: Any) -> None:
            if message["type"] == "http.response.body" and len(beginning) < TAIL_BYTES:
                beginning.extend(message.get("body", b"")[:TAIL_BYTES])
                if match := RESPONSE_ID.search(beginning):
                    beginning.extend(bytes(TAIL_BYTES))  # no more is looked at
                    self._remember(match[1].decode(), key)
            await send(message)

        return learn

    def _remember(self, response_id: str, key: str) -> None:
        self._keys[response_id] = key
        self._keys.move_to_end(response_id)
        if len(self._keys) > IDS_MAX:
            self._keys.popitem(last=False)


def key_of_body(body: bytes, is_whole: bool = True) -> str:
    """The key in a JSON body, or in its beginning; "" for none."""
    text = body[:HEAD_BYTES].decode("utf-8", "replace")
    if len(body) > HEAD_BYTES:
        tail = body[-TAIL_BYTES:].decode("utf-8", "replace") if is_whole else ""
        return _named_in(text, tail) or _digest_of_beginning(text, is_cut=True)
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


async def _beginning(receive: Any) -> tuple[list[Any], bytes]:
    """The messages with the body, or with its first BODY_BYTES and more; and what they have of it."""
    messages, body = [], bytearray()
    while len(body) < BODY_BYTES:
        message = await receive()
        messages.append(message)
        body += message.get("body", b"")
        if not _goes_on(message):
            break
    return messages, bytes(body)


def _goes_on(message: Any) -> bool:
    return message["type"] == "http.request" and bool(message.get("more_body", False))


def _named_in(head: str, tail: str) -> str:
    """A name of the outermost object, in the beginning and the end of its text.

    What is a name in a text of somebody's has its quotes escaped.  What is one deeper within is told by the
    brackets before it, or behind it; those within strings do not count.
    """
    found: dict[str, re.Match[str]] = {}
    for match in NAME.finditer(tail):
        if _depth(tail[match.end() :]) == -(2 if match["inner"] else 1):
            found[match["name"]] = match
    if NAME.search(head):
        depth = 0
        for token in TOKEN.finditer(head):
            if token[0] in "{[":
                depth += 1
            elif token[0] in "}]":
                depth -= 1
            elif depth == 1 and (named := NAME.match(head, token.start())):
                found[named["name"]] = named
    return next((_text_of(found[name]) for name in NAMED if name in found), "")


def _text_of(match: re.Match[str]) -> str:
    try:
        return str(json.loads(match["value"]))
    except NO_VALUE:
        return ""


def _depth(text: str) -> int:
    """How many brackets more it opens than it closes."""
    tokens = [each[0] for each in TOKEN.finditer(text)]
    return sum(map(tokens.count, "{[")) - sum(map(tokens.count, "}]"))


def _utf8(value: bytes) -> bytes:
    return value.decode("utf-8", "replace").encode()


def _digest_of_beginning(text: str, is_cut: bool = False) -> str:
    """A system prompt counts where it stands before the messages: behind them it may be cut off later."""
    digest = hashlib.blake2b(digest_size=16)
    found = False
    turns, prompt = TURNS.search(text), TEXT.search(text)
    system = SYSTEM.search(text, 0, turns.start()) if turns else SYSTEM.search(text)
    if system and (value := _value_at(text, system.end())):
        digest.update(text[system.end() : value[1]].strip().encode())
        found = True
    at = turns.end() if turns else len(text)
    while value := _value_at(text, at):
        digest.update(text[at : value[1]].strip().encode())
        found = True
        if not isinstance(value[0], dict) or value[0].get("role", "user") == "user":
            break
        at = _after_comma(text, value[1])
    if not turns and prompt:
        at = prompt.end()
        if value := _value_at(text, at):
            digest.update(str(value[0])[:CHARACTERS].encode("utf-8", "replace"))
            found = True
    if is_cut and not value and at < len(text):  # its end is not here
        digest.update(text[at : at + CHARACTERS].encode())
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
    """Where the next value of the list begins; the end of the text where there is none."""
    comma = COMMA.match(text, at)
    return comma.end() if comma else len(text)
