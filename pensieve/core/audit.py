"""Check every invariant of the cache and of its turns.

Everything is recomputed from the chunks and compared with the counts that the cache keeps up to date. An
AssertionError names the broken invariant.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from pensieve.core.policies.queue import EvictionQueue
from pensieve.core.prefix_tree import Branch, CachedConversation, Chunk, PrefixTree
from pensieve.core.tiers import Tiers
from pensieve.core.turn import Turn, TurnState


def audit(tree: PrefixTree, tiers: Tiers, queues: Sequence[EvictionQueue], now: float) -> None:
    holders_of = _audit_paths(tree)
    num_reclaimable = _audit_branches(holders_of)
    num_copies = _copies_by_chunk(tiers)
    chunks = [chunk for branch in holders_of for chunk in branch.chunks]
    orphans = [chunk for chunk in num_copies if chunk.branch is None]
    _audit_pages([*chunks, *orphans], num_copies, tiers, tree.chunk_tokens)
    assert tiers.num_reclaimable == num_reclaimable, "the count of reclaimable pages is off"
    num_inward = sum(swap.inward for swap in tiers.swaps.values())
    num_outward = len(tiers.swaps) - num_inward
    assert tiers.num_swapping_in == num_inward, "the count of swap-ins is off"
    assert tiers.num_swapping_out == num_outward, "the count of swap-outs is off"
    idle = [branch for branch in holders_of if not branch.num_running]
    for queue in queues:
        queue.check(idle, now)


def _audit_paths(tree: PrefixTree) -> dict[Branch, set[CachedConversation]]:
    """Check that paths have no gaps; return the branches on them with their holders."""
    holders_of: dict[Branch, set[CachedConversation]] = {}
    for conversation in tree.conversations.values():
        end = 0
        for branch in conversation.path():
            assert branch.start == end, f"{conversation} has a gap before {branch}"
            assert branch.chunks, f"{branch} is empty"
            end = branch.end
            holders_of.setdefault(branch, set()).add(conversation)
        if conversation.attempt_id is None:
            num_chunks = -(-conversation.num_tokens // tree.chunk_tokens)
            assert num_chunks == end, f"{conversation} holds {end} chunks, not {num_chunks}"
    return holders_of


def _audit_branches(holders_of: dict[Branch, set[CachedConversation]]) -> int:
    """Check each branch's holders, children, pins and counts; return the number of reclaimable chunks."""
    num_children: dict[Branch, int] = {}
    for branch in holders_of:
        if branch.parent is not None:
            num_children[branch.parent] = num_children.get(branch.parent, 0) + 1
    num_reclaimable = 0
    for branch, holders in holders_of.items():
        assert set(branch.holders) == holders, f"{branch} is held by {holders}"
        assert branch.num_children == num_children.get(branch, 0), f"{branch} lost a child"
        num_running = sum(holder.attempt_id is not None for holder in holders)
        assert branch.num_running == num_running, f"{branch} is pinned {branch.num_running} times"
        num_streamed = sum(holder.is_streamed for holder in holders)
        assert branch.num_streamed == num_streamed, (
            f"{branch} is streamed {branch.num_streamed} times"
        )
        times = [holder.idle_since for holder in branch.holders]
        assert times == sorted(times), f"the holders of {branch} are out of order"
        assert branch.idle_since == max(times), f"{branch} was last active at {max(times)}"
        for index, chunk in enumerate(branch.chunks, branch.start):
            assert chunk.branch is branch, f"{chunk} is on another branch"
            assert chunk.index == index, f"{chunk} has not the index {index}"
            if num_running:
                assert not chunk.marked_to_drop, f"{chunk} is in use and marked to drop"
            if num_running > num_streamed:
                assert chunk.device_page is not None, f"{chunk} is in use and not on the device"
            if num_running == num_streamed > 0:
                assert not chunk.reclaimable, f"{chunk} is streamed and still on the device"
            if num_streamed:
                assert chunk.host_page is not None, f"{chunk} is streamed and not on the host"
        num_resident = sum(chunk.resident for chunk in branch.chunks)
        assert branch.num_resident == num_resident, f"{branch} has {num_resident} resident chunks"
        count = 0 if num_running else sum(chunk.reclaimable for chunk in branch.chunks)
        assert branch.num_reclaimable == count, f"{branch} has {count} reclaimable chunks"
        num_reclaimable += count
    return num_reclaimable


def _copies_by_chunk(tiers: Tiers) -> dict[Chunk, int]:
    """Return the number of unfinished copies that read or write each chunk."""
    num_copies: dict[Chunk, int] = {}
    for swap in tiers.swaps.values():
        for chunk in {swap.source, swap.target}:
            num_copies[chunk] = num_copies.get(chunk, 0) + 1
    for chunk in tiers.held_sources:
        num_copies[chunk] = num_copies.get(chunk, 0) + 1
    return num_copies


def _audit_pages(
    chunks: list[Chunk], num_copies: dict[Chunk, int], tiers: Tiers, chunk_tokens: int
) -> None:
    """Check each chunk's slots and copies. Check that each page belongs to one chunk or is in its pool."""
    device_pages, host_pages = [], []
    for chunk in chunks:
        assert 0 <= chunk.host_filled <= chunk.filled <= chunk_tokens, f"{chunk}"
        assert chunk.filled == 0 or chunk.resident, f"{chunk} has filled slots but no page"
        assert chunk.host_filled == 0 or chunk.host_page is not None, f"{chunk}"
        assert chunk.device_page is not None or chunk.filled == chunk.host_filled, f"{chunk}"
        assert chunk.in_flight == num_copies.get(chunk, 0), (
            f"{chunk} counts {chunk.in_flight} copies in flight, not {num_copies.get(chunk, 0)}"
        )
        if chunk.device_page is not None:
            device_pages.append(chunk.device_page)
        if chunk.host_page is not None:
            host_pages.append(chunk.host_page)
    tiers.device.check(device_pages)
    tiers.host.check(host_pages)


class TurnsByState(NamedTuple):
    """The turns of a scheduler."""

    every: Mapping[int, Turn]
    running: Mapping[int, Turn]
    suspended: Collection[Turn]
    queued: Collection[Turn]
    releasing: Mapping[int, Turn]  # running turns that give up their pages at a commit


def audit_turns(
    turns: TurnsByState, conversations: Mapping[str, CachedConversation], chunk_tokens: int
) -> None:
    for state, in_state in (
        (TurnState.RUNNING, turns.running.values()),
        (TurnState.SUSPENDED, turns.suspended),
        (TurnState.QUEUED, turns.queued),
    ):
        for turn in in_state:
            assert turn.state is state, f"turn {turn.attempt_id} is {turn.state}, not {state}"
            assert turns.every.get(turn.attempt_id) is turn, (
                f"turn {turn.attempt_id} is not registered"
            )
    num_turns = len(turns.running) + len(turns.suspended) + len(turns.queued)
    assert len(turns.every) == num_turns, "a turn is in no state, or in two"
    assert set(turns.releasing) <= set(turns.running), "a turn that does not run releases pages"
    for turn in turns.running.values():
        conversation = conversations[turn.conversation_id]
        assert conversation.is_streamed == turn.streamed, (
            f"{conversation} and its turn disagree whether the turn is streamed"
        )
        _audit_pages_of(turn, conversation, chunk_tokens)
    for conversation in conversations.values():
        if conversation.attempt_id is None:
            known = len(conversation.log)
            assert known >= conversation.num_tokens, f"{conversation} has a log of {known}"
        else:
            assert conversation.attempt_id in turns.running, (
                f"{conversation} runs a turn that is gone"
            )


def _audit_pages_of(turn: Turn, conversation: CachedConversation, chunk_tokens: int) -> None:
    assert conversation.attempt_id == turn.attempt_id, f"{conversation} does not know its turn"
    held = conversation.chunks()
    assert turn.chunks == held, f"turn {turn.attempt_id} and its conversation disagree"
    pages = [chunk.host_page if turn.streamed else chunk.device_page for chunk in held]
    assert turn.page_table.tolist() == pages, "a page moved"
    position = 0
    for chunk in turn.chunks:
        end = min((chunk.index + 1) * chunk_tokens, turn.frontier)
        assert chunk.index * chunk_tokens + chunk.filled >= end, (
            f"turn {turn.attempt_id} believes that {chunk} is filled up to {turn.frontier}"
        )
        position = end
    assert turn.frontier <= position or not turn.chunks
