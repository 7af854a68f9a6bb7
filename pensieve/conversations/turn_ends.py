"""End turns. All transitions from RUNNING to ENDED are here. Belongs to the event loop.

    Turns.begin ──> RUNNING ──engine_ended──> COMMITTING ──the store has the end──> ENDED
                       └──────give_up───────> GIVING_UP ───the store has the end──> ENDED

    `stop` asks the engine to end a RUNNING turn; `engine_ended` follows.

The first call that takes a turn out of RUNNING decides how the turn ends. Later calls and events change
nothing. The calls return at once. The turn has ended when its end is stored. Then the turn is removed from
`Turns`, its `finish` is set, its followers wake, and `TurnEvents.ended` is published, in this order and
without waiting in between.

A turn is *given up* if nothing of it is kept: `give_up`, the phase GIVING_UP. Its row becomes `interrupted`.
Its `finish` is CANCELLED if no client wants it, and FAILED if it cannot run. A turn that is *stopped* is
different: its row becomes `cancelled`, and the history keeps the delivered text.

In the table, *row* is the state of the turn in the store (`StoredTurnState`).

    cause                                  by                       row          followers get  charged
    the engine ended it                    engine_ended             completed    its finish     usage
    its client keeps the delivered text    stop, then engine_ended  cancelled    CANCELLED      usage
    the engine could not finish it         engine_ended             failed       failure_of     nothing
    its reply cannot be stored             engine_ended             unchanged    store's error  usage
    its client keeps nothing of it         give_up                  interrupted  GIVEN_UP       its tokens
    no follower at the end of its grace    give_up                  interrupted  GIVEN_UP       its tokens
    its conversation was deleted           give_up(is_interrupted)  by deletion  GIVEN_UP       its tokens
    deletion, while COMMITTING             engine_ended             by deletion  GIVEN_UP       usage
    another daemon took its conversation   give_up(failure)         interrupted  the failure    nothing
    it or its log cannot be submitted      give_up(failure)         interrupted  the failure    nothing
    the engine is lost                     engine_lost              interrupted  the failure    nothing
    the engine died with it too often      engine_lost              interrupted  ENGINE_DIED    nothing
    the engine failed with it too often    engine_ended             failed       ENGINE_DIED    nothing
    the daemon drains                      give_up_all              interrupted  the failure    nothing

An unstored turn has no row, so the store is left out.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

from pensieve.conversations.admission import Admission
from pensieve.conversations.engine_client import EngineClient
from pensieve.conversations.followers import TurnFollowers, ids_of
from pensieve.conversations.history import History
from pensieve.conversations.live_turn import (
    CommittedReply,
    LiveTurn,
    TurnPhase,
    TurnReply,
    packed_logprobs,
    shared_name,
    stream_of,
    usage_figures,
)
from pensieve.conversations.threads import Threads
from pensieve.conversations.turn_events import TurnEvents
from pensieve.conversations.turns import Turns
from pensieve.core.turn import FinishReason
from pensieve.engine.messages import CancelTurn, TurnEnded
from pensieve.errors import (
    NotFound,
    PensieveError,
    QueueFull,
    TurnFailed,
    TurnInterrupted,
    Unavailable,
)
from pensieve.store.responses import StoredResponse

log = logging.getLogger("pensieve")
NO_REVISION = 0  # of an unstored turn
INLINE_PARSE_CHARACTERS_MAX = 16 << 10  # the text pool parses longer replies for tool calls
GIVEN_UP = "the turn was given up; its conversation is unchanged"


class TurnEnds:
    """Move turns' phases, write their ends to the store, charge tenants, and publish `ended`.

    No other class does any of this.
    """

    def __init__(
        self,
        turns: Turns,
        followers: TurnFollowers,
        history: History,
        threads: Threads,
        engine: EngineClient,
        admission: Admission,
        events: TurnEvents,
    ) -> None:
        self._turns, self._followers, self._history = turns, followers, history
        self._threads, self._engine, self._events = threads, engine, events
        self._admission = admission
        # The engine has failed and has ended all turns. Its process is about to exit.
        self._engine_has_failed = False

    # -- called by others --

    def stop(self, live: LiveTurn, keep_tokens: int | None = None) -> None:
        """Have the engine end a turn, and keep the delivered text or its first `keep_tokens` tokens.

        The turn takes no further token. `keep_tokens=0` gives the turn up.
        """
        if keep_tokens == 0:
            self.give_up(live)
        if live.phase is not TurnPhase.RUNNING:
            return
        if keep_tokens is not None:
            live.kept = min(
                keep_tokens, live.num_tokens
            )  # a second stop never keeps more than the first
        if not live.stopped:
            live.stopped = True
            self._send_stop(live)

    def submitted(self, live: LiveTurn) -> None:
        """Repeat a stop that came before the engine had the turn."""
        if live.stopped:
            self._send_stop(live)

    def give_up(
        self, live: LiveTurn, failure: PensieveError | None = None, *, is_interrupted: bool = False
    ) -> None:
        """End a turn and keep nothing of it. A retry with the same request_id begins it again.

        `failure`: why the turn cannot run. Without a failure, no client wants the turn, and its tenant pays.
        `is_interrupted`: the store has already interrupted the turn, so it ends at once.
        """
        if live.phase is not TurnPhase.RUNNING:
            return
        live.move_to(TurnPhase.GIVING_UP)
        self._engine.try_put(CancelTurn(live.attempt_id, live.history_tokens))
        finish = FinishReason.FAILED
        if failure is None:
            failure, finish = TurnInterrupted(GIVEN_UP), FinishReason.CANCELLED
            self._charge(live)
        if is_interrupted:
            self._end(live, finish, failure)
        else:
            self._threads.spawn(self._interrupt(live, finish, failure), is_sequence=True)

    async def give_up_all(self, failure: PensieveError) -> None:
        """Give up all live turns, and return when they have ended."""
        all_live = self._turns.all_live()
        for live in all_live:
            self.give_up(live, failure)
        for live in all_live:
            await self._followers.until_ended(live)

    # -- the engine's events --

    def engine_ended(self, ended: TurnEnded) -> None:
        """Handle the end of a turn or a warm in the engine."""
        attempt_id, reason = ended.attempt_id, ended.failure or "FAILED"
        live = self._turns.of_attempt(attempt_id)
        if reason == "ENGINE_FAILED":  # a failing engine ends all turns before its process exits
            self._engine_has_failed = True
            if live is not None and self._count_engine_death(live):
                reason = "ENGINE_DIED"
        elif live is not None:
            self._turns.suspects.ended(live)
        if live is None:
            if (tenant := self._turns.end_warm(attempt_id)) is not None:
                num_tokens = ended.usage.new_tokens + ended.usage.recomputed_tokens
                self._admission.charge(tenant, num_tokens, self._threads.loop.time())
        elif live.phase is TurnPhase.RUNNING:
            live.move_to(TurnPhase.COMMITTING)
            live.usage = ended.usage
            has_failed = ended.finish is FinishReason.FAILED
            reply = None if has_failed else _reply(live, ended)
            self._threads.spawn(self._commit(live, reply, reason))

    def engine_lost(self, failure: PensieveError) -> None:
        """Give up all turns and warms, because the engine is gone."""
        self._turns.end_warms()
        had_turns = not self._engine_has_failed  # a failing engine has already ended all turns
        self._engine_has_failed = False
        for live in self._turns.all_live():
            has_too_many_deaths = had_turns and self._count_engine_death(live)
            self.give_up(live, failure_of("ENGINE_DIED") if has_too_many_deaths else failure)

    # -- inside --

    def _send_stop(self, live: LiveTurn) -> None:
        num_tokens = live.history_tokens + live.prompt_tokens + live.num_tokens
        self._engine.try_put(CancelTurn(live.attempt_id, num_tokens))

    def _count_engine_death(self, live: LiveTurn) -> bool:
        """Count a death of the engine for a turn that it had. Return whether the turn has too many deaths."""
        if live.phase is not TurnPhase.RUNNING or not self._turns.suspects.engine_died(live):
            return False
        log.error("the engine has died repeatedly while it had this turn", extra=ids_of(live))
        return True

    async def _interrupt(
        self, live: LiveTurn, finish: FinishReason, failure: PensieveError
    ) -> None:
        await self._store_interruption(live)
        self._end(live, finish, failure)

    async def _commit(self, live: LiveTurn, reply: TurnReply | None, reason: str) -> None:
        """Write the end of a turn: its reply, or the reason why there is none."""
        finish, failure = FinishReason.FAILED, None if reply else failure_of(reason)
        try:
            if reply is None and live.is_stored:
                await self._threads.in_store(
                    *(live.tenant, self._history.fail, live.turn_id, reason, live.attempt),
                    lane=live.conversation_id,
                )
            elif reply is not None:
                committed = await self._store_reply(live, reply)
                finish, live.revision, live.tail = reply.finish, committed.revision, committed.tail
        except NotFound:  # its conversation was deleted in the meantime
            finish, failure = FinishReason.CANCELLED, TurnInterrupted(GIVEN_UP)
        except PensieveError as error:
            log.error("a turn could not be stored: %s", error, extra=ids_of(live))
            failure = error
        except Exception:  # a bug: the followers must not wait for ever
            log.exception("a turn could not be ended", extra=ids_of(live))
            await self._store_interruption(live)
            finish = FinishReason.FAILED
            failure = TurnFailed("INTERNAL", "the turn could not be ended")
        if live.figures:  # a failed turn has none and costs nothing
            self._charge(live)
        self._end(live, finish, failure)

    def _end(self, live: LiveTurn, finish: FinishReason, failure: PensieveError | None) -> None:
        self._turns.remove(live)
        live.move_to(TurnPhase.ENDED)
        live.failure = failure
        live.finish = finish
        self._followers.wake(live.attempt_id)
        self._events.ended(live, self._threads.loop.time())

    def _charge(self, live: LiveTurn) -> None:
        now = self._threads.loop.time()
        self._admission.charge(live.tenant, live.num_charged_tokens, now)

    # -- the store --

    async def _store_reply(self, live: LiveTurn, reply: TurnReply) -> CommittedReply:
        """Append the reply to the log, in one transaction; nothing is stored for an unstored turn."""
        if not live.is_stored:
            return CommittedReply(NO_REVISION, await self._withheld(live, reply))
        if live.reply.logprobs:  # packing them may take long
            packed = await self._threads.in_text_pool(live.tenant, lambda: packed_logprobs(live))
            reply = replace(reply, logprobs=packed)
        if (chain := reply.chain) is not None and len(reply.text) > INLINE_PARSE_CHARACTERS_MAX:
            compute_state = partial(chain.state, reply.content, reply.stream)
            if not reply.is_cut:  # the text of a cut reply is not known yet
                state = await self._threads.in_text_pool(live.tenant, compute_state)
                reply = replace(reply, chain=None, state=state)
        reply = replace(reply, response=await self._response(live, reply))
        return await self._threads.in_store(
            live.tenant, self._history.finish, reply, lane=live.conversation_id
        )

    async def _response(self, live: LiveTurn, reply: TurnReply) -> StoredResponse | None:
        """Make the response that the store keeps beside the history, in the same transaction."""
        if live.request is None or live.request.response is None:
            return None
        try:
            return live.request.response(live, reply.finish, await self._withheld(live, reply))
        except Exception:  # a bug; the turn is kept
            log.exception("a response could not be made", extra=ids_of(live))
            return None

    async def _withheld(self, live: LiveTurn, reply: TurnReply) -> str:
        """Return the text of kept tokens that a stopped turn has withheld and not sent."""
        if not reply.is_cut:
            return ""
        tokenizer, token_ids = self._turns.tokenizer, list(reply.token_ids)
        is_first = not reply.begins
        text = await self._threads.in_text_pool(
            live.tenant, lambda: tokenizer.decode(token_ids, is_first=is_first)
        )
        return text[len(reply.text) :]

    async def _store_interruption(self, live: LiveTurn) -> None:
        """Mark a turn interrupted.

        Errors are only logged, because the store reads a `running` row without a live turn as interrupted.
        """
        if not live.is_stored:
            return
        try:
            await self._threads.in_store(
                *(live.tenant, self._history.interrupt, live.turn_id, live.attempt),
                lane=live.conversation_id,
            )
        except NotFound:
            pass  # its conversation was deleted in the meantime
        except PensieveError as error:
            log.error("a turn could not be marked interrupted: %s", error, extra=ids_of(live))
        except Exception:  # a bug: the followers must not wait for ever
            log.exception("a turn could not be marked interrupted", extra=ids_of(live))


def _reply(live: LiveTurn, ended: TurnEnded) -> TurnReply:
    """Make the reply of a turn that the engine has ended, and set the turn's figures."""
    if ended.usage.recomputed_tokens:
        live.figures["recompute_reason"] = live.recompute_reason
    if ended.usage.shared_tokens:
        live.figures["shared_from"] = shared_name(ended.usage.shared_from)
    live.figures |= usage_figures(ended.usage) | {"output_tokens": live.num_tokens}
    has_all = live.num_tokens == ended.usage.output_tokens  # a stop has cut no token
    return TurnReply(
        live.turn_id,
        tuple(live.reply.token_ids[: live.kept]),
        live.text,
        stream_of(live),
        FinishReason.CANCELLED if live.stopped else ended.finish,
        dict(live.figures),
        is_cut=live.stopped and (ended.finish is not FinishReason.STOP or not has_all),
        chain=None if live.request is None else live.request.chain,
        attempt=live.attempt,
        begins="" if live.request is None else live.request.reply_begins,
    )


def failure_of(reason: str) -> PensieveError:
    """Return the error for followers, by the engine's reason why it could not finish a turn."""
    if reason == "QUEUE_FULL":
        return QueueFull("too many turns are waiting; retry later")
    if reason in ("ENGINE_FAILED", "TURN_RUNNING"):
        return Unavailable("the engine could not run the turn; the conversation is unchanged")
    text = f"the turn failed ({reason}); the conversation is unchanged"
    if reason == "NAN_LOGITS":
        text = "the model computed values that are not numbers; the conversation is unchanged"
    if reason == "CONSTRAINT_FAILED":
        text = "the constraint could not be enforced on the reply; the conversation is unchanged"
    if reason == "ENGINE_DIED":
        text = "the engine died repeatedly while it had this turn; the conversation is unchanged"
    return TurnFailed(reason, text)
