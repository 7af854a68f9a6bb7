"""Match a request with a full history to a stored conversation, and run it as a turn there.

Each beginning of the history that ends with a reply has a digest (chain.py).  The longest one that the store
knows decides, and only the messages after it are rendered and tokenized:

    its conversation ends there, is idle, same session      append to it
    it went on, is busy, or belongs to another session      fork there, then append
    no digest is known                                      create a conversation

So an edited message, a regenerated reply and a second client with the same history each get a fork that
shares the common part.  Of several choices only the first may be appended.  Without a known beginning each
choice has a conversation of its own, and the others begin when the first has computed the prompt.  A session
is the client's own name for a conversation: it keeps equal histories apart.

**Races.**  If the conversation changes between lookup and begin, the store refuses the turn, and the binder
looks again, at most ATTEMPTS_MAX times; the last attempts fork.  A fork is reserved until its first turn
begins.

**Retries** find their turn by its request_id, which over HTTP comes from the Idempotency-Key.  A request that
differs from the first is refused; one that comes while the first is about to begin waits for it.

**Cleanup.**  A conversation created for a turn that did not begin, failed or was given up is deleted, unless
something has used it meanwhile.
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
from pensieve.conversations.prefixes import SharedPrompt
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
LOOKUPS_MAX = 16  # of a tenant at once, of requests that may not begin a turn
HASHED_AT_ONCE = 1 << 18  # characters; of more, the loop would notice
RACES = (TurnRunning, StaleRevision, NotFound, AlreadyExists)


class BindingKind(StrEnum):
    APPENDED = "appended"
    FORKED = "forked"
    NEW = "new"
    KNOWN = "known"  # its turn was begun before


class BoundTurn(NamedTuple):
    """One choice of a request."""

    live: LiveTurn
    conversation_id: str
    how: BindingKind
    num_known_messages: int


class HistoryDigests(NamedTuple):
    """The digests of a request's history."""

    lengths: dict[
        bytes, int
    ]  # in messages, of each beginning that ends with a reply, the longest first
    end: ChainEnd


class Binder:
    """Belongs to the loop."""

    def __init__(
        self, daemon: Daemon, random_bits: Callable[[int], int] = secrets.randbits
    ) -> None:
        self.num_bound = Counter[BindingKind]()
        self._daemon = daemon
        self._random_bits = random_bits
        self._unused: dict[tuple[str, str], int] = {}  # made for a turn, with their revision
        self._num_lookups = Counts[str]()
        self._reserved = Counts[tuple[str, str]]()  # by tenant and conversation

    async def begin(
        self,
        request: TurnRequest,
        chain: ChainEnd = NO_DIGEST,
        num_choices: int = 1,
        seconds_left: float | None = None,
    ) -> list[BoundTurn]:
        """Begin the choices of a request with its whole history; each runs or has its reply.

        `chain` comes without its digest. The request_id may be any text.

        The turns begin once no identical request is about to begin its own. This goes on after a disconnect,
        because that is when clients retry.
        """
        if not request.messages:
            raise InvalidArgument("messages", "at least one is needed")
        left = asyncio.Event()  # by the client

        async def alone() -> list[BoundTurn]:
            async with self._daemon.arriving.one_at_a_time(request.tenant, request.request_id):
                return await self._begin(request, chain, num_choices, seconds_left, left)

        try:
            return await self._daemon.threads.whole(alone())
        except asyncio.CancelledError:
            left.set()
            raise

    async def _begin(
        self,
        request: TurnRequest,
        chain: ChainEnd,
        num_choices: int,
        seconds_left: float | None,
        left: asyncio.Event,
    ) -> list[BoundTurn]:
        tenant = request.tenant
        refusal = self._daemon.refusal(tenant, "", request.options.priority, seconds_left)
        is_looked_up = request.request_id and self._num_lookups[tenant] < LOOKUPS_MAX
        if refusal is not None and not is_looked_up:
            raise refusal
        self._num_lookups[tenant] += 1
        bound: list[BoundTurn] = []
        try:
            past = await self._past(request, chain)
            shared = SharedPrompt() if num_choices > 1 else None
            for choice in range(num_choices):
                if choice == 1 and bound[0].how is BindingKind.NEW:
                    await self._computed(bound[0].live, left)
                one = _Choice(request, choice, past, shared, self._random_bits)
                bound.append(await self._bind(one, refusal, seconds_left))
        except BaseException:
            conversations = self._daemon.conversations
            for each in bound:
                if each.how is not BindingKind.KNOWN:
                    conversations.ends.give_up(each.live)
                    await conversations.followers.until_ended(each.live)
            raise
        finally:
            self._num_lookups[tenant] -= 1
        self.num_bound.update(each.how for each in bound)
        return bound

    async def look(
        self, request: TurnRequest, chain: ChainEnd
    ) -> tuple[HistoryDigests, ChainMatch | None]:
        """A request's history and what it goes on from, for who begins turns in another way."""
        past = await self._past(request, chain)
        return past, await self._match(past, request.tenant)

    @contextlib.contextmanager
    def reserved(self, tenant: str, conversation_id: str) -> Iterator[None]:
        """Keep other requests from appending to a conversation that is made for one turn."""
        name = tenant, conversation_id
        self._reserved[name] += 1
        try:
            yield
        finally:
            self._reserved[name] -= 1

    async def _computed(self, live: LiveTurn, left: asyncio.Event) -> None:
        """Until the first choice has computed the prompt; not longer than its client is there."""
        computed = asyncio.ensure_future(self._daemon.conversations.prompt_computed(live))
        gone = asyncio.ensure_future(left.wait())
        try:
            await asyncio.wait((computed, gone), return_when=asyncio.FIRST_COMPLETED)
            if not computed.done():
                raise TurnInterrupted("its client left before there was a reply")
            await computed
        finally:
            for each in (computed, gone):
                each.cancel()
            await asyncio.gather(computed, gone, return_exceptions=True)

    async def _past(self, request: TurnRequest, chain: ChainEnd) -> HistoryDigests:
        num_characters = request.num_characters
        num_characters += sum(len(str(each)) for each in request.settings.tools)
        check_length("messages", num_characters, self._daemon.context_max)
        if num_characters <= HASHED_AT_ONCE:
            return _history_of(request, chain)
        return await self._daemon.threads.in_text_pool(
            request.tenant, lambda: _history_of(request, chain)
        )

    # -- one choice --

    async def _bind(
        self, one: _Choice, refusal: PensieveError | None, seconds_left: float | None
    ) -> BoundTurn:
        for attempt in range(1, ATTEMPTS_MAX + 1):
            try:
                if (known := await self._known(one, seconds_left)) is not None:
                    return known
                if refusal is not None:
                    raise refusal
                match = await self._match(one.past, one.request.tenant)
                if match is None:
                    return await self._new(one, seconds_left)
                may_append = match.may_append and one.number == 0 and attempt <= APPENDING_ATTEMPTS
                go_on = self._append if may_append else self._fork
                return await go_on(one, match, seconds_left)
            except RACES as race:
                if attempt == ATTEMPTS_MAX:
                    raise
                if isinstance(race, StaleRevision):
                    # The conversation of this id may be that of a key which was forgotten.
                    one.conversation_id = one.drawn_id
        raise AssertionError("the last attempt returns or raises")

    async def _known(self, one: _Choice, seconds_left: float | None) -> BoundTurn | None:
        """Return the turn of a request that came before; InvalidArgument if its body differs."""
        if not one.request_id:
            return None
        store, tenant = self._daemon.store, one.request.tenant
        found = await self._daemon.threads.in_store(
            tenant, store.find_by_idempotency_key, one.request_id, tenant=tenant
        )
        if found is None:
            return None
        num_known = max(len(one.request.messages) - found.num_messages, 0)
        live = await self._daemon.begin(
            one.turn_request(found.conversation_id, num_known), seconds_left
        )
        return BoundTurn(live, found.conversation_id, BindingKind.KNOWN, num_known)

    async def _match(self, past: HistoryDigests, tenant: str) -> ChainMatch | None:
        if not past.lengths:
            return None
        match = await self._daemon.threads.in_store(
            tenant,
            self._daemon.store.chains.longest,
            list(past.lengths),
            past.end.session,
            tenant=tenant,
        )
        if match is not None and self._reserved[tenant, match.conversation_id]:
            return match._replace(may_append=False)
        return match

    async def _append(
        self, one: _Choice, match: ChainMatch, seconds_left: float | None
    ) -> BoundTurn:
        num_known = one.past.lengths[match.digest]
        request = one.turn_request(match.conversation_id, num_known, match.present_revision)
        live = await self._daemon.begin(request, seconds_left)
        return BoundTurn(live, match.conversation_id, BindingKind.APPENDED, num_known)

    async def _fork(self, one: _Choice, match: ChainMatch, seconds_left: float | None) -> BoundTurn:
        tenant, new_id = one.request.tenant, one.conversation_id
        conversations = self._daemon.writable_by(tenant)
        source = match.conversation_id, new_id, match.revision
        num_known = one.past.lengths[match.digest]
        request = one.turn_request(new_id, num_known, match.revision)
        with self.reserved(tenant, new_id):
            # If it exists already, the same request was interrupted before, and begins again.
            with contextlib.suppress(*([AlreadyExists] if one.request_id else [])):
                await conversations.fork(*source, metadata=one.request.metadata, tenant=tenant)
            live = await self._in_made(request, match.revision, seconds_left)
        return BoundTurn(live, new_id, BindingKind.FORKED, num_known)

    async def _new(self, one: _Choice, seconds_left: float | None) -> BoundTurn:
        request = one.opening()
        try:
            live = await self._in_made(request, 0, seconds_left)
        except PrefixTaken:  # the tenant has named a prefix like that, with other content
            request = replace(request, settings=replace(request.settings, prefix_id=""))
            live = await self._in_made(request, 0, seconds_left)
        return BoundTurn(live, one.conversation_id, BindingKind.NEW, 0)

    # -- conversations that are made for a turn --

    async def _in_made(
        self, request: TurnRequest, revision: int, seconds_left: float | None
    ) -> LiveTurn:
        name = request.tenant, request.conversation_id
        if not self._unused:
            self._daemon.events.ended.subscribe(self._turn_ended)
        self._unused[name] = revision
        try:
            live = await self._daemon.begin(request, seconds_left)
        except BaseException:
            self._used(*name)
            await self._discard(*name, revision)
            raise
        if live.replayed:  # then nobody will say that it has ended
            self._used(*name)
        return live

    def _used(self, tenant: str, conversation_id: str) -> int | None:
        """Something has become of it; its revision, if it was made for a turn that runs."""
        revision = self._unused.pop((tenant, conversation_id), None)
        if revision is not None and not self._unused:
            self._daemon.events.ended.unsubscribe(self._turn_ended)
        return revision

    def _turn_ended(self, live: LiveTurn, now: float) -> None:
        revision = self._used(live.tenant, live.conversation_id)
        if revision is not None and live.failure is not None:
            discarded = self._discard(live.tenant, live.conversation_id, revision)
            self._daemon.threads.spawn(discarded)

    async def _discard(self, tenant: str, conversation_id: str, revision: int) -> None:
        with contextlib.suppress(PensieveError):
            await self._daemon.conversations.delete(conversation_id, tenant, revision)


class _Choice:
    """One of the replies that a request wants, with the names that belong to it."""

    def __init__(
        self,
        request: TurnRequest,
        number: int,
        past: HistoryDigests,
        shared: SharedPrompt | None,  # of several choices
        random_bits: Callable[[int], int],
    ) -> None:
        self.request, self.number, self.past, self.shared = request, number, past, shared
        self.drawn_id = f"chat-{random_bits(128):032x}"
        of_request = [request.request_id, str(number)]
        is_keyed = bool(request.request_id)
        self.request_id = f"chat-{_digest('request', *of_request)}" if is_keyed else ""
        own = f"chat-{_digest('conversation', *of_request)}" if is_keyed else ""
        self.conversation_id = own or self.drawn_id

    def turn_request(
        self, conversation_id: str, num_known: int, expected_revision: int | None = None
    ) -> TurnRequest:
        """The messages behind the first `num_known`, as a turn of this conversation."""
        request = self.request
        return replace(
            request,
            conversation_id=conversation_id,
            messages=request.messages[num_known:],
            options=self._options(),
            request_id=self.request_id,
            expected_revision=expected_revision,
            chain=self.past.end,
            history_digest=self.past.end.digest if self.request_id else b"",
        )

    def opening(self) -> TurnRequest:
        """All messages, as the first turn of a new conversation."""
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
        return replace(
            request, create_if_missing=True, settings=settings, shared_prompt=self.shared
        )

    def _options(self) -> TurnOptions:
        """A seed that is given is the first choice's; the others follow from it."""
        options = self.request.options
        sampling = options.sampling
        if not (self.number and sampling.seed):
            return options
        seed = int(_digest("seed", str(sampling.seed), str(self.number))[:14], 16) + 1
        return replace(options, sampling=replace(sampling, seed=seed))


def _history_of(request: TurnRequest, chain: ChainEnd) -> HistoryDigests:
    settings, messages = request.settings, request.messages
    found = digests(settings.tools, settings.template_options, messages)
    lengths = {
        found[length]: length
        for length in range(len(messages) - 1, 0, -1)
        if messages[length - 1].role == "assistant"
    }
    return HistoryDigests(lengths, ChainEnd(found[-1], chain.session, chain.reply_reader))


def _digest(*words: str) -> str:
    whole = "\0".join(words).encode(errors="surrogatepass")
    return hashlib.blake2b(whole, digest_size=16).hexdigest()
