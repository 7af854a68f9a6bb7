"""What the store hears of a turn's end; of an unstored one, nothing.

    finish      its reply is appended to the log, in one transaction
    fail        the engine could not finish it
    interrupt   nobody waits for it any more, or the engine is gone

Awaited by the loop.  `finish` and `fail` raise what the store raises; an `interrupt` that fails is logged,
because the store takes such a turn for interrupted all the same; a history that is another process's hears
of it as soon as it is back (history/connection.py).
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

from pensieve.errors import NotFound, PensieveError
from pensieve.service.history import History
from pensieve.service.live_turn import Committed, LiveTurn, Reply, packed_logprobs
from pensieve.service.readers import ids_of
from pensieve.service.threads import Threads
from pensieve.store.responses import StoredResponse
from pensieve.text import Tokenizer

log = logging.getLogger("pensieve")
NO_REVISION = 0
READ_CHARACTERS_MAX = 16 << 10  # of a reply whose calls the store thread may look for by itself


class TurnEnds:
    def __init__(self, history: History, threads: Threads, tokenizer: Tokenizer) -> None:
        self._history, self._threads, self._tokenizer = history, threads, tokenizer

    async def finish(self, live: LiveTurn, reply: Reply) -> Committed:
        if not live.is_stored:
            return Committed(NO_REVISION, await self._withheld(live, reply))
        if live.logprobs:  # so many that packing them would hold everybody up
            packed = await self._threads.in_text_pool(live.tenant, lambda: packed_logprobs(live))
            reply = replace(reply, logprobs=packed)
        if (chain := reply.chain) is not None and len(reply.text) > READ_CHARACTERS_MAX:
            read = partial(chain.state, reply.text, reply.stream)
            if not reply.is_cut:  # else its text is not known yet
                state = await self._threads.in_text_pool(live.tenant, read)
                reply = replace(reply, chain=None, state=state)
        reply = replace(reply, response=await self._response(live, reply))
        return await self._threads.in_store(live.tenant, self._history.finish, reply)

    async def _response(self, live: LiveTurn, reply: Reply) -> StoredResponse | None:
        """What the store keeps of the turn beside the history, in the same transaction."""
        if live.ask is None or live.ask.response is None:
            return None
        try:
            return live.ask.response(live, reply.finish, await self._withheld(live, reply))
        except Exception:  # a fault of ours; the turn is kept
            log.exception("a response could not be made", extra=ids_of(live))
            return None

    async def fail(self, live: LiveTurn, reason: str) -> None:
        if live.is_stored:
            await self._threads.in_store(
                live.tenant, self._history.fail, live.turn_id, reason, live.attempt
            )

    async def interrupt(self, live: LiveTurn) -> None:
        if not live.is_stored:
            return
        try:
            await self._threads.in_store(
                live.tenant, self._history.interrupt, live.turn_id, live.attempt
            )
        except NotFound:
            pass  # it was deleted meanwhile
        except PensieveError as error:  # the store takes it for interrupted all the same
            log.error("a turn could not be marked interrupted: %s", error, extra=ids_of(live))
        except Exception:  # a fault of ours: its readers must not wait for ever
            log.exception("a turn could not be marked interrupted", extra=ids_of(live))

    async def _withheld(self, live: LiveTurn, reply: Reply) -> str:
        """What a cancel has cut: text of its tokens that its readers were not given."""
        if not reply.is_cut:
            return ""
        tokenizer, token_ids = self._tokenizer, list(reply.token_ids)
        text = await self._threads.in_text_pool(live.tenant, lambda: tokenizer.decode(token_ids))
        return text[len(reply.text) :]
