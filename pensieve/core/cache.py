"""The KV cache that the scheduler sees: a turn takes, extends and returns its pages here.

The cache has three parts:

    prefix_tree.py   which chunks there are, and which conversations share them
    tiers.py         the pages of both tiers, and the copies in flight between them
    eviction.py      which chunks may be evicted; evicts chunks when a page is needed, or in advance

Two features build on the cache. With `can_stream`, streamed_pages.py holds the contexts of *streamed* turns,
whose KV stays on the host. adoption.py adds chunks that come from another engine; the cache does not call it.

A *temporary* conversation belongs to one turn that is not stored. No later turn continues it, but other turns
can find its chunks by their content.

A turn calls `begin`, `extend` and `end`:

    begin     gives each chunk of the context a device page: chunks on the device are pinned, chunks on the
              host are swapped in, missing chunks get empty pages and are computed
    extend    gives the next chunk a page
    end       unpins all chunks, which may be evicted from then on

`begin` reserves either all pages or none. If it reserves none, it returns how many are needed. So a turn that
waits for `begin` holds no pages, and turns cannot block each other. `discard` drops the KV that a failed turn
has computed.

A host page whose bytes have changed since the copy (`is_intact`) counts as dropped, so its chunk is a hole.
Each swap-in checks its page first. If another copy still reads the page, that copy has already checked it.

`check()` recomputes every invariant of the parts from the chunks alone (audit.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable
from itertools import islice
from typing import NamedTuple

from pensieve.core.audit import audit
from pensieve.core.content import ContentIndex, Found
from pensieve.core.eviction import Candidates, Eviction
from pensieve.core.iteration import PageCopy, SwapOut
from pensieve.core.policies.protocol import EndedTurn, EvictionPolicy
from pensieve.core.policies.queue import Role
from pensieve.core.prefix_tree import (
    HOLDERS_SUMMED_MAX,
    Branch,
    CachedConversation,
    Chunk,
    ChunkRun,
    PrefixTree,
    chunk_runs,
)
from pensieve.core.streamed_pages import StreamedPages
from pensieve.core.tiers import CacheConfig, IsIntact, PageReservation, Shortage, Tiers, trusted
from pensieve.core.turn import Turn

__all__ = ["CacheConfig", "KVCache"]


HOLDERS_MAX = 1024  # of a branch; resting conversations beyond it are forgotten


class Tail(NamedTuple):
    """A conversation's last, partly used chunk, if its turn must copy the chunk before appending to it."""

    chunk: Chunk
    num_slots: int  # used by the conversation


class KVCache:
    """Only the engine's main thread may call this. No method blocks."""

    def __init__(
        self,
        config: CacheConfig,
        policy: EvictionPolicy,
        is_intact: IsIntact = trusted,
    ) -> None:
        """`is_intact` is called before a page is swapped in."""
        self.config = config
        self._is_intact = is_intact
        self.policy = policy
        self.tiers = Tiers(config.device_pages, config.host_pages)
        self.candidates = Candidates(policy, self.tiers)
        self.content = ContentIndex(config.chunk_tokens)
        self.tree = PrefixTree(config.chunk_tokens, len(Role), self.candidates, self.content.forget)
        # Conversations whose turns have ended, for `settle`. With each: whether other turns had registered
        # chunks with the same content first (`Turn.has_twins`).
        self._unsettled: list[tuple[CachedConversation, bool]] = []
        self.eviction = Eviction(config, self.tree, self.candidates)
        self.streamed = (
            StreamedPages(config, self.tree, self.eviction, is_intact)
            if config.can_stream
            else None
        )
        policy.set_capacity(config.distinct_pages * config.chunk_tokens)
        self.device, self.host = self.tiers.device, self.tiers.host
        self.counters = self.tiers.counters
        self.conversations = self.tree.conversations
        self.eviction_log = self.eviction.log

    # -- questions --

    @property
    def available(self) -> int:
        return self.tiers.available

    def room_beside(self, running: Iterable[Turn]) -> Callable[[Turn], tuple[int, int]]:
        """Return a function that gives two numbers for a waiting turn.

        The first is the number of pages of the turn's context. The second is the number of device pages that
        the turn could have: its own, and those that the `running` turns do not hold.
        """
        resident = [each for each in running if not each.streamed]
        pinned = {branch: None for each in resident for branch in self.path_of(each)}
        num_left = self.config.device_pages - sum(len(branch.chunks) for branch in pinned)

        def pages_for(turn: Turn) -> tuple[int, int]:
            own = self.path_of(turn)
            num_own = sum(len(branch.chunks) for branch in own if branch in pinned)
            return -(-len(turn.tokens) // self.config.chunk_tokens), num_left + num_own

        return pages_for

    def needs_swap_in(self, turn: Turn) -> bool:
        """Whether a part of the turn's context has to come from the host."""
        conversation = self.conversations.get(turn.conversation_id)
        chunks = conversation.chunks() if conversation is not None else []
        return any(chunk.device_page is None and chunk.host_page is not None for chunk in chunks)

    def path_of(self, turn: Turn) -> list[Branch]:
        """Return the branches that the turn's conversation holds."""
        conversation = self.conversations.get(turn.conversation_id)
        return conversation.path() if conversation is not None else []

    # -- a turn takes, extends and returns its pages --

    def find(self, turn: Turn, now: float) -> None:
        """Let a new turn's conversation share the cached chunks that match the beginning of its context.

        The scheduler calls this at submission, so that the turn's waiting time depends only on the tokens
        that it must compute. `begin` repeats the search, because the cache may have changed.
        """
        if turn.identities is None:
            return
        conversation = self.conversations.get(turn.conversation_id)
        if conversation is not None:
            if conversation.attempt_id is not None:  # its last turn has an uncommitted slice
                turn.own_tokens = turn.history_tokens
                return
            turn.own_tokens = min(conversation.num_tokens, turn.history_tokens)
        self._find_prefix(turn, now)

    def begin(
        self, turn: Turn, now: float, reserve_pages: int, filled_before: dict[Chunk, int]
    ) -> PageReservation | Shortage | None:
        """Pin and reserve the pages of the turn's whole context, or return how many are needed.

        Returns None if the turn has to wait for a streamed turn.

        `filled_before`: for each chunk that this iteration writes, how far the chunk was filled before the
        iteration. Page copies need this, because they run before the slices. This method adds the targets of
        its page copies to `filled_before`.
        """
        conversation = self._find_prefix(turn, now)
        chunks, tail = self._context_of(conversation)
        if self.streamed is not None:
            used = chunks if tail is None else [*chunks, tail.chunk]
            if not self.streamed.is_clear_of_streamed(used, conversation.num_tokens, filled_before):
                return None
        required_pages = self._required_pages(turn, chunks, tail) + reserve_pages
        if self.tiers.available < required_pages:
            self.tree.forget_if_empty(conversation)
            return Shortage(required_pages)

        self._record_begin(conversation, turn, now)
        if tail is not None:
            self.tiers.hold_source(tail.chunk)
            self.tree.truncate(conversation, tail.chunk.index * self.config.chunk_tokens, now)
        for branch in conversation.path():
            self.candidates.pin(branch)
        self.candidates.scan_again()
        reservation = PageReservation()
        self._bring_in(chunks, turn, reservation, now)
        if tail is not None:
            chunks.append(self._copy_on_write(tail, turn, reservation, filled_before, now))
        # Other turns can find these chunks only after the turn's next token, because NaN or infinity in their
        # KV would show there. A warm registers none of them: it samples no token, and an uncommitted
        # iteration may still be writing them.
        if turn.identities is not None and not turn.warm:
            size = self.config.chunk_tokens
            unknown = [c for c in chunks if c.identity is None and c.filled == size]
            turn.completed += [(chunk, chunk.generation) for chunk in unknown]
        while len(chunks) * self.config.chunk_tokens < len(turn.tokens):
            chunks.append(self._append_chunk(conversation, now))
        turn.chunks = chunks
        turn.page_table = array("i", [chunk.device_page for chunk in chunks])  # type: ignore[misc]
        turn.frontier = 0
        return reservation

    def begin_streamed(
        self, turn: Turn, now: float, filled_before: dict[Chunk, int]
    ) -> PageReservation | None:
        """Pin and reserve host pages for the turn's whole context; None if that is impossible now."""
        assert self.streamed is not None
        conversation = self._find_prefix(turn, now)
        chunks, tail = self._context_of(conversation)
        known = conversation.num_tokens
        if not self.streamed.may_take(turn, chunks, known, filled_before, now):
            self.tree.forget_if_empty(conversation)
            return None
        if tail is not None:
            self.tree.truncate(conversation, tail.chunk.index * self.config.chunk_tokens, now)
        reservation = self.streamed.take(conversation, turn, now)
        if reservation is None:
            self.tree.forget_if_empty(conversation)
            return None
        self._record_begin(conversation, turn, now)
        self.candidates.scan_again()
        turn.chunks = conversation.chunks()
        turn.page_table = array("i", [chunk.host_page for chunk in turn.chunks])  # type: ignore[misc]
        turn.frontier, turn.streamed = 0, True
        return reservation

    def extend(self, turn: Turn, now: float) -> bool:
        """Take a page for the turn's next chunk; False if none is available."""
        conversation = self.conversations[turn.conversation_id]
        if turn.streamed:
            assert self.streamed is not None
            return self.streamed.extend(conversation, turn, now)
        if not self.tiers.available:
            return False
        chunk = self._append_chunk(conversation, now)
        turn.chunks.append(chunk)
        turn.page_table.append(chunk.device_page)  # type: ignore[arg-type]
        return True

    def end(self, turn: Turn, now: float, log_tokens: int, away_seconds: float = 0.0) -> None:
        """Unpin the turn's chunks, and cut the conversation at `log_tokens`.

        `away_seconds`: how long the client expects to be away. The eviction policy uses this value.
        """
        conversation = self.conversations[turn.conversation_id]
        assert conversation.attempt_id == turn.attempt_id
        size = self.config.chunk_tokens
        num_computed = 0  # positions from here on have no KV
        for chunk in reversed(turn.chunks):
            if chunk.filled:
                num_computed = min(chunk.index * size + chunk.filled, len(turn.tokens))
                break
        is_temporary = turn.is_temporary and turn.finish is not None
        if is_temporary:  # even if it was cancelled, the chunks that it has found are right
            log_tokens = max(log_tokens, min(turn.found_tokens, num_computed))
        conversation.attempt_id = None
        conversation.idle_since = now - self.policy.initial_idle_seconds(away_seconds)
        if turn.finish is not None and not turn.is_background:  # not suspended
            ended = EndedTurn(
                turn.num_new_tokens,
                turn.num_output_tokens,
                len(turn.tokens),
                away_seconds,
            )
            conversation.return_ratio = self.policy.turn_ended(turn.conversation_id, ended, now)
        is_suspended = turn.finish is None  # so it certainly continues
        conversation.value_factor = (
            1.0 if is_suspended else self.policy.value_factor_of(turn.conversation_id)
        )
        conversation.num_tokens = len(turn.chunks) * size
        conversation.log = turn.tokens[:log_tokens]
        if turn.identities is not None:
            turn.identities.cut(len(conversation.log))
            self._unsettled.append((conversation, turn.has_twins))
        turn.chunks, turn.page_table = [], array("i")
        streamed = conversation.is_streamed
        conversation.is_streamed = turn.streamed = False
        path = conversation.path()
        for branch in path:
            branch.touch(conversation)
        for branch in path:
            self.candidates.unpin(branch, now, streamed)
        self.candidates.scan_again()
        num_kept = min(num_computed, log_tokens)
        conversation.is_temporary = is_temporary
        if is_temporary:
            num_kept -= num_kept % size  # it has no later turn that could append
        self.tree.truncate(conversation, num_kept, now)
        self.tree.prune(conversation.leaf, now)
        self.tree.forget_if_empty(conversation)

    def settle(self, now: float) -> None:
        """Free the duplicate chunks of turns that have ended since the last call.

        Private chunks of these turns are replaced by registered chunks with the same content. A temporary
        conversation ends if another conversation holds the same chunks.
        """
        unsettled, self._unsettled = self._unsettled, []
        for conversation, has_twins in unsettled:
            if conversation.attempt_id is not None or conversation.leaf is None:
                continue
            found = self.content.find_for_ended(conversation, has_twins)
            if found is not None:
                merged = self.tree.rebase(conversation, self._last_chunk(found), now)
                self.counters.merged += merged
            for branch in conversation.path():
                for other in _superfluous(branch, conversation):
                    self._forget(other, now)
            self.tree.join(conversation, now)

    def register(self, turn: Turn) -> None:
        """Let other turns find the chunks that the turn has completed in collected iterations."""
        for chunk, generation in turn.completed:
            if chunk.generation == generation and chunk.filled == self.config.chunk_tokens:
                self.content.register(turn, chunk)
        turn.completed.clear()

    def discard(self, turn: Turn, now: float) -> list[Chunk]:
        """Drop a failed turn's `discard_if_failed`, for all holders. Return the dropped chunks.

        Also drop the chunks that only the turn's conversation holds, because they may have caused the
        failure. If chunks are found by content, drop the turn's whole context. A chunk with wrong KV would
        otherwise reach every conversation with the same prefix.
        """
        used = [
            chunk
            for chunk in turn.chunks
            if turn.identities is not None
            or (chunk.branch is not None and len(chunk.branch.holders) == 1)
        ]
        suspects = list(dict.fromkeys((*turn.discard_if_failed, *used)))
        for chunk in suspects:
            if chunk.identity is not None:
                self.content.forget(chunk)
            if not chunk.resident:
                continue
            self.counters.discarded += 1
            self.eviction_log.record(chunk, now, "discarded")
            self.tiers.invalidate(chunk)
            if chunk.idle:
                self.tiers.free_unfilled_pages(chunk)
                self.tree.prune(chunk.branch, now)
            elif chunk.host_page is not None and not (chunk.in_flight or chunk.is_streamed):
                self.tiers.free_host(chunk)
        return suspects

    # -- movements between the tiers --

    def plan_swap_outs(
        self, now: float, required_pages: int, written: Collection[Chunk] = ()
    ) -> list[SwapOut]:
        """Plan copies to the host until enough pages will be available (see `Eviction.plan_swap_outs`).

        Also plan copies of chunks that streamed turns will share with running turns. Chunks that this
        iteration writes (`written`) are not copied.
        """
        return self.eviction.plan_swap_outs(now, required_pages, written)

    def finish_copy(self, copy_id: int, now: float) -> None:
        """Finish a swap-in or swap-out."""
        self.eviction.finish_swap(copy_id, now)

    def release_sources(self, sources: Iterable[Chunk], now: float) -> None:
        """Release the source chunks of a reservation's page copies, after these copies are done."""
        for chunk in sources:
            self._release_source(chunk, now)

    # -- operations on a resting conversation --

    def fork(self, source_id: str, num_tokens: int, target_id: str, now: float) -> None:
        """Make another conversation that shares the first `num_tokens` positions. Nothing is copied."""
        assert target_id not in self.conversations, f"{target_id} is cached already"
        source = self.conversations.get(source_id)
        if source is not None:
            self.policy.forked(source_id, target_id, now)
            self.tree.fork(source, num_tokens, target_id, now)

    def rewind(self, conversation_id: str, num_tokens: int, now: float) -> None:
        conversation = self.conversations.get(conversation_id)
        if conversation is not None:
            assert conversation.attempt_id is None, f"{conversation} runs {conversation.attempt_id}"
            del conversation.log[num_tokens:]
            if conversation.identities is not None:
                conversation.identities.cut(num_tokens)
            self.tree.truncate(conversation, min(num_tokens, conversation.num_tokens), now)
            self.tree.prune(conversation.leaf, now)
            self.tree.forget_if_empty(conversation)

    def keep_found(self, turn: Turn, now: float) -> None:
        """Cut the conversation of a temporary turn that ended while it was suspended, as `end` does.

        The chunks that it has found stay for later turns.
        """
        conversation = self.conversations.get(turn.conversation_id)
        if conversation is None:
            return
        kept = min(max(turn.log_tokens or 0, turn.found_tokens), conversation.num_tokens)
        self.rewind(turn.conversation_id, kept - kept % self.config.chunk_tokens, now)
        conversation.is_temporary = True

    def evict(self, conversation_id: str, now: float) -> int:
        """Drop every idle page that only this conversation holds. Return how many chunks lost a page."""
        conversation = self.conversations.get(conversation_id)
        return 0 if conversation is None else self.eviction.evict(conversation, now)

    def move_to_host(self, conversation_id: str, now: float) -> int:
        """Move idle pages that only this conversation holds to the host; return the number of chunks.

        A page is moved if the host has room, or holds a less valuable chunk.
        """
        conversation = self.conversations.get(conversation_id)
        return 0 if conversation is None else self.eviction.move_to_host(conversation, now)

    # -- for operators --

    def locations(self, conversation_id: str) -> list[ChunkRun]:
        conversation = self.conversations.get(conversation_id)
        return [] if conversation is None else chunk_runs(conversation)

    def retention_value(self, conversation: CachedConversation, now: float) -> float | None:
        """Return the value of a conversation's least valuable chunk.

        Return None if a turn is running or the conversation has no KV.
        """
        return self.candidates.least_value_of(conversation, now)

    def check(self, now: float) -> None:
        """Recompute every invariant from the chunks alone."""
        audit(self.tree, self.tiers, self.candidates.queues, now)
        self.content.check()

    # -- the parts of `begin` --

    def _find_prefix(self, turn: Turn, now: float) -> CachedConversation:
        """Return the turn's conversation, with the chunks of the longest cached prefix of its context."""
        conversation = self._cut_conversation(turn, now)
        if turn.identities is None:
            return conversation
        turn.own_tokens = min(turn.own_tokens, conversation.num_tokens)
        found = self.content.find_for_turn(turn, conversation)
        if found is not None:
            self.conversations[turn.conversation_id] = conversation
            conversation.idle_since = now
            self.tree.rebase(conversation, self._last_chunk(found), now)
            conversation.num_tokens = found.num_tokens
            if len(conversation.log) < found.num_tokens:
                conversation.log = turn.tokens[: found.num_tokens]
                conversation.identities = turn.identities.beginning(found.num_tokens)
            if found.holder is conversation:
                turn.own_tokens = found.num_tokens
            elif turn.usage.admitted_at is None:
                turn.usage.shared_from = found.holder.conversation_id
        if turn.usage.admitted_at is None:
            most = found.num_tokens if found is not None else turn.found_tokens
            turn.found_tokens = min(most, conversation.num_tokens)
        return conversation

    def _last_chunk(self, found: Found) -> Chunk:
        num_chunks = -(-found.num_tokens // self.config.chunk_tokens)
        return found.holder.chunks()[num_chunks - 1]

    def _cut_conversation(self, turn: Turn, now: float) -> CachedConversation:
        """Return the turn's conversation, cut to the length of its log."""
        conversation = self.conversations.get(turn.conversation_id)
        if conversation is None:
            conversation = CachedConversation(turn.conversation_id, now)
        assert conversation.attempt_id is None, (
            f"{conversation} already runs {conversation.attempt_id}"
        )
        resumes = turn.usage.admitted_at is not None
        kept_max = len(turn.tokens) if resumes else max(turn.history_tokens, turn.found_tokens)
        if conversation.num_tokens > kept_max:
            self.tree.truncate(conversation, kept_max, now)
        if len(conversation.log) > kept_max:  # the rest is in no history
            conversation.log = conversation.log[:kept_max]
            if conversation.identities is not None:
                conversation.identities.cut(kept_max)
        return conversation

    def _record_begin(self, conversation: CachedConversation, turn: Turn, now: float) -> None:
        """Record that the turn holds its pages."""
        self.conversations[turn.conversation_id] = conversation
        conversation.attempt_id = turn.attempt_id
        conversation.log = turn.tokens  # it grows until the turn gives up its pages
        conversation.identities, conversation.is_temporary = turn.identities, False
        resumes = turn.usage.admitted_at is not None
        if not (resumes or turn.is_background):  # conversations of batch jobs do not return
            if turn.is_temporary:
                self._end_continued(conversation, now)
            self.policy.turn_began(turn.conversation_id, now)

    def _context_of(self, conversation: CachedConversation) -> tuple[list[Chunk], Tail | None]:
        """Return the chunks that the turn uses without a copy, and the last chunk if it must be copied first.

        A turn may append to a partly used chunk if no other conversation holds the chunk and nothing is
        filled after the used part.
        """
        chunks, size = conversation.chunks(), self.config.chunk_tokens
        num_used = conversation.num_tokens - size * (len(chunks) - 1)
        if not chunks or num_used >= size:
            return chunks, None
        if self._may_append(chunks[-1], num_used):
            if chunks[-1].identity is not None:  # it was full, and has lost KV since
                self.content.forget(chunks[-1])
            return chunks, None
        return chunks, Tail(chunks.pop(), num_used)

    def _may_append(self, chunk: Chunk, num_used: int) -> bool:
        assert chunk.branch is not None
        return len(chunk.branch.holders) == 1 and chunk.filled <= num_used

    def _required_pages(self, turn: Turn, chunks: list[Chunk], tail: Tail | None) -> int:
        """Return how many available pages the turn takes.

        These are the missing pages, and pages of its own context that count as available.
        """
        num_missing = -(-len(turn.tokens) // self.config.chunk_tokens) - len(chunks)
        num_reclaimable = 0
        for chunk in chunks:
            if chunk.device_page is None:
                num_missing += 1
            elif chunk.reclaimable and chunk.idle:
                num_reclaimable += 1
        if tail is not None and tail.chunk.reclaimable and tail.chunk.idle:
            num_reclaimable += 1
        return num_missing + num_reclaimable

    def _bring_in(
        self, chunks: list[Chunk], turn: Turn, reservation: PageReservation, now: float
    ) -> None:
        """Give each chunk of the turn's context a device page, and swap in what the host has."""
        size, history_kv = self.config.chunk_tokens, turn.history_kv
        num_on_device = num_from_host = 0
        for chunk in chunks:
            history_slots = min(size, max(history_kv - chunk.index * size, 0))
            if chunk.device_page is not None:
                num_on_device += min(history_slots, chunk.filled)
                continue
            self.eviction.take_device_page(chunk, now)
            if chunk.host_page is None:
                continue
            used = chunk.in_flight or chunk.is_streamed
            if not used and not self._is_intact(chunk.host_page):
                self.eviction.drop_damaged(chunk, now)
            elif used or self.policy.worth_swapping_in(chunk.index):
                swap_in = self.tiers.start_swap_in(chunk, chunk, chunk.host_filled)
                reservation.swap_ins.append(swap_in)
                num_from_host += min(history_slots, chunk.filled)
            else:
                self.eviction.drop_to_recompute(chunk, now)
        reservation.device_tokens += num_on_device
        reservation.host_tokens += num_from_host

    def _copy_on_write(
        self,
        tail: Tail,
        turn: Turn,
        reservation: PageReservation,
        filled_before: dict[Chunk, int],
        now: float,
    ) -> Chunk:
        """Append a new chunk that only this turn holds, with a copy of the used slots of `tail`."""
        source, num_used = tail
        chunk = self._append_chunk(self.conversations[turn.conversation_id], now)
        start = chunk.index * self.config.chunk_tokens
        history_slots = min(num_used, max(turn.history_kv - start, 0))
        if source.device_page is not None and not source.swapping_in:
            chunk.filled = min(num_used, filled_before.get(source, source.filled))
            reservation.device_tokens += min(history_slots, chunk.filled)
            if chunk.filled:
                assert chunk.device_page is not None
                copy = PageCopy(source.device_page, chunk.device_page, chunk.filled)
                reservation.copies.append(copy)
                filled_before[chunk] = 0  # the copies of an iteration are made in any order
                self.counters.copied_on_write += 1
        elif source.host_page is not None:
            if (
                source.in_flight == 1
                and not source.is_streamed
                and not self._is_intact(source.host_page)
            ):
                self.eviction.drop_damaged(source, now)
            else:
                chunk.filled = min(num_used, source.host_filled)
                reservation.host_tokens += min(history_slots, chunk.filled)
                reservation.swap_ins.append(self.tiers.start_swap_in(source, chunk, chunk.filled))
                self.counters.copied_on_write += 1
        reservation.copied = (source, chunk)
        if reservation.copies:
            reservation.sources.append(source)
        else:
            self._release_source(source, now)
        return chunk

    def _end_continued(self, conversation: CachedConversation, now: float) -> None:
        """End the temporary conversation that a temporary turn continues under another id."""
        for branch in reversed(conversation.path()):
            for other in _superfluous(branch, conversation):
                if other.is_temporary:
                    self.policy.continued(other.conversation_id, conversation.conversation_id)
                    self._forget(other, now)
                    return

    def _forget(self, conversation: CachedConversation, now: float) -> None:
        self.tree.truncate(conversation, 0, now)
        self.tree.forget_if_empty(conversation)

    def _append_chunk(self, conversation: CachedConversation, now: float) -> Chunk:
        chunk = self.tree.append_chunk(conversation)
        self.eviction.take_device_page(chunk, now)
        return chunk

    def _release_source(self, chunk: Chunk, now: float) -> None:
        """Release the source of a page-to-page copy."""
        self.tiers.held_sources.remove(chunk)
        self.candidates.release(chunk, now)
        if not chunk.resident:  # its page was damaged
            self.tree.prune(chunk.branch, now)


def _superfluous(branch: Branch, conversation: CachedConversation) -> list[CachedConversation]:
    """Return idle holders of a branch of the conversation that end in this branch and need not be kept.

    These are temporary conversations whose tokens `conversation` also has. If the branch has more than
    HOLDERS_MAX holders, its oldest conversations with identities are returned as well, to limit the
    number of holders. This loses nothing: their next turns can find the chunks again by content. Only the
    most recent and the least recent holders are looked at.
    """
    holders, most = branch.holders, HOLDERS_SUMMED_MAX
    oldest = list(islice(holders, most))
    recent = [] if len(holders) <= most else list(islice(reversed(holders), most))
    many = len(holders) > HOLDERS_MAX
    return [
        each
        for each in dict.fromkeys((*oldest, *recent))
        if each.leaf is branch
        and each.attempt_id is None
        and each is not conversation
        and (
            (each.is_temporary and each.num_tokens <= conversation.num_tokens)
            or (many and each.identities is not None and each not in recent)
        )
    ]
