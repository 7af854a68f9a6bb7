"""`/v1/responses`: each response is one turn of a conversation.

    POST                create a response: whole, as a stream of events, or in the background
    GET                 return the response in its current state
    POST …/cancel       cancel a background response; the history keeps nothing of its turn
    DELETE              delete the response. Also delete its conversation, if the conversation was created for
                        responses and has no other response

response_places.py chooses the conversation. With `store: false`, the whole prompt runs as an unstored turn.

A retry with the same `Idempotency-Key` returns the first response, running or stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pensieve.api.http.errors import shape_of
from pensieve.api.http.exchange import Exchange, query_of
from pensieve.api.http.idempotency import (
    client_key_of,
    client_or_forwarding_key_of,
    digest,
    reused_key_error,
)
from pensieve.api.http.replies import cache_headers, follow
from pensieve.api.http.requests import ApiRequests, client_field_names
from pensieve.api.http.response_history import ResponseHistory
from pensieve.api.http.response_places import (
    NewResponse,
    PlacedTurn,
    ResponsePlaces,
    TurnPlace,
    stored_response,
)
from pensieve.api.json_fields import Refusal
from pensieve.api.openai.answer import Heading
from pensieve.api.openai.conversation_items import Place
from pensieve.api.openai.request import ParsedRequest, RequestKind, parse
from pensieve.api.openai.response_stream import (
    ENDED,
    ResponseStream,
    failed_body,
    finished_body,
    pieces_of,
    unfinished_body,
)
from pensieve.conversations.daemon import Daemon
from pensieve.conversations.live_turn import NO_TOKENS, LiveTurn
from pensieve.core.turn import FinishReason
from pensieve.errors import InvalidArgument, NotFound, PensieveError, TurnFailed
from pensieve.guard.callers import Caller
from pensieve.guard.client_errors import client_text
from pensieve.store.responses import StoredResponse
from pensieve.text.reply_pieces import ReplyPieces

ID_BYTES = 24
LOOK_SECONDS = 0.5  # between two checks whether a turn without a reader has ended
LOST = "the server stopped before the response was complete"


class ResponseEndpoints:
    def __init__(
        self,
        daemon: Daemon,
        requests: ApiRequests,
        history: ResponseHistory,
        places: ResponsePlaces,
    ) -> None:
        self._daemon, self._requests = daemon, requests
        self._history, self._places = history, places
        self._running = RunningResponses(daemon, requests, history, places)

    # -- create --

    async def create(self, exchange: Exchange, by: Caller) -> Mapping[str, Any] | None:
        request = await self._requests.read(exchange, by, partial(parse, RequestKind.RESPONSE))
        if not self._requests.is_stored(request):
            request = replace(request, echoed={**request.echoed, "store": False})
        new = NewResponse.of(request, self._requests.chain(exchange, request))
        with client_field_names(request):
            if not self._requests.is_stored(request):
                return await self._unstored(exchange, new)
            known = await self._daemon.threads.run_to_end(
                self._begin_or_find(new, client_or_forwarding_key_of(exchange))
            )
            if not isinstance(known, RunningResponse):
                # Only the daemon that runs a response can stream its events.
                if request.stream and known["status"] not in ENDED:
                    await self._history.require_here(known["id"], by.tenant)
                    known = await self._current_body(known["id"], by.tenant)
                return await self._replay(exchange, request, known)
            running = known
        placed = running.placed
        assert placed is not None
        _set_conversation_headers(exchange, placed)
        if request.background and not request.stream:
            return running.current_body
        return await self._read(exchange, running, placed, is_stream=request.stream)

    async def _begin_or_find(
        self, new: NewResponse, key: str
    ) -> RunningResponse | Mapping[str, Any]:
        """Begin a response, or return the response of an earlier request with the same key.

        This continues after a disconnect, because clients then retry.
        """
        tenant, model = new.turn.tenant, new.request.model
        answer_id = digest(tenant, "key", key) if key else secrets.token_hex(ID_BYTES)
        async with self._daemon.arriving.one_at_a_time(tenant, answer_id if key else ""):
            heading = Heading(answer_id, int(time.time()), model)
            running = RunningResponse(new.request, heading, _digest_of(new), tenant)
            known = await self._find_retried(running) if key else None
            if known is not None:
                return known
            self._running.add(running)
            try:
                new = replace(new, make_stored=partial(self._running.make_stored, running))
                placed = await self._places.begin(new)
                await self._running.begin(running, placed)
            except BaseException:
                self._running.forget(running)
                raise
            return running

    async def _find_retried(
        self, wanted: RunningResponse
    ) -> RunningResponse | Mapping[str, Any] | None:
        """Return the response of an earlier request with the same key, if its turn has begun."""
        running = self._running.find(wanted.response_id, wanted.tenant)
        if running is not None:
            _check_key(running.digest, wanted.digest)
            return running
        stored = await self._history.response(wanted.response_id, wanted.tenant)
        if stored is None:
            return None
        _check_key(stored.request, wanted.digest)
        return await self._stored_body_now(stored)

    # -- answer --

    async def _read(
        self, exchange: Exchange, running: RunningResponse, placed: PlacedTurn, *, is_stream: bool
    ) -> Mapping[str, Any] | None:
        """Answer with a running response. `is_stream` may differ from the request that began the response."""
        survives_disconnect = running.request.background or bool(client_key_of(exchange))
        if is_stream:
            await self._stream(exchange, running, placed, survives_disconnect=survives_disconnect)
            return None
        try:
            await follow(
                self._daemon, exchange, placed.live, None, survives_disconnect=survives_disconnect
            )
        finally:
            running.reader_done.set()
        await running.kept.wait()
        exchange.out = {**cache_headers(placed.live.figures), **exchange.out}
        assert running.body is not None
        return running.body

    async def _stream(
        self,
        exchange: Exchange,
        running: RunningResponse,
        placed: PlacedTurn,
        *,
        survives_disconnect: bool,
    ) -> None:
        cutter, tokenizer = (
            self._requests.cutter(placed.turn_place.tools),
            self._requests.template.tokenizer,
        )
        stream = ResponseStream(running.request, placed.turn_place.place, tokenizer, cutter)
        exchange.begin_events()
        await exchange.write_events(stream.begin(running.current_body))
        try:
            await follow(
                self._daemon,
                exchange,
                placed.live,
                stream,
                survives_disconnect=survives_disconnect,
            )
            running.reader_done.set()
            await running.kept.wait()
            assert running.body is not None
            await exchange.write_events(stream.end(running.body))
        except PensieveError as error:
            running.reader_done.set()
            await running.kept.wait()
            await exchange.write_events(_failure_events(stream, running, error))
        await exchange.end_events()

    async def _replay(
        self, exchange: Exchange, request: ParsedRequest, body: Mapping[str, Any]
    ) -> Mapping[str, Any] | None:
        if not request.stream:
            return body
        cutter, tokenizer = self._requests.cutter(request.tools), self._requests.template.tokenizer
        stream = ResponseStream(request, StoredNames(body), tokenizer, cutter)
        exchange.begin_events()
        before = {**body, "status": "in_progress", "output": [], "usage": None}
        await exchange.write_events(stream.begin(before))
        if body["status"] in ("completed", "incomplete"):
            await exchange.write_events(stream.pieces(pieces_of(body["output"])))
            await exchange.write_events(stream.end(body))
        else:
            await exchange.write_events(stream.failed(body))
        await exchange.end_events()
        return None

    # -- an unstored response --

    async def _unstored(self, exchange: Exchange, new: NewResponse) -> Mapping[str, Any] | None:
        request = new.request
        if request.background:
            raise Refusal("background", "needs store: true, because the response is fetched later")
        whole = await self._places.with_whole_prompt(new)
        (live,) = await self._requests.begin_unstored(whole)
        answer_id = secrets.token_hex(ID_BYTES)
        heading = Heading(answer_id, int(time.time()), request.model)
        place = Place(digest(answer_id)[:16], 0)
        tokenizer = self._requests.template.tokenizer
        if not request.stream:
            await follow(self._daemon, exchange, live, None, survives_disconnect=False)
            exchange.out |= cache_headers(live.figures)
            cutter = self._requests.cutter(whole.tools)
            return self._running.final_body(request, heading, place, live, cutter)
        stream = ResponseStream(request, place, tokenizer, self._requests.cutter(whole.tools))
        exchange.begin_events()
        await exchange.write_events(stream.begin(unfinished_body(request, heading, "in_progress")))
        try:
            await follow(self._daemon, exchange, live, stream, survives_disconnect=False)
            cutter = self._requests.cutter(whole.tools)
            body = self._running.final_body(request, heading, place, live, cutter)
            await exchange.write_events(stream.end(body))
        except PensieveError as error:
            running = RunningResponse(request, heading, "", new.turn.tenant)
            await exchange.write_events(_failure_events(stream, running, error))
        await exchange.end_events()
        return None

    # -- get, cancel, delete --

    async def get(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        query = query_of(exchange)
        if query.get("stream", "false").lower() == "true":
            raise Refusal("stream", "is not supported here: only whole responses can be fetched")
        return await self._current_body(exchange.values["response_id"], by.tenant)

    async def cancel(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        response_id = exchange.values["response_id"]
        running = self._running.find(response_id, by.tenant)
        if running is not None:
            await running.begun.wait()
            if not running.request.background:
                raise InvalidArgument("response_id", "only background responses can be cancelled")
            if running.placed is not None:
                await self._running.cancel(running)
        else:
            await self._history.require_here(response_id, by.tenant)
        found = await self._current_body(response_id, by.tenant)
        if not found["background"]:
            raise InvalidArgument("response_id", "only background responses can be cancelled")
        return found

    async def delete(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        response_id = exchange.values["response_id"]
        running = self._running.find(response_id, by.tenant)
        if running is not None:
            await running.begun.wait()
            if running.placed is not None:
                await self._running.cancel(running)
        else:
            await self._history.require_here(response_id, by.tenant)
        removed = ""
        try:
            removed = await self._history.delete(response_id, by.tenant)
        except NotFound:
            if running is None:
                raise
            if running.placed is not None and running.placed.is_new_conversation:
                removed = running.placed.turn_place.conversation_id
        exchange.values = {**exchange.values, "conversation_id": removed}  # for the audit log
        return {"id": response_id, "object": "response", "deleted": True}

    async def _current_body(self, response_id: str, tenant: str) -> Mapping[str, Any]:
        running = self._running.find(response_id, tenant)
        if running is not None:
            return running.current_body
        stored = await self._history.response(response_id, tenant)
        if stored is None:
            raise NotFound("no such response")
        return await self._stored_body_now(stored)

    async def _stored_body_now(self, stored: StoredResponse) -> Mapping[str, Any]:
        """Return the body of a response that does not run in this process, in its current state."""
        if await self._history.runs(stored):
            return stored.body
        found = await self._history.response(stored.response_id, stored.tenant)
        return body_without_turn((found or stored).body)


class StoredNames:
    """Returns the ids of a stored response's items."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._items: Sequence[Mapping[str, Any]] = body["output"]
        self._calls = [each["call_id"] for each in self._items if each["type"] == "function_call"]

    def item_id(self, prefix: str, part: int = 0) -> str:
        return str(self._items[part]["id"])

    def call_id(self, number: int) -> str:
        return str(self._calls[number])


def _failure_events(
    stream: ResponseStream, running: RunningResponse, error: PensieveError
) -> list[dict[str, Any]]:
    """Return the event of a failed response if the turn has failed; otherwise an error event."""
    if running.body is not None:
        return stream.failed(running.body)
    if isinstance(error, TurnFailed):
        body = failed_body(running.request, running.heading, "server_error", client_text(error))
        return stream.failed(body)
    param = error.field if isinstance(error, InvalidArgument) else None
    return stream.error(shape_of(error).code, client_text(error), param)


def _set_conversation_headers(exchange: Exchange, placed: PlacedTurn) -> None:
    exchange.out["x-pensieve-conversation-id"] = placed.turn_place.conversation_id
    exchange.out["x-pensieve-bound"] = placed.binding
    if placed.recompute_reason:
        exchange.out["x-pensieve-recompute-reason"] = placed.recompute_reason


def _digest_of(new: NewResponse) -> str:
    """Return a digest of the client's request, which does not depend on the server's defaults."""
    request, turn, settings = new.request, new.turn, new.settings
    constraint, given = turn.options.constraint, dict(sorted((turn.given_sampling or {}).items()))
    return digest(
        request.model,
        repr((settings.system_prompt, turn.messages, settings.tools)),
        repr((dict(settings.template_options), given)),
        repr((request.previous_response_id, request.conversation, request.background)),
        repr(None if constraint is None else constraint.identity),
        *((turn.cache_salt,) if turn.cache_salt else ()),  # so digests of older servers stay valid
    )


def _check_key(known: str, requested: str) -> None:
    if known != requested:
        raise reused_key_error()


log = logging.getLogger("pensieve")


class RunningResponse:
    def __init__(self, request: ParsedRequest, heading: Heading, digest: str, tenant: str) -> None:
        self.request, self.heading = request, heading
        self.digest, self.tenant = digest, tenant  # `digest`: of the request
        self.is_cancelled = False
        self.placed: PlacedTurn | None = None
        self.made: dict[str, Any] | None = None  # the body that is stored with the reply
        self.body: dict[str, Any] | None = None  # the final body, set when the turn has ended
        self.begun = asyncio.Event()  # the turn has begun, or will never begin
        self.reader_done = asyncio.Event()  # a reader has stopped: check whether the turn has ended
        self.kept = asyncio.Event()  # the response was stored, or will never be stored

    @property
    def response_id(self) -> str:
        return f"resp_{self.heading.answer_id}"

    @property
    def current_body(self) -> dict[str, Any]:
        if self.body is not None:
            return self.body
        waits = self.placed is None or not self.placed.live.admitted
        is_queued = self.request.background and waits
        return unfinished_body(self.request, self.heading, "queued" if is_queued else "in_progress")


class RunningResponses:
    """Responses whose turn has begun, until the final response is stored.

        begun      the turn runs; clients may read the response, fetch its state, or cancel it
        ended      the turn has ended; the body was stored in the transaction of the reply
        kept       the outcome is stored, or the turn failed; the response is removed from this table

    For each response, a task waits for the end of the turn. For a background response, this task counts as a
    reader, so that the turn continues. If the process dies, a background response stays stored as running. It
    counts as failed when no turn of its conversation runs (`body_without_turn`). Other responses are stored
    with their reply, or not at all. If several daemons share a history, only the daemon that runs the turn
    can end the response.
    """

    def __init__(
        self,
        daemon: Daemon,
        requests: ApiRequests,
        history: ResponseHistory,
        places: ResponsePlaces,
    ) -> None:
        self._daemon, self._requests = daemon, requests
        self._history, self._places = history, places
        self._running: dict[tuple[str, str], RunningResponse] = {}  # by tenant and id

    def find(self, response_id: str, tenant: str) -> RunningResponse | None:
        return self._running.get((tenant, response_id))

    def add(self, running: RunningResponse) -> None:
        self._running[running.tenant, running.response_id] = running

    def forget(self, running: RunningResponse) -> None:
        name = (running.tenant, running.response_id)
        if self._running.get(name) is running:
            del self._running[name]
        running.begun.set()
        running.kept.set()

    async def begin(self, running: RunningResponse, placed: PlacedTurn) -> None:
        """Register a response whose turn has begun. A background response is stored at once."""
        running.placed = placed
        if running.request.background:
            await self._save(running, running.current_body, None)
        self._daemon.threads.spawn(self._keep(running, placed))
        running.begun.set()

    def make_stored(
        self,
        running: RunningResponse,
        turn_place: TurnPlace,
        live: LiveTurn,
        finish: FinishReason,
        tail: str,
    ) -> StoredResponse:
        """Return the response to store in the transaction of the reply."""
        cutter = self._requests.cutter(turn_place.tools)
        running.made = self.final_body(
            running.request, running.heading, turn_place.place, live, cutter, finish, tail
        )
        response_id, tenant = running.response_id, running.tenant
        return stored_response(turn_place, response_id, running.made, running.digest, tenant, None)

    async def cancel(self, running: RunningResponse) -> None:
        """End the turn. The history keeps nothing of it."""
        assert running.placed is not None
        running.is_cancelled = True
        self._daemon.conversations.ends.give_up(running.placed.live)
        await running.kept.wait()

    async def _keep(self, running: RunningResponse, placed: PlacedTurn) -> None:
        live = placed.live
        try:
            await self._until_ended(running, live)
            if live.failure is None:
                running.body = running.made
                if running.body is None:  # a bug prevented the creation of the body
                    running.body = failed_body(
                        running.request, running.heading, "server_error", LOST
                    )
            elif running.request.background:
                running.body = self._without_reply(running, live.failure)
                await self._save(running, running.body, None)
            elif placed.is_new_conversation:
                await self._places.discard(
                    placed.turn_place.conversation_id, live.first_revision, running.tenant
                )
        except Exception:  # a bug; readers must not wait forever
            log.exception("a response could not be ended")
        finally:
            self.forget(running)

    async def _until_ended(self, running: RunningResponse, live: LiveTurn) -> None:
        if running.request.background:
            await self._daemon.conversations.followers.until_ended(live)
            return
        while live.finish is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(running.reader_done.wait(), LOOK_SECONDS)
            running.reader_done.clear()

    def final_body(
        self,
        request: ParsedRequest,
        heading: Heading,
        place: Place,
        live: LiveTurn,
        cutter: ReplyPieces,
        finish: FinishReason | None = None,
        tail: str | None = None,
    ) -> dict[str, Any]:
        """Return the body of a turn that has ended or is about to end. `cutter` must be unused."""
        tokens = live.whole_reply(finish, tail)
        stream = ResponseStream(request, place, self._requests.template.tokenizer, cutter)
        stream.tokens(tokens)
        stream.withheld_events(NO_TOKENS)
        is_cut = (finish or live.finish) is FinishReason.CANCELLED
        items = stream.items(is_whole=tokens.finish is FinishReason.STOP and not is_cut)
        return finished_body(request, heading, tokens, live.prompt, items, is_cut=is_cut)

    def _without_reply(self, running: RunningResponse, failure: PensieveError) -> dict[str, Any]:
        if running.is_cancelled:
            return failed_body(running.request, running.heading, "", "", "cancelled")
        is_refused = isinstance(failure, InvalidArgument)
        code = "invalid_prompt" if is_refused else "server_error"
        return failed_body(running.request, running.heading, code, str(failure))

    async def _save(
        self, running: RunningResponse, body: Mapping[str, Any], revision: int | None
    ) -> None:
        """Store the response. If this fails, the error is only logged."""
        assert running.placed is not None
        turn_place = running.placed.turn_place
        response = stored_response(
            turn_place, running.response_id, body, running.digest, running.tenant, revision
        )
        try:
            await self._history.save(response)
        except NotFound:
            pass  # the conversation was deleted meanwhile
        except PensieveError as error:
            log.error("a response could not be stored: %s", error)


def body_without_turn(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a stored response whose turn does not run. If it is unfinished, it has failed."""
    if stored["status"] in ENDED:
        return dict(stored)
    return {**stored, "status": "failed", "error": {"code": "server_error", "message": LOST}}
