"""Run the operations on conversations, with jobs in the store threads and messages to the engine.

A coroutine here sends a *job* to a store thread: a call of a method of `History` (history.py). The coroutine
acts on the result before it waits for anything else. So the event loop acts in the order of the store's jobs
(threads.py). This order matters:

* **A turn begins** in the store. Then it is registered as live (turns.py), and its SubmitTurn goes to the
  engine. If the engine does not take the message, the turn is given up. A retry with the same request_id
  finds the turn `running` in the store and joins the live turn. If the turn is no longer live, it has ended
  in the meantime, and the request is drafted again.
* **A turn ends** in the store. Then its `finish` is set and its followers wake (turn_ends.py).
* **A deletion** interrupts the running turn and deletes the conversation, in one job. Then the live turn is
  given up, and DeleteConversation goes to the engine. This message arrives before the SubmitTurn of any later
  turn with the same conversation id. If a job that writes the turn's end is already queued, that job finds no
  turn. The engine's client never refuses a DeleteConversation.
* **A fork or a rewind** is first a job in the store, then a message to the engine. The message goes before
  the SubmitTurn of any later turn. A lost message does no harm: a turn says how long its log is, and the
  engine asks for missing tokens.
* **Engine events** without a live turn are ignored. They belong to warms (see `Warmer`) or to attempts that
  were given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from pensieve.conversations.admission import Admission
from pensieve.conversations.arriving import ArrivingTurns
from pensieve.conversations.daemon_config import DaemonConfig, Sources
from pensieve.conversations.declared_prefixes import DeclaredPrefixes, Warmer
from pensieve.conversations.draft import Draft, OutdatedTokens, TurnRequest
from pensieve.conversations.engine_client import EngineClient
from pensieve.conversations.followers import FollowerLimits, TurnFollowers
from pensieve.conversations.heads import ConversationSettings, check_salt
from pensieve.conversations.history import History
from pensieve.conversations.housekeeping import wait_until_erased
from pensieve.conversations.live_turn import (
    LiveTurn,
    ReplyTokens,
    RetriedTurn,
    StartedTurn,
    TurnPhase,
    cache_key,
    names_of,
    replayed,
)
from pensieve.conversations.meter import Latencies
from pensieve.conversations.text_pool import ChargedTextPool
from pensieve.conversations.threads import Threads
from pensieve.conversations.turn_ends import TurnEnds
from pensieve.conversations.turn_events import TurnEvents
from pensieve.conversations.turns import Turns
from pensieve.conversations.unstored import UnstoredTurns
from pensieve.core.identities import salted
from pensieve.core.iteration import SampledToken
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
    TurnRunning,
)
from pensieve.guard.limits import Counts
from pensieve.store import records
from pensieve.store.declared_prefixes import stored_id

log = logging.getLogger("pensieve")
ROOT_SECONDS = 2.0  # to read a tenant's salt
# If admission refuses a request, the store is asked whether the request is a retry. This is the maximum
# number of such lookups at once, for each tenant.
RETRY_LOOKUPS_MAX = 16
DRAFTS_MAX = 3  # of a request whose turn is `running` in the store but not live


class _FirstToken(Exception):
    """Raised to stop reading once the first token has come."""


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
        self.followers = TurnFollowers(
            threads.loop,
            FollowerLimits(
                config.grace_seconds, config.stall_seconds, config.undelivered_tokens_max
            ),
            lambda live: self.ends.give_up(live),  # `ends` is made below
        )
        self.ends = TurnEnds(
            self.turns, self.followers, history, threads, engine, admission, events
        )
        self.unstored = UnstoredTurns(self.turns, self.followers, threads.loop, engine, admission)
        self.text_pool = ChargedTextPool(history, threads, admission)
        self.warming = Warmer(history, self.turns, threads, engine, admission, self.text_pool)
        self.prefixes = DeclaredPrefixes(
            history, threads, self.warming, self.text_pool, admission, sources.wall_clock
        )
        self._history, self._threads, self._engine = history, threads, engine
        self._admission, self._events = admission, events
        self._short_characters = config.short_characters
        self._num_lookups = Counts[str]()

    # -- conversations --

    async def create(self, settings: ConversationSettings) -> records.StoredConversation:
        if settings.messages:
            return await self.prefixes.begin_with_history(settings)
        num_tokens = await self.text_pool.run(
            settings.tenant, lambda: self._history.check_settings(settings)
        )
        self.text_pool.charge(settings.tenant, num_tokens)
        while True:
            found = await self._threads.in_store(
                settings.tenant, self._history.create, settings, lane=settings.conversation_id
            )
            if not isinstance(found, OutdatedTokens):
                return found
            # The stored tokens of the new conversation's declared prefix are outdated.
            await self.text_pool.renew(found)

    async def fork(
        self,
        source_id: str,
        new_id: str,
        at_revision: int | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        tenant: str = "",
    ) -> records.StoredConversation:
        async def sequence() -> records.StoredConversation:
            fork = await self._threads.in_store(
                tenant,
                self._history.fork,
                source_id,
                new_id,
                at_revision,
                metadata=metadata,
                tenant=tenant,
                lane=source_id,  # keeps the fork in order with the changes of its source
            )
            source, target = cache_key(tenant, source_id), cache_key(tenant, new_id)
            self._engine.try_put(ForkConversation(source, fork.num_tokens, target))
            return fork

        return await self._threads.run_to_end(sequence())

    async def rewind(
        self,
        conversation_id: str,
        to_revision: int,
        expected_revision: int | None = None,
        *,
        tenant: str = "",
    ) -> records.StoredConversation:
        """Cut a conversation back to a revision.

        Raises StaleRevision if the conversation is not at the expected revision (None: any).
        """

        async def sequence() -> records.StoredConversation:
            rewound = await self._threads.in_store(
                tenant,
                self._history.rewind,
                *(conversation_id, to_revision, expected_revision),
                tenant=tenant,
                lane=conversation_id,
            )
            self._engine.try_put(
                RewindConversation(cache_key(tenant, conversation_id), rewound.num_tokens)
            )
            return rewound

        return await self._threads.run_to_end(sequence())

    async def delete_last(
        self, seen: records.StoredConversation, pending: Sequence[records.NewMessage]
    ) -> records.StoredConversation:
        """Delete the last message of a conversation and return when its text is erased from the files.

        `seen` and `pending` are the conversation and its pending messages as the client saw them. Raises
        StaleRevision if they have changed.
        """

        async def sequence() -> records.StoredConversation:
            deleted = await self._threads.in_store(
                *(seen.tenant, self._history.delete_last, seen, pending),
                lane=seen.conversation_id,
            )
            conversation = deleted.conversation
            if deleted.is_rewound:
                key = cache_key(conversation.tenant, conversation.conversation_id)
                self._engine.try_put(RewindConversation(key, conversation.num_tokens))
            if deleted.is_erasure_due:
                await wait_until_erased(self._history.finish_erasure, self._threads)
            return conversation

        return await self._threads.run_to_end(sequence())

    async def delete_prefix(self, prefix_id: str, tenant: str = "") -> None:
        """Delete a declared prefix. Conversations that began with it keep their messages and shared KV."""
        try:
            await self.delete(stored_id(prefix_id), tenant)
        except NotFound:
            raise NotFound(f"there is no prefix {prefix_id!r}") from None

    async def delete(
        self,
        conversation_id: str,
        tenant: str = "",
        unused_since: int | None = None,
        unchanged: records.StoredConversation | None = None,
    ) -> None:
        """Delete a conversation; see `History.delete`."""

        async def sequence() -> None:
            deleted = await self._threads.in_store(
                *(tenant, self._history.delete, conversation_id, tenant, unused_since, unchanged),
                lane=conversation_id,
            )
            live = None if deleted.turn_id is None else self.turns.of_turn(deleted.turn_id)
            if live is not None:
                self.ends.give_up(live, is_interrupted=True)
            if not isinstance(deleted.error, NotFound):
                self._engine.try_put(DeleteConversation(cache_key(tenant, conversation_id)))
            if deleted.is_pending:
                await wait_until_erased(self._history.finish_erasure, self._threads)
            if deleted.error is not None:
                try:
                    raise deleted.error
                finally:
                    del deleted  # as in `Threads.run_to_end`

        await self._threads.run_to_end(sequence())

    # -- a turn begins --

    async def begin(self, request: TurnRequest) -> LiveTurn:
        """Begin a turn, or return the turn that this request retries."""
        self.arriving.add(request)
        return await self._threads.run_to_end(self._begin(request, self._threads.loop.time()))

    def find_live_retried(self, request: TurnRequest) -> LiveTurn | None:
        """Return the live turn that this request retries. Does not ask the store."""
        live = self.turns.of_request(request) if request.request_id else None
        if live is not None:
            self.followers.start_grace(live)
        return live

    async def find_turn_of_retry(self, request: TurnRequest) -> LiveTurn | None:
        """Return the turn that this request retries, live or ended. Asks the store.

        This call never starts a turn.
        """
        if not request.request_id or self._num_lookups[request.tenant] == RETRY_LOOKUPS_MAX:
            return None
        self._num_lookups[request.tenant] += 1
        try:
            retried = await self._threads.in_store(
                request.tenant, self._history.find_retried, request, lane=request.conversation_id
            )
        except NotFound:
            return None
        finally:
            self._num_lookups[request.tenant] -= 1
        return None if retried is None else self._attach_or_replay(retried)

    async def _begin(self, request: TurnRequest, accepted_at: float) -> LiveTurn:
        try:
            for _ in range(DRAFTS_MAX):
                found = await self._begin_in_store(request)
                if isinstance(found, StartedTurn):
                    live = self.turns.of_turn(found.turn.turn_id)
                    if live is None or live.attempt != found.turn.attempts:
                        return await self._submit(found, accepted_at)
                    # An earlier call has submitted this attempt, but the store's answer was lost.
                    found = RetriedTurn(found.turn, None)
                if (live := self._attach_or_replay(found)) is not None:
                    return live
            raise TurnRunning(found.turn.conversation_id, str(found.turn.turn_id))
        finally:
            self.arriving.remove(request)

    async def _begin_in_store(self, request: TurnRequest) -> StartedTurn | RetriedTurn:
        """Tokenize the new messages and commit the turn, or find the turn that this request retries."""
        tenant, lane = request.tenant, request.conversation_id
        history, threads = self._history, self._threads
        while True:
            try:
                found = await threads.in_store(
                    tenant, history.begin_if_short, request, self._short_characters, lane=lane
                )
                if isinstance(found, OutdatedTokens):
                    await self.text_pool.renew(found)
                    continue
                if not isinstance(found, Draft):
                    return found
                prompt = await self.text_pool.run(tenant, found.prompt)
                try:
                    return await threads.in_store(tenant, history.begin, found, prompt, lane=lane)
                except ContextFull:
                    self.text_pool.charge(tenant, sum(map(len, prompt)))
                    raise
            except StaleRevision:
                if request.expected_revision is not None:
                    raise
                # Another turn or a rewind came after the draft: draft again.

    def _attach_or_replay(self, retried: RetriedTurn) -> LiveTurn | None:
        """Return a retried turn for another follower; None if it has just been given up."""
        if retried.reply is not None:
            return replayed(retried.turn, retried.reply)
        live = self.turns.of_turn(retried.turn.turn_id)
        if live is None or live.phase is TurnPhase.GIVING_UP:
            return None
        self.followers.start_grace(live)
        return live

    async def _submit(self, begun: StartedTurn, accepted_at: float) -> LiveTurn:
        """Make a begun turn live and give it to the engine."""
        now = self._threads.loop.time()
        weight = self._admission.weight_of(begun.turn.tenant, now)
        live, submit = self.turns.begin(begun, now, weight)
        live.accepted_at = accepted_at
        try:
            await self._events.begun(live)
            if live.phase is TurnPhase.RUNNING:
                self._admission.prompts.submitted(live)
                self.turns.check_suspect(live)
                self._engine.put(submit)
        except PensieveError as error:
            self.ends.give_up(live, error)
            await self.followers.until_ended(live)
            raise
        self.ends.submitted(live)
        self.followers.start_grace(live)  # until its first follower comes
        return live

    async def root_of(self, tenant: str, cache_salt: str = "") -> str:
        """Return the root of the identities of a tenant's chunks, even if the store does not answer."""
        check_salt(cache_salt)
        if (root := self._history.roots.get(tenant)) is None:
            try:
                async with asyncio.timeout(ROOT_SECONDS):
                    root = await self._threads.in_store(
                        tenant, self._history.root_of, tenant, lane="salts"
                    )
            except (PensieveError, TimeoutError):
                root = self._history.interim_root(tenant)
        return salted(root, cache_salt)

    async def prompt_computed(self, live: LiveTurn) -> None:
        """Wait until a turn has its first token or has ended. Raises the error of a failed turn.

        Other choices of the same prompt begin after that, because the engine then has the prompt's KV.
        """

        async def write(tokens: ReplyTokens) -> None:
            raise _FirstToken

        with contextlib.suppress(_FirstToken):
            await self.followers.follow(live, write)

    # -- the engine's events --

    def take(self, events: list[SampledToken | TurnAdmitted | TurnEnded | LogNeeded]) -> None:
        """Handle the engine's events about turns, in order."""
        grown: dict[int, LiveTurn] = {}
        for event in events:
            if isinstance(event, SampledToken):
                if (live := self.turns.take(event)) is not None:
                    grown[event.attempt_id] = live
            elif isinstance(event, TurnEnded):
                self.ends.engine_ended(event)
            elif isinstance(event, TurnAdmitted):
                if (live := self.turns.admit(event.attempt_id, event.missing_tokens)) is not None:
                    self._events.admitted(live, event.missing_tokens)
            else:
                self._threads.spawn(self._provide_log(event))
        now = self._threads.loop.time()
        for attempt_id, live in grown.items():
            if live.num_tokens and not live.num_timed:
                self._events.first_token(live)
            self.latencies.tokens_arrived(live, now)
            self.followers.wake(attempt_id)

    async def _provide_log(self, needed: LogNeeded) -> None:
        """Send the engine the log that a turn needs. On failure, give up the turn, which cannot run."""
        try:
            tenant, conversation_id = names_of(needed.conversation_id)
            self._engine.put(
                await self._threads.in_store(
                    tenant, self._history.log_for, needed, lane=conversation_id
                )
            )
        except Exception as error:
            if not isinstance(error, PensieveError):  # a bug
                log.exception("the engine could not be sent a conversation's log")
                error = TurnFailed("INTERNAL", f"the log could not be read: {error}")
            live = self.turns.of_attempt(needed.attempt_id)
            if live is not None:
                self.ends.give_up(live, error)
            else:
                self._engine.try_put(CancelTurn(needed.attempt_id, 0))  # a warm
