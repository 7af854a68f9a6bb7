"""Plant bugs in the real code. Random traffic must find each of them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pensieve.core.cache import KVCache
from pensieve.core.eviction import Candidates, Eviction
from pensieve.core.iteration import PageGroup, SampledToken, SwapIn, SwapOut
from pensieve.core.iteration_builder import IterationBuilder
from pensieve.core.policies.queue import QUALIFIES, Role
from pensieve.core.preemption import Preemption
from pensieve.core.prefix_tree import Branch, Chunk, PrefixTree
from pensieve.core.scheduler import Scheduler
from pensieve.core.stream_groups import StreamGroups, _GroupBuilder
from pensieve.core.streamed_pages import StreamedPages
from pensieve.core.tiers import PagePool, PageReservation, Tiers
from pensieve.core.turn import Turn
from tests.core.world import SPOILED, TWINS, ScriptedWorld, Shape, run

Plant = Callable[[pytest.MonkeyPatch], None]
SHAPES = (
    Shape(),
    Shape(device_pages=8, host_pages=30, late=0.8),
    Shape(failing=0.05, conversations=8),
    Shape(device_pages=24, host_pages=6, conversations=12, late=0.9),
    Shape(overlap=True, failing=0.02),
    Shape(restless=True, conversations=10, host_pages=4, late=0.7),
)
STREAMED = (
    Shape(staging_pages=8, host_pages=40, device_pages=8),
    Shape(staging_pages=12, host_pages=16, device_pages=8, restless=True, conversations=10),
    Shape(staging_pages=6, host_pages=14, device_pages=8, overlap=True, failing=0.03, late=0.9),
)
SEEDS = 150


SHAPES_OF = {  # all other bugs use SHAPES, or STREAMED
    "a copy in flight revives what was discarded": (SPOILED,),
    "a streamed turn joins a hole that another fills": (TWINS,),
}


def replace_method(owner: type, name: str, change: Callable[..., Any]) -> Plant:
    """Return a function that replaces a method by `change(original, self, *arguments)`."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = getattr(owner, name)
        patch.setattr(owner, name, lambda self, *args: change(original, self, *args))

    return plant


def uncount_copies(
    original: Any, eviction: Eviction, now: float, required: int, *rest: Any
) -> list[SwapOut]:
    copies: list[SwapOut] = original(eviction, now, required, *rest)
    for copy in copies:
        chunk = eviction._tiers.swaps[copy.copy_id].source
        chunk.in_flight -= 1
        eviction.candidates.requalify(chunk, now)
    return copies


def mark_as_full(original: Any, tiers: Tiers, source: Chunk, target: Chunk, n: int) -> SwapIn:
    copy: SwapIn = original(tiers, source, target, n)
    target.filled = Shape.chunk_tokens
    return copy


def allow_swap_outs_during_swap_ins(
    original: Any, eviction: Eviction, now: float, required: int, *rest: Any
) -> Any:
    tiers = eviction._tiers
    swapping_in, tiers.num_swapping_in = tiers.num_swapping_in, 0
    try:
        return original(eviction, now, required, *rest)
    finally:
        tiers.num_swapping_in = swapping_in


def jump_over_holes(original: Any, builder: IterationBuilder, turn: Turn, *rest: Any) -> Any:
    turn.frontier = max(turn.frontier, turn.history_tokens - 1)
    return original(builder, turn, *rest)


def ignore_before(original: Any, cache: KVCache, turn: Any, now: float, n: int, _: Any) -> Any:
    return original(cache, turn, now, n, {})


def leak_host_page(original: Any, tiers: Tiers, chunk: Chunk) -> None:
    page, tiers.host.give_back = tiers.host.give_back, lambda page: None  # type: ignore[method-assign]
    try:
        original(tiers, chunk)
    finally:
        tiers.host.give_back = page  # type: ignore[method-assign]


def begin_with_kv_of_another(original: Any, scheduler: Scheduler, turn: Turn, now: float) -> None:
    original(scheduler, turn, now)
    name, cache = turn.conversation_id, scheduler.cache
    if name != "c1" and turn.history_tokens > 4 and "c1" in cache.conversations:
        cache.rewind(name, 0, now)
        cache.fork("c1", 4, name, now)


def append_twice(original: Any, scheduler: Scheduler, iteration: Any, *rest: Any) -> Any:
    events = original(scheduler, iteration, *rest)
    for each in events[:1]:
        turn = scheduler.turn(each.attempt_id) if isinstance(each, SampledToken) else None
        if turn is not None and turn.finish is None:
            turn.tokens.append(each.token_id)
    return events


def forget_suspended(original: Any, scheduler: Scheduler, turn: Any, now: float) -> None:
    original(scheduler, turn, now)
    if turn in scheduler.suspended:
        scheduler.suspended.remove(turn)


def release_at_once(original: Any, cache: KVCache, *rest: Any) -> Any:
    found = original(cache, *rest)
    if isinstance(found, PageReservation):
        for chunk in found.sources:
            chunk.in_flight -= 1
            if chunk.branch is None and not chunk.in_flight:
                cache.tiers.free_pages(chunk)
    return found


def keep_length(
    original: Any, tree: PrefixTree, conversation: Any, num_tokens: int, now: float
) -> None:
    before = conversation.num_tokens
    original(tree, conversation, num_tokens, now)
    conversation.num_tokens = max(before, num_tokens)


def reuse_latest(original: Any, pool: PagePool, page: int) -> None:
    original(pool, page)
    pool._empty.append(page)


def reclaim_during_a_copy(patch: pytest.MonkeyPatch) -> None:
    """A host copy counts as soon as it starts, and an unfinished copy does not protect its pages."""
    replace_method(Eviction, "plan_swap_outs", trust_copy_at_once)(patch)
    free = Tiers.free_device

    def free_device(tiers: Tiers, chunk: Chunk) -> None:
        in_flight, chunk.in_flight = chunk.in_flight, 0
        free(tiers, chunk)
        chunk.in_flight = in_flight

    def reclaimable(chunk: Chunk) -> bool:
        clean = chunk.marked_to_drop or chunk.host_filled >= chunk.filled
        return chunk.device_page is not None and clean and not chunk.swapping_in

    patch.setattr(Tiers, "free_device", free_device)
    patch.setattr(Chunk, "reclaimable", property(reclaimable))
    patch.setitem(QUALIFIES, Role.RECLAIM, reclaimable)


def trust_copy_at_once(
    original: Any, eviction: Eviction, now: float, required: int, *rest: Any
) -> list[SwapOut]:
    copies: list[SwapOut] = original(eviction, now, required, *rest)
    for copy in copies:
        chunk = eviction._tiers.swaps[copy.copy_id].source
        chunk.host_filled = chunk.filled
        eviction.candidates.requalify(chunk, now)
    return copies


def free_orphans_at_once(original: Any, candidates: Candidates, branch: Branch) -> None:
    original(candidates, branch)
    for chunk in branch.chunks:
        in_flight, chunk.in_flight = chunk.in_flight, 0
        candidates.tiers.free_pages(chunk)
        chunk.in_flight = in_flight


def stay_marked(original: Any, candidates: Candidates, branch: Branch) -> None:
    marked = [chunk for chunk in branch.chunks if chunk.marked_to_drop]
    original(candidates, branch)
    for chunk in marked:
        chunk.marked_to_drop = True


def finish_at_once(original: Any, scheduler: Scheduler, turn: Turn, *rest: Any) -> None:
    turn.num_uncommitted = 0
    original(scheduler, turn, *rest)


def overtake(original: Any, scheduler: Scheduler, now: float) -> Any:
    for share in scheduler.queued._with_turns.values():
        for line in share.lines.values():
            line.rotate(-1)
    return original(scheduler, now)


def spend_twice(original: Any, builder: IterationBuilder, turn: Turn, *rest: Any) -> Any:
    before = builder.num_tokens_left
    num_tokens = original(builder, turn, *rest)
    builder.num_tokens_left += (before - builder.num_tokens_left + 1) // 2
    return num_tokens


def count_last_chunk_as_full(original: Any, cache: KVCache, turn: Turn, *rest: Any) -> None:
    for chunk in turn.chunks[-1:]:
        chunk.filled = cache.config.chunk_tokens
    original(cache, turn, *rest)


def give_way_to_equals(original: Any, preemption: Preemption, turn: Turn, waiting: Turn) -> bool:
    """A running turn gives way to any waiting turn that is not below it."""
    return waiting.level >= turn.level


def forget_reply(original: Any, turn: Turn, *rest: Any) -> None:
    """The preempted turn starts again, but its client does not know."""
    original(turn, *rest)
    del turn.tokens[turn.prompt_end :]


def forget_frontiers(original: Any, scheduler: Scheduler, turn: Turn, now: float) -> None:
    scheduler.cache.discard(turn, now)


def revive(original: Any, tiers: Tiers, chunk: Chunk) -> None:
    """A copy that started before its chunk was discarded makes the chunk valid again."""
    num_slots = {copy_id: swap.num_slots for copy_id, swap in tiers.swaps.items()}
    original(tiers, chunk)
    for copy_id, swap in tiers.swaps.items():
        swap.num_slots = num_slots[copy_id]


def count_for_ever(original: Any, preemption: Preemption, turn: Turn) -> None:
    """Turns that have ended still count as running."""
    place = preemption._places.get(turn.attempt_id)
    original(preemption, turn)
    if place is not None:
        preemption._num_running[place] += 1


def forget_holders(original: Any, tree: PrefixTree, branch: Branch, *rest: Any) -> Any:
    """The upper part of a split branch forgets some of its holders."""
    upper = original(tree, branch, *rest)
    for holder in list(upper.holders)[1:]:
        del upper.holders[holder]
    return upper


def store_nothing(original: Any, group: Any, *rest: Any) -> None:
    original(group, *rest)
    group._stored[-1] = 0


def load_too_little(original: Any, group: Any, *rest: Any) -> None:
    original(group, *rest)
    group._loaded[-1] = max(group._loaded[-1] - 1, 0)


def swap_two_pages(original: Any, group: Any, turn: Turn, *rest: Any) -> None:
    """Two pages of a context are staged in swapped order."""
    pages = turn.page_table
    if len(pages) > 1:
        turn.page_table = array("i", [pages[1], pages[0], *pages[2:]])
    original(group, turn, *rest)
    turn.page_table = pages


def swap_groups(original: Any, groups: Any, *rest: Any) -> Any:
    """Each group gets the pages of another group."""
    slices, found = original(groups, *rest)
    if len(found) > 1:
        turned = [found[-1], *found[:-1]]
        found = tuple(
            PageGroup(*each[:2], *other[2:]) for each, other in zip(found, turned, strict=True)
        )
    return slices, found


def widen_groups(original: Any, groups: Any, *rest: Any) -> Any:
    pages_max, groups._pages_max = groups._pages_max, 1 << 20
    try:
        return original(groups, *rest)
    finally:
        groups._pages_max = pages_max


def pin_nothing(original: Any, pool: PagePool) -> int | None:
    """A host page that is in use is handed out again."""
    page: int | None = original(pool)
    if page is None and pool.num_pages > 12:
        pool.give_back(0)
        page = original(pool)
    return page


def take_dirty(original: Any, pages: Any, turn: Any, chunks: Any, *rest: Any) -> bool:
    """Chunks that exist only on the device are not copied to the host."""
    filled = {chunk: chunk.filled for chunk in chunks}
    for chunk in chunks:
        chunk.filled = chunk.host_filled
    may: bool = original(pages, turn, chunks, *rest)
    for chunk, count in filled.items():
        chunk.filled = count if not may else max(count, chunk.host_filled)
        chunk.host_filled = (
            chunk.filled if may and chunk.host_page is not None else chunk.host_filled
        )
    return may


STREAMING_FAULTS: dict[str, Plant] = {
    "what a streamed turn writes is not stored": replace_method(
        _GroupBuilder, "_add", store_nothing
    ),
    "a staged page lacks its last slot": replace_method(_GroupBuilder, "_add", load_too_little),
    "a page is staged in another's place": replace_method(_GroupBuilder, "add", swap_two_pages),
    "the groups' order is swapped": replace_method(StreamGroups, "arrange", swap_groups),
    "a group is wider than its arena": replace_method(StreamGroups, "arrange", widen_groups),
    "a streamed turn's host pages are not pinned": replace_method(PagePool, "take", pin_nothing),
    "a streamed turn joins a hole that another fills": replace_method(
        StreamedPages,
        "may_take",
        lambda f, pages, turn, chunks, n, _, now: f(pages, turn, chunks, n, {}, now),
    ),
    "dirty chunks are streamed from old host pages": replace_method(
        StreamedPages, "may_take", take_dirty
    ),
}

FAULTS: dict[str, Plant] = {
    "a copy in flight is not counted": replace_method(Eviction, "plan_swap_outs", uncount_copies),
    "a page is reclaimed while it is copied": reclaim_during_a_copy,
    "an orphan's pages are freed during a copy": replace_method(
        Candidates, "branch_removed", free_orphans_at_once
    ),
    "a turn appends to a chunk of others": replace_method(
        KVCache, "_may_append", lambda f, *a: True
    ),
    "pages of running turns are not pinned": replace_method(Candidates, "pin", lambda f, *a: None),
    "a pinned chunk stays marked to drop": replace_method(Candidates, "pin", stay_marked),
    "swap-outs start during swap-ins": replace_method(
        Eviction, "plan_swap_outs", allow_swap_outs_during_swap_ins
    ),
    "holes are not recomputed": replace_method(IterationBuilder, "fill", jump_over_holes),
    "a failed turn's KV is kept": replace_method(KVCache, "discard", lambda f, *a: []),
    "a swapped-in chunk counts as full": replace_method(Tiers, "start_swap_in", mark_as_full),
    "a resting chunk counts as full": replace_method(KVCache, "end", count_last_chunk_as_full),
    "a dropped host page leaks": replace_method(Tiers, "free_host", leak_host_page),
    "a page is handed out twice": replace_method(PagePool, "give_back", reuse_latest),
    "a sampled token is appended twice": replace_method(Scheduler, "commit", append_twice),
    "a suspended turn is forgotten": replace_method(Scheduler, "_release", forget_suspended),
    "a turn in flight gives its pages up": replace_method(Scheduler, "_finish", finish_at_once),
    "a page copy's source is let go at once": replace_method(KVCache, "begin", release_at_once),
    "a cut conversation keeps its length": replace_method(PrefixTree, "truncate", keep_length),
    "a conversation begins with another's KV": replace_method(
        Scheduler, "submit", begin_with_kv_of_another
    ),
    "a split branch loses a holder": replace_method(PrefixTree, "_split", forget_holders),
    "a released copy source never requalifies": replace_method(
        Candidates, "requalify", lambda f, *a: None
    ),
    "a later turn overtakes": replace_method(Scheduler, "plan", overtake),
    "a turn gives way to its equal": replace_method(Preemption, "_is_below", give_way_to_equals),
    "a turn that gave way loses its reply": replace_method(Turn, "give_way", forget_reply),
    "an iteration exceeds its budget": replace_method(IterationBuilder, "fill", spend_twice),
    "a copy in flight revives what was discarded": replace_method(Tiers, "invalidate", revive),
    "the places of turns that ended are counted for ever": replace_method(
        Preemption, "ended", count_for_ever
    ),
    "others trust discarded chunks": replace_method(Scheduler, "_discard", forget_frontiers),
}

ONLY_THE_AUDIT_SEES = {  # bugs that change no reply, or change one only with more seeds
    "a pinned chunk stays marked to drop",
    "a dropped host page leaks",
    "the places of turns that ended are counted for ever",
    "others trust discarded chunks",
}

FIRST_SEED = {"a page copy's source is let go at once": 700}  # one world in about 700 finds it


def found_within(seeds: int, first: int = 0, shapes: Sequence[Shape] = SHAPES) -> int | None:
    """Return the first seed that reveals the bug by an assertion, a KeyError or an IndexError."""
    for seed in range(first, first + seeds):
        try:
            run(seed, shapes[seed % len(shapes)], actions=40)
        except (AssertionError, KeyError, IndexError):
            return seed
    return None


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable `check()` for most bugs, so that wrong pages and replies must reveal them."""
    FAULTS[fault](monkeypatch)
    if fault not in ONLY_THE_AUDIT_SEES:
        monkeypatch.setattr(Scheduler, "check", lambda *a: None)
    found = found_within(SEEDS, FIRST_SEED.get(fault, 0), SHAPES_OF.get(fault, SHAPES))
    assert found is not None, f"{SEEDS} seeds did not notice that {fault}"


@pytest.mark.parametrize("fault", STREAMING_FAULTS)
def test_a_planted_fault_of_streaming_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    STREAMING_FAULTS[fault](monkeypatch)
    monkeypatch.setattr(Scheduler, "check", lambda *a: None)
    found = found_within(SEEDS, shapes=SHAPES_OF.get(fault, STREAMED))
    assert found is not None, f"{SEEDS} seeds did not notice that {fault}"


def test_a_page_copy_of_unwritten_slots_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy a fork's page in the iteration that recomputes the source. Random traffic rarely does this."""
    copy_a_chunk_that_is_being_repaired()
    replace_method(KVCache, "begin", ignore_before)(monkeypatch)
    with pytest.raises(AssertionError, match="the KV of another prefix"):
        copy_a_chunk_that_is_being_repaired()


def copy_a_chunk_that_is_being_repaired() -> None:
    """Conversation "b" is a fork of "a" and ends inside chunk 1. Chunks 0 and 1 are lost."""
    world = ScriptedWorld(16, 0, policy="value")
    world.say("a", 12, 1)
    world.fork_at("a", 6, "b")
    world.wait(5000.0)
    world.say("a", 1, 1)
    world.wait(50.0)
    world.say("filler", 46, 9)
    world.run_until_idle()
    world.cache.evict("filler", world.clock.now())
    assert world.where("a") == "--xx"
    a, b = world.ask("a", 3, 5), world.ask("b", 3, 5)
    first = world.next()
    assert {piece.attempt_id for piece in first.slices} == {a.attempt_id, b.attempt_id}
    world.run_until_idle()


def test_without_a_fault_the_same_seeds_pass() -> None:
    assert found_within(SEEDS) is None
    assert found_within(SEEDS, shapes=STREAMED) is None
    assert found_within(SEEDS // 3, shapes=(SPOILED, TWINS)) is None
