"""Run conversations' operations, step by step between the event loop and the store thread.

A coroutine here sends a job to the store thread (history.py) and acts on the result before it waits for
anything else. So the loop acts in the order of the store's jobs (threads.py). This order matters:

* **A turn begins** in the store. Then it is live, and its SubmitTurn goes to the engine. If the engine does
  not take it, another job interrupts the turn. A retry with the same request_id finds the turn `running` and
  live. If the turn is no longer live, it ended meanwhile, and the request is drafted again.
* **A turn ends** in the store. Then `finish` is set and its readers wake.
* **A deletion** interrupts the running turn and deletes, in one job. Then the live turn ends, and
  DeleteConversation goes to the engine before the SubmitTurn of any later turn with the same conversation id.
  If the end of the turn is on its way to the store, its job finds the turn gone. The engine's client never
  refuses a DeleteConversation.
* **A fork or a rewind** goes to the engine after its job, and before the SubmitTurn of any turn that begins
  after it. If the message is lost, nothing breaks: a turn says how long its log is, and the engine asks for
  the tokens that it lacks.
* **Events** whose number is not live are ignored: they are of warms, or of attempts that were given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pensieve.conversations.admission import Admission
from pensieve.conversations.daemon_config import DaemonConfig, Sources
from pensieve.conversations.declared_prefixes import DeclaredPrefixes, Warming
from pensieve.conversations.draft import Draft, OutdatedTokens, TurnRequest
from pensieve.conversations.engine_client import EngineClient
from pensieve.conversations.heads import ConversationSettings
from pensieve.conversations.history import History
from pensieve.conversations.housekeeping import erased
from pensieve.conversations.live_turn import (
    CommittedReply,
    KnownTurn,
    LiveTurn,
    StartedTurn,
    TurnPhase,
    TurnReply,
    cache_key,
    names_of,
    packed_logprobs,
    replayed,
)
from pensieve.conversations.meter import Latencies
from pensieve.conversations.readers import ReaderLimits, Readers, Write, ids_of
from pensieve.conversations.threads import Threads
from pensieve.conversations.tokenizing import Tokenizing
from pensieve.conversations.turn_events import TurnEvents
from pensieve.conversations.turns import TurnEnding, Turns, failure_of
from pensieve.conversations.unstored import UnstoredTurns
from pensieve.core.iteration import SampledToken
from pensieve.core.turn import FinishReason
from pensieve.engine.messages import (
    CancelTurn,
    DeleteConversation,
    ForkConversation,
    LogNeeded,
    RewindConversation,
    TurnAdmitted,
    TurnEnded,
)
from pensieve.errors import (
    ContextFull,
    NotFound,
    PensieveError,
    StaleRevision,
    TurnFailed,
    TurnInterrupted,
    TurnRunning,
)
from pensieve.guard.limits import Counts
from pensieve.store import records
from pensieve.store.declared_prefixes import stored_id
from pensieve.store.responses import StoredResponse

log = logging.getLogger("pensieve")
LOOKUPS_MAX = 16  # of a tenant at once, of requests that may not begin a turn
NO_REVISION = 0  # of an unstored turn
READ_CHARACTERS_MAX = 16 << 10  # of a reply whose calls the store thread may look for by itself
DRAFTS_MAX = 3  # of a request whose turn was running and is not live any more
GIVEN_UP = "the turn was given up; its conversation is unchanged"


class _FirstToken(Exception):
    """It has come; no more is to be read."""


async def take_nothing(start: int, stop: int) -> None:
    """Of the tokens, as a reader that waits for the end alone."""


class ArrivingTurns:
    """Turns that are about to begin: drafted, tokenized, or waiting for the store thread.

    They count towards the limits of the daemon and of their tenant, and so do their characters.  Of requests
    with the same request_id, one begins after the other.
    """

    def __init__(self) -> None:
        self.num_turns = 0
        self._of_tenant = Counts[str]()
        self.num_characters = Counts[str]()  # that wait to be tokenized or stored, by tenant
        self._requests: dict[int, TurnRequest] = {}  # as they came, by their identity
        # By tenant, conversation (empty: any) and request_id: until the request has begun its turn.
        self._beginning: dict[tuple[str, str, str], asyncio.Event] = {}

    def add(self, request: TurnRequest) -> None:
        self.num_turns += 1
        self._requests[id(request)] = request
        self._of_tenant[request.tenant] += 1
        self.num_characters[request.tenant] += request.num_characters
        self._enter(request.tenant, request.conversation_id, request.request_id)

    def remove(self, request: TurnRequest) -> None:
        self.num_turns -= 1
        self._requests.pop(id(request), None)
        self._of_tenant[request.tenant] -= 1
        self.num_characters[request.tenant] -= request.num_characters
        self._leave(request.tenant, request.conversation_id, request.request_id)

    async def gone(self, tenant: str, conversation_id: str, request_id: str) -> None:
        """Wait until no other call of this request is about to begin its turn."""
        while (other := self._beginning.get((tenant, conversation_id, request_id))) is not None:
            await other.wait()

    @contextlib.asynccontextmanager
    async def alone(self, tenant: str, request_id: str) -> AsyncIterator[None]:
        """Let no other call of this request look for its turn meanwhile, in any conversation."""
        await self.gone(tenant, "", request_id)
        self._enter(tenant, "", request_id)
        try:
            yield
        finally:
            self._leave(tenant, "", request_id)

    def requests(self) -> Collection[TurnRequest]:
        """In the order in which they came."""
        return self._requests.values()

    def num_of_tenant(self, tenant: str) -> int:
        return self._of_tenant[tenant]

    def has_request(self, tenant: str, conversation_id: str, request_id: str) -> bool:
        return (tenant, conversation_id, request_id) in self._beginning

    def _enter(self, tenant: str, conversation_id: str, request_id: str) -> None:
        if request_id:
            self._beginning[tenant, conversation_id, request_id] = asyncio.Event()

    def _leave(self, tenant: str, conversation_id: str, request_id: str) -> None:
        begun = self._beginning.pop((tenant, conversation_id, request_id), None)
        if begun is not None:
            begun.set()


class Conversations:
    def __init__(
        self,
        history: History,
        threads: Threads,
        engine: EngineClient,
        admission: Admission,
        events: TurnEvents,
        arriving: ArrivingTurns,
        config: DaemonConfig,
        sources: Sources,
    ) -> None:
        self.turns = Turns(history.tokenizer, sources.wall_clock())
        self.latencies = Latencies()
        self.arriving = arriving
        self.readers = Readers(
            threads.loop,
            ReaderLimits(config.grace_seconds, config.stall_seconds, config.undelivered_tokens_max),
            lambda live: threads.spawn(self._give_up(live)),
        )
        self.unstored = UnstoredTurns(self.turns, self.readers, threads.loop, engine, admission)
        self.tokenizing = Tokenizing(history, threads, admission)
        self.warming = Warming(history, self.turns, threads, engine, admission, self.tokenizing)
        self.prefixes = DeclaredPrefixes(
            history, threads, self.warming, self.tokenizing, admission, sources.wall_clock
        )
        self._history, self._threads, self._engine = history, threads, engine
        self._admission, self._events = admission, events
        self._short_characters = config.short_characters
        self._num_lookups = Counts[str]()
        self._engine_has_failed = False  # and has ended its turns itself; its end comes in a moment

    # -- conversations --

    async def create(self, settings: ConversationSettings) -> records.Conversation:
        if settings.messages:
            return await self.prefixes.begin_with_history(settings)
        num_tokens = await self.tokenizing.run(
            settings.tenant, lambda: self._history.check_settings(settings)
        )
        self.tokenizing.charge(settings.tenant, num_tokens)
        while True:
            found = await self._threads.in_store(
                settings.tenant, self._history.create, settings, lane=settings.conversation_id
            )
            if not isinstance(found, OutdatedTokens):
                return found
            await self.tokenizing.renew(found)  # its declared prefix

    async def fork(
        self,
        source_id: str,
        new_id: str,
        at_revision: int | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        tenant: str = "",
    ) -> records.Conversation:
        async def sequence() -> records.Conversation:
            fork = await self._threads.in_store(
                tenant,
                self._history.fork,
                source_id,
                new_id,
                at_revision,
                metadata=metadata,
                tenant=tenant,
                lane=source_id,  # the engine hears of it in the order of what changes the source
            )
            source, target = cache_key(tenant, source_id), cache_key(tenant, new_id)
            self._engine.tell(ForkConversation(source, fork.num_tokens, target))
            return fork

        return await self._threads.whole(sequence())

    async def rewind(
        self,
        conversation_id: str,
        to_revision: int,
        expected_revision: int | None = None,
        *,
        tenant: str = "",
    ) -> records.Conversation:
        """StaleRevision unless it is at the expected revision; None accepts any."""

        async def sequence() -> records.Conversation:
            rewound = await self._threads.in_store(
                tenant,
                self._history.rewind,
                *(conversation_id, to_revision, expected_revision),
                tenant=tenant,
                lane=conversation_id,
            )
            self._engine.tell(
                RewindConversation(cache_key(tenant, conversation_id), rewound.num_tokens)
            )
            return rewound

        return await self._threads.whole(sequence())

    async def delete_last(
        self, seen: records.Conversation, pending: Sequence[records.NewMessage]
    ) -> records.Conversation:
        """Delete the last message of a conversation; StaleRevision if it is no longer as it was seen.

        `pending` are the pending messages that were seen.  Returns when what was deleted is erased.
        """

        async def sequence() -> records.Conversation:
            deleted = await self._threads.in_store(
                *(seen.tenant, self._history.delete_last, seen, pending),
                lane=seen.conversation_id,
            )
            left = deleted.conversation
            if deleted.is_rewound:
                key = cache_key(left.tenant, left.conversation_id)
                self._engine.tell(RewindConversation(key, left.num_tokens))
            if deleted.is_erasure_due:
                await erased(self._history.finish_erasure, self._threads)
            return left

        return await self._threads.whole(sequence())

    async def delete_prefix(self, prefix_id: str, tenant: str = "") -> None:
        """Conversations under it stay whole, and keep the KV that they share."""
        try:
            await self.delete(stored_id(prefix_id), tenant)
        except NotFound:
            raise NotFound(f"there is no prefix {prefix_id!r}") from None

    async def delete(
        self, conversation_id: str, tenant: str = "", unused_since: int | None = None
    ) -> None:
        async def sequence() -> None:
            deleted = await self._threads.in_store(
                *(tenant, self._history.delete, conversation_id, tenant, unused_since),
                lane=conversation_id,
            )
            live = None if deleted.turn_id is None else self.turns.of_turn(deleted.turn_id)
            if live is not None and (cancel := self.turns.interrupt(live)) is not None:
                self._engine.tell(cancel)
                self._charge(live)
                self._fail(live, TurnInterrupted(GIVEN_UP), FinishReason.CANCELLED)
            if not isinstance(deleted.error, NotFound):
                self._engine.tell(DeleteConversation(cache_key(tenant, conversation_id)))
            if deleted.is_pending:
                await erased(self._history.finish_erasure, self._threads)
            if deleted.error is not None:
                try:
                    raise deleted.error
                finally:
                    del deleted  # as in `Threads.whole`

        await self._threads.whole(sequence())

    # -- a turn begins, is followed, and is cancelled --

    async def begin(self, request: TurnRequest) -> LiveTurn:
        """A turn of a conversation, begun now or known by its request_id."""
        self.arriving.add(request)
        return await self._threads.whole(self._begin(request, self._threads.loop.time()))

    def attach(self, request: TurnRequest) -> LiveTurn | None:
        """The live turn of this very request; it has a reader in a moment."""
        live = self.turns.of_request(request) if request.request_id else None
        if live is not None:
            self.readers.start_grace(live)
        return live

    async def known(self, request: TurnRequest) -> LiveTurn | None:
        """The turn of a request that came before, if it runs or has its reply."""
        if not request.request_id or self._num_lookups[request.tenant] == LOOKUPS_MAX:
            return None
        self._num_lookups[request.tenant] += 1
        try:
            known = await self._threads.in_store(
                request.tenant, self._history.known, request, lane=request.conversation_id
            )
        except NotFound:
            return None
        finally:
            self._num_lookups[request.tenant] -= 1
        if known is None:
            return None
        return (
            replayed(known.turn, known.reply) if known.reply is not None else self.attach(request)
        )

    async def _begin(self, request: TurnRequest, arrived_at: float) -> LiveTurn:
        try:
            live = await self._begun_or_known(request, arrived_at)
        finally:
            self.arriving.remove(request)
        self.readers.start_grace(live)  # until its first reader comes
        return live

    async def _begun_or_known(self, request: TurnRequest, arrived_at: float) -> LiveTurn:
        num_drafts = 0
        while True:
            try:
                found = await self._in_store(request)
            except StaleRevision:
                if request.expected_revision is not None:
                    raise
                continue  # another turn or rewind came between; look again
            live = self.turns.of_turn(found.turn.turn_id)
            if isinstance(found, StartedTurn):
                if (
                    live is None or live.attempt != found.turn.attempts
                ):  # else known; its answer was lost
                    return await self._submit(found, arrived_at)
            elif found.reply is not None:
                return replayed(found.turn, found.reply)
            if live is not None and live.phase is not TurnPhase.INTERRUPTING:
                return live
            num_drafts += 1
            if num_drafts == DRAFTS_MAX:
                raise TurnRunning(found.turn.conversation_id, str(found.turn.turn_id))

    async def _in_store(self, request: TurnRequest) -> StartedTurn | KnownTurn:
        """One hop where there is little to tokenize; else that is done between two."""
        history, threads = self._history, self._threads
        while True:
            found = await threads.in_store(
                *(request.tenant, history.start, request, self._short_characters),
                lane=request.conversation_id,
            )
            if not isinstance(found, OutdatedTokens):
                break
            await self.tokenizing.renew(found)
        if not isinstance(found, Draft):
            return found
        prompt = await self.tokenizing.run(request.tenant, found.prompt)
        try:
            return await threads.in_store(
                request.tenant, history.begin, found, prompt, lane=request.conversation_id
            )
        except ContextFull:
            self.tokenizing.charge(request.tenant, sum(map(len, prompt)))
            raise

    async def _submit(self, begun: StartedTurn, arrived_at: float) -> LiveTurn:
        now = self._threads.loop.time()
        weight = self._admission.weight_of(begun.turn.tenant, now)
        live, submit = self.turns.begin(begun, now, weight)
        live.arrived_at = arrived_at
        try:
            await self._events.begun(live)
            if live.phase is TurnPhase.RUNNING:
                self._admission.prompts.submitted(live)
                self.turns.check_suspect(live)
                if submit.prefix_of and not begun.may_share():
                    submit = replace(submit, prefix_of="", prefix_tokens=0)
                self._engine.put(submit)
        except PensieveError as error:
            await self.interrupt(live, error)
            raise
        if live.cancelled:  # before the engine had it
            self._engine.tell(CancelTurn(live.number, submit.history_tokens + live.prompt_tokens))
        return live

    async def follow(self, live: LiveTurn, write: Write = take_nothing) -> None:
        """Have `write` deliver tokens [start, stop) of a turn, from the first on, until it has ended."""
        await self.readers.follow(live, write)

    async def prompt_computed(self, live: LiveTurn) -> None:
        """Read a turn until it has its first token or has ended; if it has failed, its error.

        Other choices of the same prompt begin behind that, since the engine then has the prompt's KV.
        """

        async def write(start: int, stop: int) -> None:
            raise _FirstToken

        with contextlib.suppress(_FirstToken):
            await self.readers.follow(live, write)

    def cancel(self, live: LiveTurn, keep_tokens: int | None = None) -> None:
        """End a turn and keep what was delivered, or that many tokens of it."""
        self._engine.tell(self.turns.cancel(live, keep_tokens))

    async def drop(self, live: LiveTurn) -> None:
        """End a turn and keep nothing of it, because its client wants that."""
        await self._threads.whole(
            self.interrupt(live, TurnInterrupted(GIVEN_UP), FinishReason.CANCELLED)
        )

    # -- a turn ends --

    def take(self, events: list[SampledToken | TurnAdmitted | TurnEnded | LogNeeded]) -> None:
        """What the engine says of turns, in its order."""
        longer: dict[int, LiveTurn] = {}
        for event in events:
            if isinstance(event, SampledToken):
                if (live := self.turns.take(event)) is not None:
                    longer[event.turn_id] = live
            elif isinstance(event, TurnEnded):
                if (ending := self.turns.end(self._judged(event))) is not None:
                    self._threads.spawn(self._commit(ending))
                elif (tenant := self.turns.end_warm(event.turn_id)) is not None:
                    usage = event.usage
                    self.tokenizing.charge(tenant, usage.new_tokens + usage.recomputed_tokens)
            elif isinstance(event, TurnAdmitted):
                if (live := self.turns.admit(event.turn_id, event.missing_tokens)) is not None:
                    self._events.admitted(live, event.missing_tokens)
            else:
                self._threads.spawn(self._provide_log(event))
        now = self._threads.loop.time()
        for number, live in longer.items():
            if live.num_tokens and not live.num_timed:
                self._events.first_token(live)
                if not live.is_stored:
                    self.unstored.prompt_computed(live)
            self.latencies.came(live, now)
            self.readers.wake(number)

    def _judged(self, ended: TurnEnded) -> TurnEnded:
        """An engine that fails ends its turns itself before it dies; for them that is a death."""
        live = self.turns.of_number(ended.turn_id)
        if ended.failure == "ENGINE_FAILED":
            self._engine_has_failed = True
            return replace(ended, failure="ENGINE_DIED") if self._dies_of(live) else ended
        if live is not None:
            self.turns.suspects.ended(live)
        return ended

    def engine_lost(self, failure: PensieveError) -> None:
        """The engine is gone: so are its turns."""
        self.turns.engine_lost()
        had_the_rest = not self._engine_has_failed  # else it has ended all that it had
        self._engine_has_failed = False
        for live in self.turns.all_live():
            if had_the_rest and self._dies_of(live):
                self._threads.spawn(self.interrupt(live, failure_of("ENGINE_DIED")))
        self._threads.spawn(self.interrupt_all(failure))

    def _dies_of(self, live: LiveTurn | None) -> bool:
        """The engine died and had this turn: whether that was once too often."""
        if live is None or live.phase is not TurnPhase.RUNNING:
            return False
        if not self.turns.suspects.engine_died(live):
            return False
        log.error("the engine dies whenever it has this turn", extra=ids_of(live))
        return True

    async def _provide_log(self, needed: LogNeeded) -> None:
        """A turn that cannot have its log cannot run, and would wait for it without end."""
        try:
            tenant, conversation_id = names_of(needed.conversation_id)
            self._engine.put(
                await self._threads.in_store(
                    tenant, self._history.log_for, needed, lane=conversation_id
                )
            )
        except Exception as error:
            if not isinstance(error, PensieveError):  # a fault of ours
                log.exception("a log could not be provided")
                error = TurnFailed("INTERNAL", f"the log could not be read: {error}")
            live = self.turns.of_number(needed.turn_id)
            if live is not None:
                await self.interrupt(live, error)
            else:
                self._engine.tell(CancelTurn(needed.turn_id, 0))  # a warm

    async def _commit(self, ending: TurnEnding) -> None:
        """The engine has ended a turn: so does the store, and then its readers see it."""
        live, reply = ending.live, ending.reply
        try:
            if reply is None:
                await self._store_failure(live, ending.failure)
                self._fail(live, failure_of(ending.failure))
            else:
                committed = await self._store_reply(live, reply)
                self.turns.finish(live, reply, committed)
                self._engine.tell(committed.lent)
                self._ended(live)
        except NotFound:  # its conversation was deleted meanwhile
            self._fail(live, TurnInterrupted(GIVEN_UP), FinishReason.CANCELLED)
        except PensieveError as error:
            log.error("a turn could not be stored: %s", error, extra=ids_of(live))
            self._fail(live, error)
        except Exception:  # a fault of ours: its readers must not wait for ever
            log.exception("a turn could not be ended", extra=ids_of(live))
            await self._store_interruption(live)
            self._fail(live, TurnFailed("INTERNAL", "the turn could not be ended"))
        if live.figures:  # a turn that failed costs nothing
            self._charge(live)

    async def _store_reply(self, live: LiveTurn, reply: TurnReply) -> CommittedReply:
        """Append the reply to the log, in one transaction; of an unstored turn nothing is stored."""
        if not live.is_stored:
            return CommittedReply(NO_REVISION, await self._withheld(live, reply))
        if live.logprobs:  # so many that packing them would hold everybody up
            packed = await self._threads.in_text_pool(live.tenant, lambda: packed_logprobs(live))
            reply = replace(reply, logprobs=packed)
        if (chain := reply.chain) is not None and len(reply.text) > READ_CHARACTERS_MAX:
            read = partial(chain.state, reply.text, reply.stream)
            if not reply.is_cut:  # else its text is not known yet
                state = await self._threads.in_text_pool(live.tenant, read)
                reply = replace(reply, chain=None, state=state)
        reply = replace(reply, response=await self._response(live, reply))
        return await self._threads.in_store(
            live.tenant, self._history.finish, reply, lane=live.conversation_id
        )

    async def _response(self, live: LiveTurn, reply: TurnReply) -> StoredResponse | None:
        """What the store keeps of the turn beside the history, in the same transaction."""
        if live.request is None or live.request.response is None:
            return None
        try:
            return live.request.response(live, reply.finish, await self._withheld(live, reply))
        except Exception:  # a fault of ours; the turn is kept
            log.exception("a response could not be made", extra=ids_of(live))
            return None

    async def _withheld(self, live: LiveTurn, reply: TurnReply) -> str:
        """What a cancel has cut: text of its tokens that its readers were not given."""
        if not reply.is_cut:
            return ""
        tokenizer, token_ids = self.turns.tokenizer, list(reply.token_ids)
        text = await self._threads.in_text_pool(live.tenant, lambda: tokenizer.decode(token_ids))
        return text[len(reply.text) :]

    async def _store_failure(self, live: LiveTurn, reason: str) -> None:
        if live.is_stored:
            await self._threads.in_store(
                *(live.tenant, self._history.fail, live.turn_id, reason, live.attempt),
                lane=live.conversation_id,
            )

    async def _store_interruption(self, live: LiveTurn) -> None:
        """Nobody waits for the turn any more, or the engine is gone.

        An error is only logged: the store takes such a turn for interrupted all the same, and a history of
        another process hears of it as soon as that is back (history/connection.py).
        """
        if not live.is_stored:
            return
        try:
            await self._threads.in_store(
                *(live.tenant, self._history.interrupt, live.turn_id, live.attempt),
                lane=live.conversation_id,
            )
        except NotFound:
            pass  # it was deleted meanwhile
        except PensieveError as error:
            log.error("a turn could not be marked interrupted: %s", error, extra=ids_of(live))
        except Exception:  # a fault of ours: its readers must not wait for ever
            log.exception("a turn could not be marked interrupted", extra=ids_of(live))

    async def interrupt(
        self, live: LiveTurn, failure: PensieveError, finish: FinishReason = FinishReason.FAILED
    ) -> None:
        """End a turn and keep nothing of it, unless its end is decided already."""
        cancel = self.turns.interrupt(live)
        if cancel is None:
            return
        self._engine.tell(cancel)
        if finish is FinishReason.CANCELLED:  # its client left; what failed costs nothing
            self._charge(live)
        await self.end_interrupted(live, failure, finish)

    async def end_interrupted(
        self, live: LiveTurn, failure: PensieveError, finish: FinishReason = FinishReason.FAILED
    ) -> None:
        await self._store_interruption(live)
        self._fail(live, failure, finish)

    async def interrupt_all(self, failure: PensieveError) -> None:
        """Until no turn that is live now is live any more."""
        await asyncio.gather(*(self.interrupt(live, failure) for live in self.turns.all_live()))
        await self._threads.behind_the_store()  # all ends that are on their way

    def _fail(
        self, live: LiveTurn, failure: PensieveError, finish: FinishReason = FinishReason.FAILED
    ) -> None:
        self.turns.fail(live, failure, finish)
        self._ended(live)

    def _ended(self, live: LiveTurn) -> None:
        if not live.is_stored:
            self.unstored.ended(live)
        self.readers.wake(live.number)
        self._events.ended(live, self._threads.loop.time())

    async def _give_up(self, live: LiveTurn) -> None:
        if self.readers.has_reader(live):
            return  # it came between the end of the grace and this task
        await self.interrupt(live, TurnInterrupted(GIVEN_UP), FinishReason.CANCELLED)

    def _charge(self, live: LiveTurn) -> None:
        now = self._threads.loop.time()
        self._admission.charge(live.tenant, live.num_charged_tokens, now)
