"""The copier of a GPU, on streams that run everything as late and as unordered as allowed."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from pensieve.core.iteration import SwapIn, SwapOut
from pensieve.errors import DeviceError
from pensieve.model.kv import copier as copier_module
from pensieve.model.kv.copier import CudaCopier
from pensieve.model.kv.memory import KVMemory, PageMoves
from pensieve.model.shape import ModelShape
from tests.model.kv.streams import FakeStreams

SHAPE = ModelShape(3, 2, 1, 4, 50, 64, torch.float32, 0, 0)
PAGES = 12
SIZE = 4  # tokens per page
WAIT_SECONDS = 60


class StreamedMemory(KVMemory):
    """Copies run when their stream reaches them. Both directions are recorded."""

    def __init__(self, streams: FakeStreams) -> None:
        super().__init__(SHAPE, PAGES, PAGES, SIZE)
        self.device_arena.zero_()
        self.host_arena.zero_()
        self.streams = streams
        self.told: list[tuple[str, int]] = []  # (direction, layer) in the order of the copies
        self.failing = False

    def swap_in(self, layer: int, moves: PageMoves) -> None:
        self._later("in", layer, lambda: KVMemory.swap_in(self, layer, moves))

    def swap_out(self, layer: int, moves: PageMoves) -> None:
        if self.failing:
            raise RuntimeError("the bus is gone")
        self._later("out", layer, lambda: KVMemory.swap_out(self, layer, moves))

    def _later(self, kind: str, layer: int, work: object) -> None:
        def happen() -> None:
            self.told.append((kind, layer))
            work()  # type: ignore[operator]

        self.streams.current.launch(happen)

    def write(self, layer: int, page: int, value: float) -> None:
        """Write a value, as a forward pass does, when the compute stream reaches it."""
        self.streams.compute.launch(lambda: self.device_arena[layer, page].fill_(value))

    def expect(self, layer: int, page: int, value: float, wrong: list[str]) -> None:
        def look() -> None:
            found = self.device_arena[layer, page]
            if not bool((found == value).all()):
                wrong.append(f"layer {layer} of page {page}: {found.flatten()[0]}, not {value}")

        self.streams.compute.launch(look)


def collect(copier: CudaCopier, count: int) -> list[int]:
    """Launch the rest of the iteration, and return the first `count` copies that finish."""
    copier.launch_rest()
    found: list[int] = []
    while len(found) < count:
        found += copier.wait_any()
    return found


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("unit_layers", [1, 2, 3])
def test_swapped_pages_are_correct_in_any_stream_order(
    seed: int, unit_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each iteration writes pages, swaps out pages of the previous iteration, and swaps in pages to read."""
    layer_bytes = 2 * SIZE * 4 * 4  # one layer of a page
    monkeypatch.setattr("pensieve.model.kv.copier.UNIT_BYTES", unit_layers * layer_bytes * 2)
    monkeypatch.setattr("pensieve.model.kv.copier.LAYERS_AHEAD", 1 + seed % 3)
    draw = random.Random(seed)
    streams = FakeStreams(seed)
    memory = StreamedMemory(streams)
    copier = CudaCopier(memory, streams)
    wrong: list[str] = []
    on_host: dict[int, float] = {}  # host page -> value, after the copy was reported
    outstanding: dict[int, tuple[str, int, int, float]] = {}
    free_device, free_host = list(range(PAGES)), list(range(PAGES))
    written: dict[int, float] = {}  # device page of the previous iteration -> value
    next_id = 0
    for step in range(30):
        ins, outs, arriving = [], [], {}
        if on_host and free_device and draw.random() < 0.5:
            host_page = draw.choice(sorted(on_host))
            page, value = free_device.pop(0), on_host.pop(host_page)
            ins.append(SwapIn(next_id, host_page, page, SIZE))
            outstanding[next_id] = ("in", page, host_page, value)
            arriving[page] = value
            next_id += 1
        elif written:
            for page, value in written.items():
                if free_host:
                    outs.append(SwapOut(next_id, page, host_page := free_host.pop(0), SIZE))
                    outstanding[next_id] = ("out", page, host_page, value)
                    next_id += 1
                else:
                    free_device.append(page)
            written = {}
        copier.submit(ins, outs)
        fresh = {}
        for _ in range(draw.randint(0, 2)):
            if free_device and not written:
                fresh[free_device.pop(0)] = float(step + 1)
        for layer in range(SHAPE.num_layers):
            if not copier.swap_ins_outstanding:
                for page, value in arriving.items():
                    moved = memory.device_arena[:, page]
                    assert bool((moved == value).all()), (
                        "the swap-in was reported before it had finished"
                    )
            copier.wait_layer(layer)
            for page, value in fresh.items():
                memory.write(layer, page, value)
            for page, value in arriving.items():
                memory.expect(layer, page, value, wrong)
        copier.launch_rest()
        written.update(fresh)
        told = copier.wait_any() if draw.random() < 0.3 else copier.poll()
        for copy_id in told:
            kind, page, host_page, value = outstanding.pop(copy_id)
            if kind == "out":
                found = memory.host_arena[:, host_page]
                assert bool((found == value).all()), (
                    "the swap-out was reported before it had finished"
                )
                on_host[host_page] = value
                free_device.append(page)
            else:
                free_host.append(host_page)
                streams.compute.record_event().synchronize()  # all its reads are done
                free_device.append(page)
    while outstanding:
        for copy_id in copier.wait_any():
            outstanding.pop(copy_id)
    streams.compute.record_event().synchronize()
    copier.close()
    assert not wrong, wrong[0]


@pytest.mark.parametrize("seed", range(8))
def test_swap_outs_yield_to_swap_ins(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pensieve.model.kv.copier.UNIT_BYTES", 1)
    streams = FakeStreams(seed)
    memory = StreamedMemory(streams)
    gate = streams.swap_out
    copier = CudaCopier(memory, streams)
    streams.going.clear()
    copier.submit([], [SwapOut(1, 0, 0, SIZE)])
    deadline = time.monotonic() + WAIT_SECONDS
    while len(gate.queue) < 3:  # an event to wait for, a layer, an event
        assert time.monotonic() < deadline, "the worker launched nothing on its stream"
        time.sleep(0.001)
    copier.submit([SwapIn(2, 5, 5, SIZE)], [])
    copier.launch_rest()
    streams.going.set()
    while copier._swap_outs:  # the worker thread continues by itself
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert sorted(collect(copier, 2)) == [1, 2]
    copier.close()
    assert memory.told == [("out", 0), ("in", 0), ("in", 1), ("in", 2), ("out", 1), ("out", 2)]


def test_waiting_for_a_layer_blocks_the_device_and_not_the_host() -> None:
    streams = FakeStreams(0)
    memory = StreamedMemory(streams)
    memory.host_arena.fill_(7.0)
    copier = CudaCopier(memory, streams)
    copier.submit([SwapIn(1, 2, 3, SIZE)], [])
    wrong: list[str] = []
    for layer in range(SHAPE.num_layers):
        copier.wait_layer(layer)
        memory.expect(layer, 3, 7.0, wrong)
    assert not memory.told, "the host waited"
    assert copier.swap_ins_outstanding or not wrong
    streams.compute.record_event().synchronize()
    assert not wrong
    assert copier.poll() == (1,)
    assert not copier.swap_ins_outstanding
    copier.close()


def test_swap_ins_are_launched_a_little_ahead_of_the_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copier_module, "LAYERS_AHEAD", 1)
    streams = FakeStreams(0)
    memory = StreamedMemory(streams)
    launched: list[int] = []
    swap_in = memory.swap_in
    monkeypatch.setattr(
        memory, "swap_in", lambda layer, moves: (launched.append(layer), swap_in(layer, moves))
    )
    copier = CudaCopier(memory, streams)
    copier.submit([SwapIn(1, 2, 3, SIZE)], [SwapOut(2, 4, 4, SIZE)])
    assert launched == [0]
    copier.wait_layer(0)
    assert launched == [0, 1]
    assert copier.swap_ins_outstanding
    assert collect(copier, 2) == [1, 2], "the swap-out after the swap-in"
    assert launched == [*range(SHAPE.num_layers)]
    assert [kind for kind, _ in memory.told] == ["in"] * 3 + ["out"] * 3
    copier.close()


def test_a_swap_in_that_cannot_be_launched_is_raised_by_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copier_module, "LAYERS_AHEAD", 1)
    streams = FakeStreams(0)
    memory = StreamedMemory(streams)
    copier = CudaCopier(memory, streams)
    copier.submit([SwapIn(1, 2, 3, SIZE)], [])

    def refuse(layer: int, moves: PageMoves) -> None:
        raise RuntimeError("the bus is gone")

    monkeypatch.setattr(memory, "swap_in", refuse)
    for wait in (copier.launch_rest, copier.wait_any, copier.poll, lambda: copier.wait_layer(0)):
        with pytest.raises(DeviceError, match="the bus is gone"):
            wait()
    copier.close()


def test_waits_return_at_once_without_outstanding_copies() -> None:
    streams = FakeStreams(0)
    copier = CudaCopier(StreamedMemory(streams), streams)
    assert copier.poll() == copier.wait_any() == ()
    copier.wait_layer(0)
    copier.close()


def test_an_error_of_the_worker_is_raised_by_the_wait() -> None:
    streams = FakeStreams(0)
    memory = StreamedMemory(streams)
    memory.failing = True
    copier = CudaCopier(memory, streams)
    copier.submit([], [SwapOut(1, 0, 0, SIZE)])
    with pytest.raises(DeviceError, match="the bus is gone"):
        copier.wait_any()
    with pytest.raises(DeviceError):
        copier.poll()
    with pytest.raises(DeviceError):
        copier.submit([SwapIn(2, 0, 0, SIZE)], [])
    copier.close()


def test_finished_swap_outs_are_reported_to_another_thread() -> None:
    streams = FakeStreams(3)
    copier = CudaCopier(StreamedMemory(streams), streams)
    heard: list[int] = []
    copier.submit([], [SwapOut(each, each, each, SIZE) for each in range(4)])
    reporter = threading.Thread(target=lambda: heard.extend(collect(copier, 4)))
    reporter.start()
    reporter.join(WAIT_SECONDS)
    assert heard == [0, 1, 2, 3]
    copier.close()
