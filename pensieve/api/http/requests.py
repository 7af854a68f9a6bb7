"""Read requests of the HTTP APIs, and begin their turns.

Short bodies are parsed on the event loop, long bodies in the thread pool for text. `client_field_names`
translates the field names in later errors (of the template, the tokenizer or the engine) to the names in the
body.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

from pensieve.api.http.exchange import Exchange
from pensieve.api.http.front import Front
from pensieve.api.http.idempotency import request_id_of, reused_key_error
from pensieve.api.json_fields import Refusal, read_json
from pensieve.api.openai.answer import cut_reply
from pensieve.api.openai.request import ParsedRequest, Served, tokens_of
from pensieve.conversations.binding.binder import Binder
from pensieve.conversations.binding.chain import ChainEnd, ReplyReader, session_digest
from pensieve.conversations.constraints import FIELD, ConstraintChecker
from pensieve.conversations.daemon import Daemon
from pensieve.conversations.live_turn import LiveTurn
from pensieve.errors import InvalidArgument
from pensieve.guard.callers import Caller
from pensieve.sampling import Sampling
from pensieve.text import ChatTemplate, Message, Part
from pensieve.text.message import ToolCall
from pensieve.text.reply_pieces import ReplyPieces
from pensieve.text.tool_calls import CallStyle

T = TypeVar("T")
SHORT_BYTES = 16 << 10  # parsed on the event loop
SHORT_TOKENS = 256  # answers up to this length are rendered on the event loop
SEED_BITS = 63
SESSION_HEADERS = ("x-session-id", "x-openwebui-chat-id")


class ApiRequests:
    def __init__(
        self, front: Front, daemon: Daemon, template: ChatTemplate, style: CallStyle | None
    ) -> None:
        """`style`: the format in which the model writes tool calls."""
        self.front, self.template = front, template
        self.binder = Binder(daemon)
        self._daemon, self.style = daemon, style
        self._constraints = ConstraintChecker(template.tokenizer)

    @property
    def models(self) -> tuple[str, ...]:
        """Return the model names that requests may use, the full name first."""
        name = self._daemon.engine.model_name
        short = name.rpartition("/")[2]
        return (name,) if short == name else (name, short)

    async def json(self, exchange: Exchange, by: Caller) -> Any:
        kind = exchange.headers.get("content-type", "application/json").partition(";")[0]
        if kind.strip().lower() not in ("application/json", ""):
            raise InvalidArgument("content-type", "must be application/json")
        raw = await self.front.body(exchange)
        return await self._in_text_pool_if(
            by, len(raw) > SHORT_BYTES, lambda: read_json(raw, "body")
        )

    async def read(
        self, exchange: Exchange, by: Caller, read: Callable[[Any, Served], ParsedRequest]
    ) -> ParsedRequest:
        body = await self.json(exchange, by)
        served = Served(
            self._daemon.defaults,
            self.models,
            self._daemon.engine.ready.vocab_size if self._daemon.engine.ready else None,
            self.template.options,
            self.style,
            self.template.knows_developer,
            by.tenant,
            min(0, by.priority_max),
            request_id_of(exchange),
        )
        is_long = exchange.num_bytes > SHORT_BYTES
        request = await self._in_text_pool_if(by, is_long, lambda: read(body, served))
        if request.ignored:
            exchange.out["x-pensieve-ignored"] = ", ".join(request.ignored)
        return request

    async def render(
        self, by: Caller, num_tokens: int, function: Callable[[], Mapping[str, Any]]
    ) -> Mapping[str, Any]:
        """Call `function`, which renders `num_tokens` tokens, in the text pool if they are many."""
        return await self._in_text_pool_if(by, num_tokens > SHORT_TOKENS, function)

    async def _in_text_pool_if(self, by: Caller, is_long: bool, function: Callable[[], T]) -> T:
        """Call the function, in the text pool if `is_long`."""
        if not is_long:
            return function()
        return await self._daemon.threads.in_text_pool(by.tenant, function)

    def cutter(self, tools: Sequence[Mapping[str, Any]]) -> ReplyPieces:
        """Return a new ReplyPieces for one reply. It looks for tool calls only if there are tools."""
        return ReplyPieces(self.style if tools else None, tools)

    def chain(self, exchange: Exchange, request: ParsedRequest) -> ChainEnd:
        """Return the ChainEnd by which the next request finds this turn. The binder adds the digest."""
        session = _session(exchange, request)
        return ChainEnd(client_session=session, reply_reader=self._reply_reader(request.tools))

    def _reply_reader(self, tools: Sequence[Mapping[str, Any]]) -> ReplyReader:
        """Return a function that converts a reply to the message that the client will send back."""
        style = self.style

        def read(pieces: Sequence[tuple[Part, str]]) -> Message | None:
            parts, texts = [part for part, _ in pieces], [text for _, text in pieces]
            cut = cut_reply(texts, parts, style, tools)
            if not all(each.is_whole for each in cut.calls):
                return None  # an incomplete call cannot be sent back
            calls = [ToolCall(each.name, json.loads(each.arguments)) for each in cut.calls]
            return Message("assistant", cut.content, tool_calls=tuple(calls))

        return read

    def is_stored(self, request: ParsedRequest) -> bool:
        """Return whether a request is stored.

        `store` in the request decides. Without it, a request is stored if this is the daemon's default, or if
        the request names a conversation.
        """
        if request.store is not None:
            return request.store
        return self._daemon.config.store_default or bool(request.conversation)

    async def begin_bound(self, exchange: Exchange, request: ParsedRequest) -> list[LiveTurn]:
        """Begin a turn for each choice, in the conversation that matches the request's messages."""
        chain = self.chain(exchange, request)
        try:
            bound = await self.binder.begin(request.turn, chain, request.num_choices)
        except InvalidArgument as error:
            if error.field != "request_id":
                raise
            raise reused_key_error() from None
        exchange.out["x-pensieve-conversation-id"] = bound[0].conversation_id
        exchange.out["x-pensieve-bound"] = bound[0].how.value
        exchange.out["x-pensieve-known-messages"] = str(bound[0].num_known_messages)
        return [each.live for each in bound]

    async def begin_unstored(self, request: ParsedRequest) -> list[LiveTurn]:
        """Begin an unstored turn with the whole prompt for each choice.

        The daemon gets token ids instead of a `TurnRequest`. An unstored turn has no conversation and no
        request_id, and a text completion has no messages.
        """
        tenant, options = request.turn.tenant, request.turn.options
        salt = request.turn.cache_salt

        def prepare() -> list[int]:
            if options.constraint is not None:
                self._constraints.check(options)
            return self._tokens(request)

        prompt = await self._daemon.threads.in_text_pool(tenant, prepare)
        begun: list[LiveTurn] = []
        try:
            for choice in range(request.num_choices):
                if choice == 1:
                    await self._daemon.conversations.prompt_computed(begun[0])
                seeded = replace(options, sampling=_seeded(options.sampling, choice))
                begun.append(await self._daemon.begin_unstored(prompt, seeded, tenant, salt))
        except BaseException:
            for live in begun:
                self._daemon.conversations.ends.stop(live)
            raise
        return begun

    async def num_tokens(self, request: ParsedRequest) -> int:
        """Return the number of tokens of a request's whole prompt."""
        tokens = partial(self._tokens, request)
        return len(await self._daemon.threads.in_text_pool(request.turn.tenant, tokens))

    def _tokens(self, request: ParsedRequest) -> list[int]:
        return tokens_of(request, self.template, self._daemon.context_max, template_time())


def template_time() -> datetime:
    """Return the time for templates that write the date into an unstored prompt."""
    return datetime.now(UTC)


def _session(exchange: Exchange, request: ParsedRequest) -> bytes:
    """Return a digest of the client's session name. Empty if the request has none."""
    names = (exchange.headers.get(name, "") for name in SESSION_HEADERS)
    session_key = next(filter(None, names), request.prompt_cache_key)
    return session_digest(session_key) if session_key else b""


@contextmanager
def client_field_names(request: ParsedRequest) -> Iterator[None]:
    """Translate the field names in errors that are raised in the block to the names in the body."""
    try:
        yield
    except Refusal:
        raise
    except InvalidArgument as error:
        name = error.field.removeprefix("sampling.")
        if name.startswith(FIELD):
            name = request.params.get(name, "response_format")
        code = "context_length_exceeded" if error.is_too_long else "invalid_value"
        raise Refusal(request.param(name), error.problem, code) from None


def _seeded(sampling: Sampling, choice: int) -> Sampling:
    """Return the sampling of a choice: the first uses the given seed, the others use derived seeds."""
    if sampling.seed and not choice:
        return sampling
    if sampling.seed:
        return replace(sampling, seed=(sampling.seed + choice * 0x9E3779B97F4A7C15) % (1 << 64))
    return replace(sampling, seed=secrets.randbits(SEED_BITS) + 1)
