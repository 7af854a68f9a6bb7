"""Batches that are split where memory is short, and decode iterations that replay captured graphs."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pensieve.core.iteration import PageCopy, Slice, SwapIn, SwapOut
from pensieve.errors import DeviceError
from pensieve.kernels.attention import cuda
from pensieve.kernels.attention.input import SharedPages
from pensieve.kernels.attention.plan import BlocksAtOnce, plan_work
from pensieve.kernels.attention.tiles import Tiling
from pensieve.model import graphs
from pensieve.model.batch import Batch
from pensieve.model.forward import halves, is_out_of_memory
from pensieve.model.graphs import DecodeGraphs, buckets
from pensieve.model.kv.memory import KVMemory, PageMoves
from pensieve.model.loader import LoadedModel, load
from tests.model.world import GAP_MAX, Captured, World, largest_gap, plain_model

FolderOf = Callable[[str], Path]
Loaded = Callable[[str], LoadedModel]


class ShortOfMemory:
    """A model that can compute at most `tokens_max` tokens at once."""

    def __init__(self, model: LoadedModel, tokens_max: int) -> None:
        self.tokens_max = tokens_max
        self.computed: list[int] = []
        self._logits = model.flat.logits

    def __call__(self, input_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        if len(input_ids) > self.tokens_max:
            self._logits(input_ids, *rest)  # a failing pass may already have written anything
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.computed.append(len(input_ids))
        return self._logits(input_ids, *rest)


def test_a_batch_that_does_not_fit_is_computed_in_parts(
    folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three slices share a chunk, and a page is copied before they run."""
    model = load(folder_of("llama-gqa"))
    world = World(model)
    first = world.turn(11)
    second = world.turn(0, tokens=[*first.tokens[:4], 40, 41, 42])
    second.page_table[0] = first.page_table[0]
    third = world.turn(0, tokens=[*first.tokens[:6], 7])
    third.page_table[0] = first.page_table[0]
    world.step((first, 0, 6, False))
    short = ShortOfMemory(model, 3)
    monkeypatch.setattr(model.flat, "logits", short)
    outcome = world.step(
        (first, 6, 11, True),
        (second, 4, 7, True),
        (third, 6, 7, True),
        copies=[PageCopy(first.page_table[1], third.page_table[1], 2)],
    )
    assert sum(short.computed) == 9
    assert max(short.computed) <= 3
    assert [sample.attempt_id for sample in outcome.samples] == [0, 1, 2]
    for _ in range(4):
        world.decode(first, second, third)
    world.executor.close()
    plain = plain_model(folder_of("llama-gqa"))
    assert max(largest_gap(plain, turn) for turn in (first, second, third)) <= GAP_MAX


def test_a_single_token_that_does_not_fit_ends_the_engine(
    folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(folder_of("llama-gqa"))
    world = World(model)
    monkeypatch.setattr(model.flat, "logits", ShortOfMemory(model, 0))
    with pytest.raises(DeviceError, match="out of memory in a batch of 1 tokens"):
        world.launch((world.turn(5), 0, 5, True))
    world.executor.close()


def test_out_of_memory_errors_of_allocators_are_recognised() -> None:
    """The first error comes from this machine's allocator, which is asked for too much memory."""
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 60, dtype=torch.uint8).fill_(0)
    assert is_out_of_memory(refused.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("shapes differ"))


def test_halves_keep_the_order_and_the_slices_that_need_a_token() -> None:
    table = array("i", [0, 1, 2])
    slices = [
        Slice(1, 3, 4, array("I", [3]), table, True),
        Slice(2, 0, 6, array("I", range(5)), table, True, True),  # its last token is still awaited
        Slice(3, 9, 10, array("I", [9]), table),
    ]
    for num_first in range(1, 8):
        first, second = halves(slices, num_first)
        assert sum(piece.stop - piece.start for piece in first) == num_first
        positions = [
            (piece.attempt_id, position)
            for piece in (*first, *second)
            for position in range(piece.start, piece.stop)
        ]
        assert positions == [(1, 3), *((2, i) for i in range(6)), (3, 9)]
        assert [piece.attempt_id for piece in (*first, *second) if piece.needs_token] == [1, 2]
        assert [piece.attempt_id for piece in (*first, *second) if piece.awaits_token] == [2]
        assert [piece.attempt_id for piece in (*first, *second) if piece.is_last] == [2]
        known = [token for piece in (*first, *second) for token in piece.token_ids]
        assert known == [3, 0, 1, 2, 3, 4, 9]


# -- graphs --


def graphed(model: LoadedModel, captured: Any, turns_max: int = 8) -> Any:
    def made(memory: KVMemory) -> DecodeGraphs:
        graphs = DecodeGraphs(model.flat, memory, turns_max, captured)
        with torch.inference_mode():
            graphs.capture()
        memory.device_arena[:, : memory.device_pages].fill_(float("nan"))
        return graphs

    return made


@pytest.mark.parametrize("depth", [1, 2])
def test_graphs_sample_the_same_tokens_as_the_model(
    loaded: Loaded, folder_of: FolderOf, depth: int
) -> None:
    """Turns come and go, so graphs of all sizes run between mixed iterations. Pages move meanwhile."""
    model, captured = loaded("llama-gqa"), Captured()
    world = World(model, device_pages=200, depth=depth, graphs=graphed(model, captured))
    assert captured.captured == 4, "one graph each for 1, 2, 4 and 8 rows"
    draw = random.Random(depth)
    running: list[Any] = []
    replayed = set()
    num_padded = 0
    for step in range(60):
        if step % 7 == 0 and len(running) < 8:
            for turn in [
                world.turn(draw.randint(1, 9), num_outputs_max=99)
                for _ in range(draw.randint(1, 3))
            ]:
                world.step((turn, 0, len(turn.tokens), True))
                running.append(turn)
        before = captured.replays
        world.decode(*running[:8])
        if captured.replays > before:
            replayed.add(len(running[:8]))
            num_padded += {3: 1, 5: 3, 6: 2, 7: 1}.get(len(running[:8]), 0)
        if step % 11 == 10:
            running.pop(draw.randrange(len(running)))
    world.executor.close()
    assert len(replayed) >= 4, "graphs were hardly used"
    assert world.executor.rows_padded == num_padded > 0
    plain = plain_model(folder_of("llama-gqa"))
    assert max(largest_gap(plain, turn) for turn in world.turns) <= GAP_MAX


def test_graphs_run_only_for_decodes_without_copies_or_swap_ins(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, captured = loaded("llama-gqa"), Captured()
    world = World(model, graphs=graphed(model, captured))
    first, second, third = world.turn(4), world.turn(9), world.turn(4)
    world.step((first, 0, 4, True), (third, 0, 4, True))
    assert captured.replays == 0, "a prefill"
    world.decode(first)
    assert captured.replays == 1
    at = len(first.tokens)
    world.step((first, at - 1, at, True), (second, 0, 5, False))
    assert captured.replays == 1, "a decode beside a piece of prefill"
    old, new = world.replace_page(third, 0)
    del old
    world.step((third, 0, 4, False))
    world.decode(first, copies=[PageCopy(third.page_table[0], world.free_pages.pop(), 4)])
    assert captured.replays == 1, "a page copy"
    world.step(swap_outs=[SwapOut(1, new, 0, 4)])
    world.memory.device_arena[:, new] = float("nan")
    copier = world.executor._forward._copier
    swap_in, wait_layer = world.memory.swap_in, copier.wait_layer
    needed = threading.Event()

    def swap_in_when_needed(layer: int, moves: PageMoves) -> None:
        assert needed.wait(60)
        swap_in(layer, moves)

    def wait_for_layer(layer: int) -> None:
        needed.set()
        wait_layer(layer)

    monkeypatch.setattr(world.memory, "swap_in", swap_in_when_needed)
    monkeypatch.setattr(copier, "wait_layer", wait_for_layer)
    world.decode(third, swap_ins=[SwapIn(2, 0, new, 4)])
    assert captured.replays == 1, "a swap-in"
    world.decode(first, third)
    assert captured.replays == 2
    assert world.executor.rows_padded == 0
    world.executor.close()


def test_a_batch_that_cannot_be_captured_runs_without_a_graph(loaded: Loaded) -> None:
    class Refusing(Captured):
        def warm(self, compute: Callable[[], None]) -> None:
            raise RuntimeError("operation not permitted when stream is capturing")

    model = loaded("llama-gqa")
    world = World(model, graphs=graphed(model, Refusing()))
    turn = world.turn(4)
    world.step((turn, 0, 4, True))
    assert world.decode(turn).samples
    world.executor.close()
    graphs = world.graphs
    assert graphs is not None
    assert "not permitted" in graphs.failure


def test_tensors_that_a_graph_reads_are_kept_alive(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured kernel stores only addresses. It does not keep the tensors alive."""
    model = loaded("llama-gqa")
    seen: list[weakref.ref[torch.Tensor]] = []
    logits = model.flat.logits

    def watched(ids: Any, positions: Any, rows: Any, forward_pass: Any) -> torch.Tensor:
        batch = forward_pass.batch
        index = batch.page_index[:4]
        seen.extend(
            weakref.ref(each) for each in (ids, positions, rows, batch.slot_mapping, *index)
        )
        return logits(ids, positions, rows, forward_pass)

    monkeypatch.setattr(model.flat, "logits", watched)

    class Forgetful(Captured):
        def record(self, compute: Callable[[], None]) -> Callable[[], None]:
            compute()
            return lambda: None

    graphs = graphed(model, Forgetful())(KVMemory(model.shape, 16, 0, 4))
    gc.collect()
    assert len(seen) == 2 * 4 * 8  # four graph sizes, each run once and recorded once
    assert all(each() is not None for each in seen)
    assert not graphs.failure


def test_the_halves_of_a_batch_may_both_be_graphs(
    loaded: Loaded, folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph's logits are valid until the next replay. The second half must not overwrite the first's."""
    model, captured = loaded("llama-gqa"), Captured()
    world = World(model, graphs=graphed(model, captured))
    turns = [world.turn(3 + index) for index in range(4)]
    for turn in turns:
        world.step((turn, 0, len(turn.tokens), True))
    graphs = world.graphs
    assert graphs is not None
    takes = graphs.takes
    monkeypatch.setattr(
        graphs, "takes", lambda batch, swap_ins_outstanding: takes(batch, len(batch.lengths) > 2)
    )
    monkeypatch.setattr(model.flat, "logits", ShortOfMemory(model, 2))
    for _ in range(4):
        before = captured.replays
        world.decode(*turns)
        assert captured.replays == before + 2
    world.executor.close()
    monkeypatch.undo()
    plain = plain_model(folder_of("llama-gqa"))
    assert max(largest_gap(plain, turn) for turn in turns) <= GAP_MAX


def test_a_graph_reads_the_plan_of_its_batch(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First five decodes share pages, beside a sixth decode. Then two decodes share no pages."""
    monkeypatch.setattr(graphs, "attends", lambda memory: True)
    monkeypatch.setattr(cuda, "blocks_at_once", lambda *rest: BlocksAtOnce(1, 1))
    model = loaded("llama-gqa")
    memory = KVMemory(model.shape, 40, 0, 32)
    made = DecodeGraphs(model.flat, memory, 8, Captured())
    seen: list[Any] = []
    logits = model.flat.logits
    monkeypatch.setattr(
        model.flat, "logits", lambda *given: (seen.append(given[-1]._plan), logits(*given))[1]
    )
    with torch.inference_mode():
        made.capture()
        assert not made.failure
        for sharing, rows in ((5, 6), (0, 2)):
            tables = [
                array("i", [*(range(6) if turn < sharing else range(6 + turn, 12 + turn)), 20, 21])
                for turn in range(rows)
            ]
            slices = [
                Slice(turn, 250 - turn, 251 - turn, array("I", [3]), table, needs_token=True)
                for turn, table in enumerate(tables)
            ]
            batch = Batch.from_slices(slices, 32)
            made.logits(batch)
            plan = graphs.plan_of(batch, memory, waves_more=0)
            assert plan is not None
            assert bool(plan.pack_rows) == bool(sharing)
            work = seen[-1]
            for found, records in ((work.items, plan.items), (work.merges, plan.merges)):
                assert found[: len(records)].tolist() == [list(record) for record in records]
                assert not found[len(records) :].any(), "the rest of the list must be empty"
            assert tuple(work.pack_rows.tolist())[: len(plan.pack_rows)] == plan.pack_rows
            assert plan.num_part_rows <= len(work.part_sums)


@pytest.mark.parametrize("turns_max", [1, 3, 8, 64, 70, 256])
def test_graph_sizes_waste_few_rows(turns_max: int) -> None:
    sizes = buckets(turns_max)
    assert sizes[-1] == turns_max
    for rows in range(1, turns_max + 1):
        size = next(size for size in sizes if size >= rows)
        assert size <= max(2 * rows, rows + 7, rows * 3 / 2)
    assert buckets(10_000)[-1] == 256
    assert len(buckets(10_000)) < 20


@pytest.mark.parametrize("seed", range(50))
def test_a_work_list_of_the_fewest_waves_fits_into_a_graph(seed: int) -> None:
    draw = random.Random(seed)
    kv_heads, slots = draw.choice((1, 2, 8)), draw.choice((8, 132, 264))
    rows = draw.randint(1, 64)
    starts = [int(40_000 * draw.random() ** draw.choice((1, 6))) for _ in range(rows)]
    blocks = BlocksAtOnce(slots, 132)
    groups = [draw.randrange(-1, draw.choice((1, 3, 20))) for _ in range(rows)]
    pages = [
        min(
            (start // 32 for start, group in zip(starts, groups, strict=True) if group == g),
            default=0,
        )
        for g in range(20)
    ]
    for shared in (None, SharedPages(array("i", groups), array("i", pages))):
        plan = plan_work(
            [1] * rows, starts, 4, kv_heads, Tiling(32, 128), blocks, waves_more=0, shared=shared
        )
        more = slots // kv_heads + 1
        assert len(plan.items) <= rows + more
        assert not plan.wide_items
        if shared is None:
            assert len(plan.merges) <= more
            assert plan.num_part_rows <= 4 * (rows + more)
            assert all(item.num_rows == 4 for item in plan.items)
        assert len(plan.merges) <= rows
        assert len(plan.pack_rows) <= 4 * rows
        assert plan.num_part_rows <= 4 * rows + more * min(4 * rows, 128)
        assert max(item.num_rows for item in plan.items) <= 128
