"""Match a request with a full history to a stored conversation, and run the request as a turn there.

Each prefix of the history that ends with a reply has a digest (chain.py). The binder looks for the longest
prefix whose digest the store knows. That prefix decides what happens:

    its conversation ends there, is idle, has the same session             append to the conversation
    its conversation has later messages, is busy, or has another session   fork there, append to the fork
    the store knows no digest                                              create a conversation

Only the messages after the prefix are rendered and tokenized. An edited message, a regenerated reply and a
second client with the same history each get a fork that shares the common part. A session is a name that the
client gives to a conversation, to keep equal histories apart.

If a request asks for several choices, only the first choice may append. If the store knows no digest, each
choice gets its own conversation, and the other choices wait until the first choice has computed the prompt.

**Races.** If the conversation changes between the lookup and the start of the turn, the store refuses the
turn. The binder then looks again, at most ATTEMPTS_MAX times. The last attempts fork. Until the first turn of
a fork begins, other requests may not append to the fork.

**Retries** find their turn by its request_id. Over HTTP, the request_id comes from the Idempotency-Key. A
retry with other content is refused. A retry that arrives before the first request has begun its turn waits
for that turn.

**Cleanup.** A conversation that was created for one turn is deleted if the turn did not begin, failed or was
given up. A conversation that another request has used in the meantime is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import StrEnum
from typing import NamedTuple

from pensieve.conversations.binding.chain import ChainEnd, digests, prefix_id
from pensieve.conversations.daemon import Daemon
from pensieve.conversations.draft import TurnRequest
from pensieve.conversations.heads import check_length
from pensieve.conversations.live_turn import LiveTurn
from pensieve.core.turn import TurnOptions
from pensieve.errors import (
    AlreadyExists,
    InvalidArgument,
    NotFound,
    PensieveError,
    PrefixTaken,
    StaleRevision,
    TurnInterrupted,
    TurnRunning,
)
from pensieve.guard.limits import Counts
from pensieve.store.records import ChainMatch

NO_DIGEST = ChainEnd()
ATTEMPTS_MAX = 4
APPENDING_ATTEMPTS = 2
# A request that would be refused may be a retry, so it is looked up first, unless this many requests of its
# tenant are already being looked up.
BINDER_LOOKUPS_MAX = 16
HASH_INLINE_CHARACTERS_MAX = 1 << 18  # characters; hashing more on the event loop would stall it
RACES = (TurnRunning, StaleRevision, NotFound, AlreadyExists)


class BindingKind(StrEnum):
    APPENDED = "appended"
    FORKED = "forked"
    NEW = "new"
    RETRIED = (
        "known"  # an earlier request began the turn; the header x-pensieve-bound has this value
    )


class BoundTurn(NamedTuple):
    """One choice of a request."""

    live: LiveTurn
    conversation_id: str
    how: BindingKind
    num_known_messages: int


class HistoryDigests(NamedTuple):
    """The digests of a request's history."""

    # By digest: the number of messages of each prefix that ends with a reply, the longest first.
    lengths: dict[bytes, int]
    end: ChainEnd


class Binder:
    """Belongs to the event loop."""

    def __init__(
        self, daemon: Daemon, random_bits: Callable[[int], int] = secrets.randbits
    ) -> None:
        self.num_bound = Counter[BindingKind]()
        self._daemon = daemon
        self._random_bits = random_bits
        # Revisions of conversations made for a turn that has not ended, by tenant and conversation.
        self._unused: dict[tuple[str, str], int] = {}
        self._num_lookups = Counts[str]()
        self._reserved = Counts[tuple[str, str]]()  # by tenant and conversation

    async def begin(
        self,
        request: TurnRequest,
        chain: ChainEnd = NO_DIGEST,
        num_choices: int = 1,
        seconds_left: float | None = None,
    ) -> list[BoundTurn]:
        """Begin a turn for each choice of a request that brings its full history.

        `chain.digest` is still empty; the binder computes it. The request_id may be any text.

        If an identical request is about to begin its turns, this call waits for that request. A request
        continues after its client disconnects, because that is when clients retry.
        """
        if not request.messages:
            raise InvalidArgument("messages", "at least one message is required")
        client_gone = asyncio.Event()  # set when the client disconnects

        async def begin_alone() -> list[BoundTurn]:
            async with self._daemon.arriving.one_at_a_time(request.tenant, request.request_id):
                return await self._begin(request, chain, num_choices, seconds_left, client_gone)

        try:
            return await self._daemon.threads.run_to_end(begin_alone())
        except asyncio.CancelledError:
            client_gone.set()
            raise

    async def _begin(
        self,
        request: TurnRequest,
        chain: ChainEnd,
        num_choices: int,
        seconds_left: float | None,
        client_gone: asyncio.Event,
    ) -> list[BoundTurn]:
        tenant = request.tenant
        refusal = self._daemon.refusal(tenant, "", request.options.priority, seconds_left)
        may_look_up = request.request_id and self._num_lookups[tenant] < BINDER_LOOKUPS_MAX
        if refusal is not None and not may_look_up:
            raise refusal
        self._num_lookups[tenant] += 1
        bound: list[BoundTurn] = []
        try:
            history = await self._digests(request, chain)
            for number in range(num_choices):
                if number == 1 and bound[0].how is BindingKind.NEW:
                    await self._wait_for_prompt(bound[0].live, client_gone)
                choice = _Choice(request, number, history, self._random_bits)
                bound.append(await self._bind(choice, refusal, seconds_left))
        except BaseException:
            conversations = self._daemon.conversations
            for each in bound:
                if each.how is not BindingKind.RETRIED:
                    conversations.ends.give_up(each.live)
                    await conversations.followers.until_ended(each.live)
            raise
        finally:
            self._num_lookups[tenant] -= 1
        self.num_bound.update(each.how for each in bound)
        return bound

    async def look_up(
        self, request: TurnRequest, chain: ChainEnd
    ) -> tuple[HistoryDigests, ChainMatch | None]:
        """Return the digests of the history, and the stored prefix that they match. Begins no turn."""
        history = await self._digests(request, chain)
        return history, await self._match(history, request.tenant)

    @contextlib.contextmanager
    def reserved(self, tenant: str, conversation_id: str) -> Iterator[None]:
        """Keep other requests from appending to a conversation that was created for one turn."""
        key = tenant, conversation_id
        self._reserved[key] += 1
        try:
            yield
        finally:
            self._reserved[key] -= 1

    async def _wait_for_prompt(self, live: LiveTurn, client_gone: asyncio.Event) -> None:
        """Wait until the first choice has computed the prompt.

        Raises TurnInterrupted if the client leaves.
        """
        computed = asyncio.ensure_future(self._daemon.conversations.prompt_computed(live))
        gone = asyncio.ensure_future(client_gone.wait())
        try:
            await asyncio.wait((computed, gone), return_when=asyncio.FIRST_COMPLETED)
            if not computed.done():
                raise TurnInterrupted("the client left before there was a reply")
            await computed
        finally:
            for each in (computed, gone):
                each.cancel()
            await asyncio.gather(computed, gone, return_exceptions=True)

    async def _digests(self, request: TurnRequest, chain: ChainEnd) -> HistoryDigests:
        num_characters = request.num_characters
        num_characters += sum(len(str(each)) for each in request.settings.tools)
        check_length("messages", num_characters, self._daemon.context_max)
        if num_characters <= HASH_INLINE_CHARACTERS_MAX:
            return _digests_of(request, chain)
        return await self._daemon.threads.in_text_pool(
            request.tenant, lambda: _digests_of(request, chain)
        )

    # -- one choice --

    async def _bind(
        self, choice: _Choice, refusal: PensieveError | None, seconds_left: float | None
    ) -> BoundTurn:
        for attempt in range(1, ATTEMPTS_MAX + 1):
            try:
                if (retried := await self._begin_retried(choice, seconds_left)) is not None:
                    return retried
                if refusal is not None:
                    raise refusal
                match = await self._match(choice.history, choice.request.tenant)
                if match is None:
                    return await self._create(choice, seconds_left)
                is_first = choice.number == 0
                if match.may_append and is_first and attempt <= APPENDING_ATTEMPTS:
                    return await self._append(choice, match, seconds_left)
                return await self._fork(choice, match, seconds_left)
            except RACES as race:
                if attempt == ATTEMPTS_MAX:
                    raise
                if isinstance(race, StaleRevision):
                    # This id may be taken by a conversation whose idempotency key was forgotten.
                    choice.conversation_id = choice.drawn_id
        raise AssertionError("the last attempt returns or raises")

    async def _begin_retried(self, choice: _Choice, seconds_left: float | None) -> BoundTurn | None:
        """Return the running or completed turn that this request retries. None: there is no such turn.

        A turn without a reply begins again in the usual way, because the retry gets the same ids (`_Choice`).

        Raises InvalidArgument if the content differs.
        """
        if not choice.request_id:
            return None
        store, tenant = self._daemon.store, choice.request.tenant
        found = await self._daemon.threads.in_store(
            tenant, store.find_turn_by_key, choice.request_id, tenant=tenant
        )
        if found is None:
            return None
        num_known = max(len(choice.request.messages) - found.num_messages, 0)
        live = await self._daemon.begin(
            choice.turn_request(found.conversation_id, num_known), seconds_left
        )
        return BoundTurn(live, found.conversation_id, BindingKind.RETRIED, num_known)

    async def _match(self, history: HistoryDigests, tenant: str) -> ChainMatch | None:
        """Return the stored prefix with the longest known digest."""
        if not history.lengths:
            return None
        match = await self._daemon.threads.in_store(
            tenant,
            self._daemon.store.chains.longest,
            list(history.lengths),
            history.end.client_session,
            tenant=tenant,
        )
        if match is not None and self._reserved[tenant, match.conversation_id]:
            return match._replace(may_append=False)
        return match

    async def _append(
        self, choice: _Choice, match: ChainMatch, seconds_left: float | None
    ) -> BoundTurn:
        num_known = choice.history.lengths[match.digest]
        request = choice.turn_request(match.conversation_id, num_known, match.present_revision)
        live = await self._daemon.begin(request, seconds_left)
        return BoundTurn(live, match.conversation_id, BindingKind.APPENDED, num_known)

    async def _fork(
        self, choice: _Choice, match: ChainMatch, seconds_left: float | None
    ) -> BoundTurn:
        tenant, new_id = choice.request.tenant, choice.conversation_id
        conversations = self._daemon.charged_to(tenant)
        arguments = match.conversation_id, new_id, match.revision
        num_known = choice.history.lengths[match.digest]
        request = choice.turn_request(new_id, num_known, match.revision)
        with self.reserved(tenant, new_id):
            # If the fork exists already, an earlier attempt of this request was interrupted.
            with contextlib.suppress(*([AlreadyExists] if choice.request_id else [])):
                await conversations.fork(
                    *arguments, metadata=choice.request.metadata, tenant=tenant
                )
            live = await self._begin_in_new(request, match.revision, seconds_left)
        return BoundTurn(live, new_id, BindingKind.FORKED, num_known)

    async def _create(self, choice: _Choice, seconds_left: float | None) -> BoundTurn:
        request = choice.first_turn_request()
        try:
            live = await self._begin_in_new(request, 0, seconds_left)
        except PrefixTaken:  # the tenant has declared a prefix of this name, with other content
            request = replace(request, settings=replace(request.settings, prefix_id=""))
            live = await self._begin_in_new(request, 0, seconds_left)
        return BoundTurn(live, choice.conversation_id, BindingKind.NEW, 0)

    # -- conversations created for a turn --

    async def _begin_in_new(
        self, request: TurnRequest, revision: int, seconds_left: float | None
    ) -> LiveTurn:
        """Begin a turn in a conversation created for it. If it does not begin, delete the conversation."""
        key = request.tenant, request.conversation_id
        if not self._unused:
            self._daemon.events.ended.subscribe(self._turn_ended)
        self._unused[key] = revision
        try:
            live = await self._daemon.begin(request, seconds_left)
        except BaseException:
            self._pop_unused(*key)
            await self._discard(*key, revision)
            raise
        if live.replayed:  # no `ended` event will come for this turn
            self._pop_unused(*key)
        return live

    def _pop_unused(self, tenant: str, conversation_id: str) -> int | None:
        """Stop watching a conversation. Return its revision, or None if it was not watched."""
        revision = self._unused.pop((tenant, conversation_id), None)
        if revision is not None and not self._unused:
            self._daemon.events.ended.unsubscribe(self._turn_ended)
        return revision

    def _turn_ended(self, live: LiveTurn, now: float) -> None:
        revision = self._pop_unused(live.tenant, live.conversation_id)
        if revision is not None and live.failure is not None:
            discarding = self._discard(live.tenant, live.conversation_id, revision)
            self._daemon.threads.spawn(discarding)

    async def _discard(self, tenant: str, conversation_id: str, revision: int) -> None:
        with contextlib.suppress(PensieveError):
            await self._daemon.conversations.delete(conversation_id, tenant, revision)


class _Choice:
    """One of the replies that a request asks for, with its own request_id and conversation_id."""

    def __init__(
        self,
        request: TurnRequest,
        number: int,
        history: HistoryDigests,
        random_bits: Callable[[int], int],
    ) -> None:
        self.request, self.number, self.history = request, number, history
        self.request_id, self.drawn_id = "", f"chat-{random_bits(128):032x}"
        self.conversation_id = self.drawn_id
        if request.request_id:  # a retry must find the same names
            key = request.request_id, str(number)
            self.request_id = f"chat-{_digest('request', *key)}"
            self.conversation_id = f"chat-{_digest('conversation', *key)}"

    def turn_request(
        self, conversation_id: str, num_known: int, expected_revision: int | None = None
    ) -> TurnRequest:
        """Return the messages after the first `num_known` as a turn of this conversation."""
        request = self.request
        return replace(
            request,
            conversation_id=conversation_id,
            messages=request.messages[num_known:],
            options=self._options(),
            request_id=self.request_id,
            expected_revision=expected_revision,
            chain=self.history.end,
            history_digest=self.history.end.digest if self.request_id else b"",
        )

    def first_turn_request(self) -> TurnRequest:
        """Return all messages as the first turn of a new conversation."""
        messages, settings = self.request.messages, self.request.settings
        has_prompt = len(messages) > 1 and messages[0].role == "system" and messages[0].content
        system_prompt = messages[0].content if has_prompt else ""
        settings = replace(
            settings,
            system_prompt=system_prompt,
            metadata=self.request.metadata,
            prefix_id=prefix_id(system_prompt, settings.tools),
        )
        request = self.turn_request(self.conversation_id, 1 if has_prompt else 0, 0)
        return replace(request, create_if_missing=True, settings=settings)

    def _options(self) -> TurnOptions:
        """Return the options with a seed for this choice. The first choice has the request's seed."""
        options = self.request.options
        sampling = options.sampling
        if not (self.number and sampling.seed):
            return options
        seed = int(_digest("seed", str(sampling.seed), str(self.number))[:14], 16) + 1
        return replace(options, sampling=replace(sampling, seed=seed))


def _digests_of(request: TurnRequest, chain: ChainEnd) -> HistoryDigests:
    settings, messages = request.settings, request.messages
    found = digests(settings.tools, settings.template_options, messages, request.cache_salt)
    lengths = {
        found[length]: length
        for length in range(len(messages) - 1, 0, -1)
        if messages[length - 1].role == "assistant"
    }
    return HistoryDigests(lengths, ChainEnd(found[-1], chain.client_session, chain.reply_reader))


def _digest(*words: str) -> str:
    whole = "\0".join(words).encode(errors="surrogatepass")
    return hashlib.blake2b(whole, digest_size=16).hexdigest()
