"""Responses whose turn has begun and that are not stored yet, and how each comes to its end.

    begun      its turn runs; whoever knows its id may read it, fetch its state, or cancel it
    ended      so has its turn: the whole answer was made of it, and stored in the reply's transaction
    kept       its turn's end is known, or the turn came to nothing and what was made for it is deleted; here
               it is forgotten

A task of its own waits for the end of the turn, whether somebody reads or not.  Of a response in the
background it is a reader that takes nothing, so that the turn goes on.  What lives here does not outlive the
process: then a response in the background is stored as one that runs, and is taken for one that has failed
(`as_it_is_now`) once no turn of its conversation runs; any other is stored with its turn's reply or, as that,
not at all.  Where several daemons share a history its turn may run at another one, which alone can end it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any

from pensieve.core.turn import FinishReason
from pensieve.errors import InvalidArgument, NotFound, PensieveError
from pensieve.service.daemon import Daemon
from pensieve.service.http.bodies import Bodies
from pensieve.service.http.replies import prompt_of, reply_of
from pensieve.service.http.response_places import Placed, ResponsePlaces, Where, stored_response
from pensieve.service.live_turn import LiveTurn
from pensieve.service.openai import Heading, Request
from pensieve.service.openai.item_ids import Place
from pensieve.service.openai.response_stream import (
    ENDED,
    ResponseStream,
    failed,
    finished,
    unfinished,
)
from pensieve.service.stored_responses import StoredResponses
from pensieve.store.responses import StoredResponse
from pensieve.text.reply_pieces import ReplyPieces

log = logging.getLogger("pensieve")
LOOK_SECONDS = 0.5  # how often a turn without a reader is looked at
LOST = "the server stopped before the response was complete"


class Running:
    """A response whose turn has begun."""

    def __init__(self, request: Request, heading: Heading, digest: str, tenant: str) -> None:
        self.request, self.heading = request, heading
        self.digest, self.tenant = digest, tenant  # the digest: of what was asked for
        self.is_cancelled = False
        self.placed: Placed | None = None
        self.made: dict[str, Any] | None = None  # what is stored with the reply
        self.body: dict[str, Any] | None = None  # once it has ended
        self.begun = asyncio.Event()  # or it will never
        self.has_ended = asyncio.Event()  # its turn, as a reader knows
        self.kept = asyncio.Event()

    @property
    def response_id(self) -> str:
        return f"resp_{self.heading.answer_id}"

    @property
    def present(self) -> dict[str, Any]:
        """The response as it is now."""
        if self.body is not None:
            return self.body
        waits = self.placed is None or not self.placed.live.admitted
        is_queued = self.request.background and waits
        return unfinished(self.request, self.heading, "queued" if is_queued else "in_progress")


class RunningResponses:
    """Belongs to the loop."""

    def __init__(
        self, daemon: Daemon, bodies: Bodies, stored: StoredResponses, places: ResponsePlaces
    ) -> None:
        self._daemon, self._bodies = daemon, bodies
        self._stored, self._places = stored, places
        self._running: dict[tuple[str, str], Running] = {}  # by tenant and id

    def find(self, response_id: str, tenant: str) -> Running | None:
        return self._running.get((tenant, response_id))

    def add(self, running: Running) -> None:
        """Its turn is about to begin."""
        self._running[running.tenant, running.response_id] = running

    def forget(self, running: Running) -> None:
        name = (running.tenant, running.response_id)
        if self._running.get(name) is running:
            del self._running[name]
        running.begun.set()
        running.kept.set()

    async def begin(self, running: Running, placed: Placed) -> None:
        """Its turn has begun; one in the background is stored first, so that it can be fetched later."""
        running.placed = placed
        if running.request.background:
            await self._save(running, running.present, None)
        self._daemon.threads.spawn(self._keep(running, placed))
        running.begun.set()

    def ended(
        self, running: Running, where: Where, live: LiveTurn, finish: FinishReason, tail: str
    ) -> StoredResponse:
        """What is stored in the transaction of its reply."""
        cutter = self._bodies.pieces_of(where.tools)
        running.made = self.whole(
            running.request, running.heading, where.place, live, cutter, finish, tail
        )
        response_id, tenant = running.response_id, running.tenant
        return stored_response(where, response_id, running.made, running.digest, tenant, None)

    async def cancel(self, running: Running) -> None:
        """Its turn leaves nothing."""
        assert running.placed is not None
        running.is_cancelled = True
        await self._daemon.conversations.drop(running.placed.live)
        await running.kept.wait()

    async def _keep(self, running: Running, placed: Placed) -> None:
        live = placed.live
        try:
            await self._until_ended(running, live)
            if live.failure is None:
                running.body = running.made
                if running.body is None:  # a fault of ours when it was to be made
                    running.body = failed(running.request, running.heading, "server_error", LOST)
            elif running.request.background:
                running.body = self._without_reply(running, live.failure)
                await self._save(running, running.body, None)
            elif placed.is_made:
                await self._places.discard(
                    placed.where.conversation_id, live.first_revision, running.tenant
                )
        except Exception:  # a fault of ours: its readers must not wait for ever
            log.exception("a response could not be ended")
        finally:
            self.forget(running)

    async def _until_ended(self, running: Running, live: LiveTurn) -> None:
        if running.request.background:
            with contextlib.suppress(PensieveError):
                await self._daemon.conversations.follow(live, _take_nothing)
            return
        while live.finish is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(running.has_ended.wait(), LOOK_SECONDS)
            running.has_ended.clear()

    def whole(
        self,
        request: Request,
        heading: Heading,
        place: Place,
        live: LiveTurn,
        cutter: ReplyPieces,
        finish: FinishReason | None = None,
        tail: str | None = None,
    ) -> dict[str, Any]:
        """The answer, of a turn that has ended, or is about to; `cutter` has seen nothing of it."""
        reply = reply_of(live, finish, tail)
        stream = ResponseStream(request, place, self._bodies.template.tokenizer)
        stream.tokens(cutter, reply)
        stream.pieces(cutter.end())
        is_cut = (finish or live.finish) is FinishReason.CANCELLED
        items = stream.items(is_whole=reply.finish is FinishReason.STOP and not is_cut)
        return finished(request, heading, reply, prompt_of(live), items, is_cut=is_cut)

    def _without_reply(self, running: Running, failure: PensieveError) -> dict[str, Any]:
        if running.is_cancelled:
            return failed(running.request, running.heading, "", "", "cancelled")
        is_refused = isinstance(failure, InvalidArgument)
        code = "invalid_prompt" if is_refused else "server_error"
        return failed(running.request, running.heading, code, str(failure))

    async def _save(self, running: Running, body: Mapping[str, Any], revision: int | None) -> None:
        """Its turn is in the history, whatever becomes of this."""
        assert running.placed is not None
        where = running.placed.where
        response = stored_response(
            where, running.response_id, body, running.digest, running.tenant, revision
        )
        try:
            await self._stored.save(response)
        except NotFound:
            pass  # its conversation was deleted meanwhile
        except PensieveError as error:
            log.error("a response could not be stored: %s", error)


def as_it_is_now(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A stored response whose turn does not run here."""
    if stored["status"] in ENDED:
        return dict(stored)
    return {**stored, "status": "failed", "error": {"code": "server_error", "message": LOST}}


async def _take_nothing(start: int, stop: int) -> None:
    """Of the tokens."""
