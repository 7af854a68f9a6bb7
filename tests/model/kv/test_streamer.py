"""The streamer: the pages that passes load, attend to and store, on streams that run everything late.

The simulated attention runs on the compute stream. It checks that each page in the arena contains what
earlier iterations left on the host, and writes the new slots of the page. Swaps run beside the passes.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from pensieve.core.iteration import PageGroup, Slice, SwapIn, SwapOut
from pensieve.errors import DeviceError
from pensieve.model.kv.copier import CudaCopier
from pensieve.model.kv.memory import KVMemory, PageMoves
from pensieve.model.kv.streamer import StagedStreamer, arena_of, in_host_pages
from pensieve.model.shape import ModelShape
from tests.model.kv.streams import FakeStreams

SHAPE = ModelShape(3, 2, 1, 4, 50, 64, torch.float32, 0, 0)
SIZE = 4  # tokens per page
HOST_PAGES = 14
STAGING_PAGES = 4
NUM_LAYERS = SHAPE.num_layers
Plant = type[StagedStreamer]


class LateMemory(KVMemory):
    """Copies run when their stream reaches them."""

    def __init__(self, streams: FakeStreams) -> None:
        super().__init__(SHAPE, 6, HOST_PAGES, SIZE, staging_pages=STAGING_PAGES)
        for arena in (self.device_arena, self.host_arena, self.staging_arena):
            arena.fill_(-1.0)
        self._streams = streams

    def _later(self, work: Callable[[], None]) -> None:
        self._streams.current.launch(work)

    def load(self, layer: int, arena: int, moves: PageMoves) -> None:
        self._later(lambda: KVMemory.load(self, layer, arena, moves))

    def store(self, layer: int, arena: int, moves: PageMoves) -> None:
        self._later(lambda: KVMemory.store(self, layer, arena, moves))

    def swap_in(self, layer: int, moves: PageMoves) -> None:
        self._later(lambda: KVMemory.swap_in(self, layer, moves))

    def swap_out(self, layer: int, moves: PageMoves) -> None:
        self._later(lambda: KVMemory.swap_out(self, layer, moves))


class Planned(NamedTuple):
    """A page of a group: the values in its slots, and the values to be written after them."""

    page: int
    before: list[float]
    after: list[float]


class Rehearsal:
    """Runs passes with random groups. `truth` has the expected content of host pages."""

    def __init__(self, seed: int, kind: Plant = StagedStreamer) -> None:
        self.draw = random.Random(seed)
        self.streams = FakeStreams(seed)
        self.memory = LateMemory(self.streams)
        self.streamer = kind(self.memory, self.streams)
        self.copier = CudaCopier(self.memory, self.streams)
        self.truth: dict[int, list[float]] = {}  # host page -> slots in layer 0; layer l has l more
        self.free = list(range(HOST_PAGES))
        self.wrong: list[str] = []
        self._value = 0.0
        self._swapping: set[int] = set()  # host pages of unreported copies

    def iteration(self, *, fails: bool = False) -> None:
        planned = self._plan()
        groups = []
        for group in planned:
            columns = zip(
                *((each.page, len(each.before), _stored(each)) for each in group), strict=True
            )
            groups.append(PageGroup(0, 1, *(array("i", column) for column in columns)))
        swapped_in = self._swap({each.page for group in planned for each in group})
        self.streamer.begin(groups)
        last = self.draw.randrange(NUM_LAYERS * len(groups)) if fails else -1
        for layer in range(NUM_LAYERS):
            self.copier.wait_layer(layer)
            for page, slots in swapped_in.items():
                self._expect(self.memory.device_arena[layer, page], layer, slots)
            for index, group in enumerate(planned):
                step = layer * len(groups) + index
                self.streamer.wait_loaded(step)
                self._attend(layer, self.memory.staging_arena[arena_of(step)], group)
                if step == last:
                    self.streamer.abandon()
                    return  # the pages are not used again: their content may be old or new
                self.streamer.attended(step)
        self.streamer.end()
        for each in (each for group in planned for each in group):
            self.truth[each.page] = [*each.before, *each.after]

    def _plan(self) -> list[list[Planned]]:
        """Draw groups. A growing page is in one group only; a full page may be in several."""
        draw = self.draw
        usable = [page for page in self.truth if page not in self._swapping]
        whole = [page for page in usable if len(self.truth[page]) == SIZE]
        growing = [page for page in usable if len(self.truth[page]) < SIZE]
        if self.free and len(growing) < 5:
            page = self.free.pop(draw.randrange(len(self.free)))
            self.truth[page] = []
            growing.append(page)
        draw.shuffle(growing)
        groups: list[list[Planned]] = []
        while growing or not groups:
            group = []
            for _ in range(draw.randint(1, 2)):
                if growing:
                    page = growing.pop()
                    before = self.truth[page]
                    count = draw.randint(0, SIZE - len(before))
                    group.append(Planned(page, before, [self._next() for _ in range(count)]))
            for page in draw.sample(whole, min(len(whole), draw.randint(0, 2))):
                group.append(Planned(page, self.truth[page], []))
            if group:
                draw.shuffle(group)
                groups.append(group)
            elif not growing:
                return [[Planned(whole[0], self.truth[whole[0]], [])]]
        return groups

    def _swap(self, in_groups: set[int]) -> dict[int, list[float]]:
        """Swap in a page that may just have been stored, or swap out to a page that was given up."""
        draw, ins, outs = self.draw, [], []
        self._swapping -= {copy_id // 2 for copy_id in self.copier.poll()}
        usable = [page for page in self.truth if page not in in_groups and self.truth[page]]
        arriving = {}
        if usable and not self._swapping and draw.random() < 0.5:
            page = draw.choice(usable)
            slots = self.truth[page]
            ins.append(SwapIn(2 * page, page, 0, len(slots)))
            self._swapping.add(page)
            arriving[0] = slots
        elif usable and not self._swapping and draw.random() < 0.5:
            # A conversation gave up this host page, and a device page is swapped out to it.
            page, value = draw.choice(usable), self._next()
            for layer in range(NUM_LAYERS):
                target = self.memory.device_arena[layer, 1]
                self.streams.compute.launch(lambda t=target, v=value + layer: t.fill_(v))
            outs.append(SwapOut(2 * page + 1, 1, page, SIZE))
            self.truth[page] = [value] * SIZE
            self._swapping.add(page)
        self.copier.submit(ins, outs)
        return arriving

    def _next(self) -> float:
        self._value += 10.0
        return self._value

    def _attend(self, layer: int, arena: torch.Tensor, group: list[Planned]) -> None:
        for place, each in enumerate(group):
            self._expect(arena[place], layer, each.before)
            if each.after:
                new = torch.tensor(each.after) + layer
                slots = arena[place, :, :, len(each.before) : _stored(each)]
                self.streams.compute.launch(lambda s=slots, n=new: s.copy_(n[:, None].expand_as(s)))
            self._expect(arena[place], layer, [*each.before, *each.after])

    def _expect(self, page: torch.Tensor, layer: int, slots: list[float]) -> None:
        def look() -> None:
            found = (page[0, 0, : len(slots), 0] - layer).tolist()
            if found != slots:
                self.wrong.append(f"layer {layer}: {found}, not {slots}")

        self.streams.compute.launch(look)

    def finish(self) -> None:
        """Wait until all copies are done, and check all host pages."""
        self.streams.compute.record_event().synchronize()
        while self.copier.wait_any():
            pass
        assert not self.wrong, self.wrong[0]
        for page, slots in self.truth.items():
            for layer in range(NUM_LAYERS):
                for half in range(2):
                    found = self.memory.host_arena[layer, page, half, 0, : len(slots), 0] - layer
                    assert found.tolist() == slots, f"host page {page}, layer {layer}"

    def close(self) -> None:
        self.copier.close()
        self.streamer.close()


def _stored(each: Planned) -> int:
    return len(each.before) + len(each.after) if each.after else 0


def rehearse(seed: int, kind: Plant = StagedStreamer) -> None:
    rehearsal = Rehearsal(seed, kind)
    try:
        for _ in range(12):
            rehearsal.iteration()
            if rehearsal.draw.random() < 0.2:
                rehearsal.finish()
        rehearsal.finish()
    finally:
        rehearsal.close()


@pytest.mark.parametrize("seed", range(60))
def test_passes_and_swaps_are_correct_in_any_stream_order(seed: int) -> None:
    rehearse(seed)


@pytest.mark.parametrize("seed", range(20))
def test_an_abandoned_pass_does_not_affect_the_next_one(seed: int) -> None:
    rehearse_after_a_failure(seed)


def rehearse_after_a_failure(seed: int, kind: Plant = StagedStreamer) -> None:
    rehearsal = Rehearsal(seed, kind)
    try:
        for _ in range(6):
            rehearsal.iteration()
            rehearsal.iteration(fails=True)
        rehearsal.iteration()
        rehearsal.finish()
    finally:
        rehearsal.close()


# -- planted faults: each must be found --


class LoadsTooEarly(StagedStreamer):
    """Loads into the arena again while attention may still read it."""

    def attended(self, step: int) -> None:
        if len(self._loaded) < self._num_steps:
            self._load_next()
        loaded, self._num_steps = self._num_steps, 0
        super().attended(step)
        self._num_steps = loaded


class LosesAStore(StagedStreamer):
    def _copy(self, step: int, *, is_load: bool) -> None:
        if is_load or step != self._num_steps - 1:
            super()._copy(step, is_load=is_load)


class StoresTooEarly(StagedStreamer):
    def attended(self, step: int) -> None:
        before, self._streams.staging.wait_event = self._streams.staging.wait_event, lambda e: None  # type: ignore[method-assign]
        super().attended(step)
        self._streams.staging.wait_event = before  # type: ignore[method-assign]


class SwapsTwoGroups(StagedStreamer):
    """Swaps the pages of the first two groups."""

    def begin(self, groups: list[PageGroup]) -> None:  # type: ignore[override]
        super().begin([*groups[1::-1], *groups[2:]])


class DoesNotWait(StagedStreamer):
    def wait_loaded(self, step: int) -> None:
        """Do not wait for the load."""


class EndsTooEarly(StagedStreamer):
    def end(self) -> None:
        self._moves = []


class ForgetsWhatItGaveUp(StagedStreamer):
    def abandon(self) -> None:
        self._moves = []


FAULTS: list[tuple[Plant, Callable[[int, Plant], None]]] = [
    *(
        (kind, rehearse)
        for kind in (
            LoadsTooEarly,
            LosesAStore,
            StoresTooEarly,
            SwapsTwoGroups,
            DoesNotWait,
            EndsTooEarly,
        )
    ),
    (ForgetsWhatItGaveUp, rehearse_after_a_failure),
]


@pytest.mark.parametrize(("kind", "act"), FAULTS, ids=[kind.__name__ for kind, _ in FAULTS])
def test_a_planted_fault_is_found(kind: Plant, act: Callable[[int, Plant], None]) -> None:
    for seed in range(60):
        try:
            act(seed, kind)
        except AssertionError:
            return
    pytest.fail(f"{kind.__name__} went unnoticed")


# -- on a CPU, and arguments that are refused --


def test_on_a_cpu_arenas_are_loaded_and_stored_in_order() -> None:
    memory = KVMemory(SHAPE, 2, 5, SIZE, staging_pages=3)
    memory.host_arena.copy_(torch.arange(memory.host_arena.numel()).view_as(memory.host_arena))
    before = memory.host_arena.clone()
    memory.staging_arena.fill_(-1.0)
    streamer = StagedStreamer(memory)
    columns = ([3, 0, 4], [4, 2, 0], [0, 3, 0]), ([1, 3], [1, 4], [2, 0])
    streamer.begin([PageGroup(0, 1, *(array("i", each) for each in group)) for group in columns])
    for step in range(2 * NUM_LAYERS):
        layer, group = divmod(step, 2)
        arena = memory.staging_arena[arena_of(step)]
        streamer.wait_loaded(step)
        for place, (page, loaded, _) in enumerate(zip(*columns[group], strict=True)):
            assert torch.equal(arena[place, :, :, :loaded], before[layer, page, :, :, :loaded])
        arena[1 - group, :, :, 1 + (group == 0)] = 1000.0 + step
        streamer.attended(step)
    streamer.end()
    expected = before.clone()
    for layer in range(NUM_LAYERS):
        expected[layer, 0, :, :, 2] = 1000.0 + 2 * layer
        expected[layer, 1, :, :, 1] = 1001.0 + 2 * layer
    assert torch.equal(memory.host_arena, expected), "only the stored slots may change"
    streamer.wait_stored()
    streamer.close()


def one_page(page: int = 0) -> list[PageGroup]:
    return [PageGroup(0, 1, array("i", [page]), array("i", [SIZE]), array("i", [1]))]


def streamers() -> list[tuple[KVMemory, StagedStreamer]]:
    memory = KVMemory(SHAPE, 2, 2, SIZE, staging_pages=1)
    late = LateMemory(streams := FakeStreams(0))
    return [(memory, StagedStreamer(memory)), (late, StagedStreamer(late, streams))]


def test_a_copy_that_fails_is_a_device_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for memory, streamer in streamers():

        def failing(*rest: object) -> None:
            raise RuntimeError("the bus is gone")

        streamer.begin(one_page())
        streamer.wait_loaded(0)
        monkeypatch.setattr(memory, "store", failing)
        with pytest.raises(DeviceError, match="the bus is gone"):
            streamer.attended(0)
        streamer.abandon()
        monkeypatch.setattr(memory, "load", failing)
        with pytest.raises(DeviceError, match="the bus is gone"):
            begun_and_loaded(streamer)


def begun_and_loaded(streamer: StagedStreamer) -> None:
    streamer.begin(one_page())
    streamer.wait_loaded(0)


def test_a_missing_page_is_a_device_error() -> None:
    with pytest.raises(DeviceError, match="outside the arena"):
        streamers()[0][1].begin(one_page(99))


def test_steps_of_a_pass_out_of_order_are_refused() -> None:
    for _, streamer in streamers():
        streamer.begin(one_page())
        with pytest.raises(AssertionError, match="already running"):
            streamer.begin(one_page())
        streamer.wait_loaded(0)
        with pytest.raises(AssertionError, match="order"):
            streamer.attended(1)
        with pytest.raises(AssertionError, match="has not attended"):
            streamer.end()
        streamer.abandon()
        streamer.begin(one_page())


def test_staging_arenas_are_counted_in_pages_of_a_layer() -> None:
    memory = KVMemory(SHAPE, 2, 2, SIZE, staging_pages=5)
    assert memory.staging_pages == 5
    assert memory.staging_arena.nbytes == 2 * 5 * memory.page_bytes // NUM_LAYERS
    assert KVMemory(SHAPE, 2, 2, SIZE).staging_pages == 0
    with pytest.raises(DeviceError, match="for the staging tier"):
        KVMemory(SHAPE, 2, 2, SIZE, staging_pages=1 << 50)
    with pytest.raises(DeviceError, match="-2 staging pages"):
        KVMemory(SHAPE, 2, 2, SIZE, staging_pages=-2)


def sliced(attempt_id: int, table: list[int]) -> Slice:
    stop = 4 * len(table)
    return Slice(attempt_id, stop - 1, stop, array("I", [7]), array("i", table))


def test_page_tables_of_groups_are_translated_to_host_pages() -> None:
    nothing = array("i", [0] * 4)
    groups = (
        PageGroup(1, 3, array("i", [10, 30, 20, 40]), nothing, nothing),
        PageGroup(3, 4, array("i", [5, 6]), nothing, nothing),
    )
    slices = (sliced(0, [2, 3]), sliced(1, [0, 1, 2]), sliced(2, [0, 3]), sliced(3, [1]))
    found = in_host_pages(slices, groups)
    assert [each.page_table.tolist() for each in found] == [[2, 3], [10, 30, 20], [10, 40], [6]]
    assert [each._replace(page_table=nothing) for each in found] == [
        each._replace(page_table=nothing) for each in slices
    ]
