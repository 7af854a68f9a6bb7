"""The audit: every invariant of the cache, recomputed from the chunks alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pensieve.core.prefix_tree import Branch, Chunk, Conversation

if TYPE_CHECKING:
    from pensieve.core.cache import KVCache


def audit(cache: KVCache, now: float) -> None:
    """AssertionError names what does not hold; it looks at everything, and at nothing that is counted
    as it goes, except to compare."""
    branches: dict[Branch, set[Conversation]] = {}
    for conversation in cache.conversations.values():
        position = 0
        for branch in conversation.path():
            assert branch.start == position, f"{conversation} has a gap before {branch}"
            assert branch.chunks, f"{branch} is empty"
            position = branch.end
            branches.setdefault(branch, set()).add(conversation)
        if conversation.turn_id is None:
            chunks = -(-conversation.num_tokens // cache.config.chunk_tokens)
            assert chunks == position, f"{conversation} holds {position} chunks, not {chunks}"
    moving: dict[Chunk, int] = {}
    for copy in cache._copies.values():
        for chunk in {copy.source, copy.target}:
            moving[chunk] = moving.get(chunk, 0) + 1
    for chunk in cache._held:
        moving[chunk] = moving.get(chunk, 0) + 1
    orphans = [chunk for chunk in moving if chunk.branch is None]
    children: dict[Branch, int] = {}
    for branch in branches:
        if branch.parent is not None:
            children[branch.parent] = children.get(branch.parent, 0) + 1
    device_pages, host_pages, reclaimable = [], [], 0
    for branch, holders in branches.items():
        assert set(branch.holders) == holders, f"{branch} is held by {holders}"
        assert branch.num_children == children.get(branch, 0), f"{branch} lost a child"
        running = sum(holder.turn_id is not None for holder in holders)
        assert branch.num_running == running, f"{branch} is pinned {branch.num_running} times"
        order = [holder.idle_since for holder in branch.holders]
        assert order == sorted(order), f"the holders of {branch} are out of order"
        assert branch.idle_since == max(order), f"{branch} was last active at {max(order)}"
        for index, chunk in enumerate(branch.chunks, branch.start):
            assert chunk.branch is branch, f"{chunk} is on another branch"
            assert chunk.index == index, f"{chunk} is out of place"
            if running:
                assert not chunk.condemned, f"{chunk} is in use and condemned"
        resident = sum(chunk.resident for chunk in branch.chunks)
        assert branch.num_resident == resident, f"{branch} has {resident} resident chunks"
        count = 0 if running else sum(chunk.reclaimable for chunk in branch.chunks)
        assert branch.num_reclaimable == count, f"{branch} has {count} reclaimable chunks"
        reclaimable += count
    for chunk in [*(c for branch in branches for c in branch.chunks), *orphans]:
        assert 0 <= chunk.host_filled <= chunk.filled <= cache.config.chunk_tokens, f"{chunk}"
        assert chunk.filled == 0 or chunk.resident, f"{chunk} is filled and nowhere"
        assert chunk.host_filled == 0 or chunk.host_page is not None, f"{chunk}"
        assert chunk.device_page is not None or chunk.filled == chunk.host_filled, f"{chunk}"
        assert chunk.in_flight == moving.get(chunk, 0), f"{chunk} is counted as moving"
        if chunk.device_page is not None:
            device_pages.append(chunk.device_page)
        if chunk.host_page is not None:
            host_pages.append(chunk.host_page)
    assert cache._num_reclaimable == reclaimable, "the count of reclaimable pages is off"
    inward = sum(copy.inward for copy in cache._copies.values())
    assert cache._num_swapping_in == inward, "the count of swap-ins is off"
    assert cache._num_swapping_out == len(cache._copies) - inward, "the count of swap-outs is off"
    cache.device.check(device_pages)
    cache.host.check(host_pages)
    idle = [branch for branch in branches if not branch.num_running]
    for queue in cache._queues:
        queue.check(idle, now)
