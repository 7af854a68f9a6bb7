"""The copier of a CPU: what it copies, in which order, what it reports, and how it fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from pensieve.core.iteration import SwapIn, SwapOut
from pensieve.errors import DeviceError
from pensieve.model.kv.copier import CpuCopier
from pensieve.model.kv.memory import KVMemory, PageMoves
from pensieve.model.shape import ModelShape

SHAPE = ModelShape(3, 2, 1, 4, 50, 64, torch.float32, 0, 0)
WAIT_SECONDS = 60


class GatedMemory(KVMemory):
    """Each layer of a swap starts, and then waits until the test releases it."""

    def __init__(self) -> None:
        super().__init__(SHAPE, 8, 8, 4)
        self.device_arena.copy_(torch.arange(self.device_arena.numel()).view_as(self.device_arena))
        self.host_arena.copy_(-self.device_arena[:, :8])
        self.begun: list[tuple[str, int]] = []
        self.gate = threading.Semaphore(0)
        self._begun = threading.Condition()

    def swap_in(self, layer: int, moves: PageMoves) -> None:
        self._begin("in", layer)
        super().swap_in(layer, moves)

    def swap_out(self, layer: int, moves: PageMoves) -> None:
        self._begin("out", layer)
        super().swap_out(layer, moves)

    def _begin(self, kind: str, layer: int) -> None:
        with self._begun:
            self.begun.append((kind, layer))
            self._begun.notify_all()
        assert self.gate.acquire(timeout=WAIT_SECONDS)

    def wait_begun(self, count: int) -> list[tuple[str, int]]:
        with self._begun:
            assert self._begun.wait_for(lambda: len(self.begun) >= count, WAIT_SECONDS)
            return list(self.begun)

    def let_pass(self, count: int) -> None:
        self.gate.release(count)


@pytest.fixture
def memory() -> GatedMemory:
    return GatedMemory()


@pytest.fixture
def copier(memory: GatedMemory) -> Iterator[CpuCopier]:
    copier = CpuCopier(memory)
    yield copier
    memory.let_pass(100)
    copier.close()


def test_a_swap_in_moves_the_named_slots_of_every_layer(
    memory: GatedMemory, copier: CpuCopier
) -> None:
    before = memory.device_arena.clone()
    memory.let_pass(3)
    copier.submit([SwapIn(5, 6, 1, 4), SwapIn(9, 2, 3, 2)], [])
    assert copier.wait_any() == (5, 9)
    assert torch.equal(memory.device_arena[:, 1], memory.host_arena[:, 6])
    assert torch.equal(memory.device_arena[:, 3, :, :, :2], memory.host_arena[:, 2, :, :, :2])
    assert torch.equal(memory.device_arena[:, 3, :, :, 2:], before[:, 3, :, :, 2:])
    untouched = [0, 2, 4, 5, 6, 7]
    assert torch.equal(memory.device_arena[:, untouched], before[:, untouched])


def test_a_swap_out_moves_the_other_way(memory: GatedMemory, copier: CpuCopier) -> None:
    memory.let_pass(3)
    copier.submit([], [SwapOut(1, 7, 0, 3)])
    assert copier.wait_any() == (1,)
    assert torch.equal(memory.host_arena[:, 0, :, :, :3], memory.device_arena[:, 7, :, :, :3])
    assert not torch.equal(memory.host_arena[:, 0, :, :, 3:], memory.device_arena[:, 7, :, :, 3:])


def test_wait_layer_waits_for_its_layer_only(memory: GatedMemory, copier: CpuCopier) -> None:
    copier.submit([SwapIn(1, 0, 0, 4)], [])
    memory.let_pass(1)
    copier.wait_layer(0)
    assert memory.wait_begun(2) == [("in", 0), ("in", 1)]
    assert torch.equal(memory.device_arena[0, 0], memory.host_arena[0, 0])
    assert not torch.equal(memory.device_arena[1, 0], memory.host_arena[1, 0])
    assert copier.poll() == ()

    passed = threading.Event()
    waiter = threading.Thread(target=lambda: (copier.wait_layer(1), passed.set()))
    waiter.start()
    assert not passed.wait(0.05)
    memory.let_pass(1)
    assert passed.wait(WAIT_SECONDS)
    waiter.join()
    memory.let_pass(1)
    copier.wait_layer(2)
    assert copier.wait_any() == (1,)


def test_swap_outs_yield_to_swap_ins_between_layers(memory: GatedMemory, copier: CpuCopier) -> None:
    copier.submit([], [SwapOut(1, 0, 0, 4)])
    memory.wait_begun(1)
    copier.submit([SwapIn(2, 5, 5, 4)], [])
    memory.let_pass(6)
    copier.wait_layer(2)
    assert memory.wait_begun(6) == [
        ("out", 0),
        ("in", 0),
        ("in", 1),
        ("in", 2),
        ("out", 1),
        ("out", 2),
    ]


def test_a_wait_does_not_wait_for_swap_outs(memory: GatedMemory, copier: CpuCopier) -> None:
    copier.submit([], [SwapOut(1, 0, 0, 4)])
    memory.wait_begun(1)
    for layer in range(3):
        copier.wait_layer(layer)
    assert copier.poll() == ()


def test_the_lowest_layer_of_several_swap_ins_goes_first(
    memory: GatedMemory, copier: CpuCopier
) -> None:
    copier.submit([SwapIn(1, 0, 0, 4)], [])
    memory.wait_begun(1)
    copier.submit([SwapIn(2, 1, 1, 4)], [])
    memory.let_pass(2)
    copier.wait_layer(0)
    assert torch.equal(memory.device_arena[0, :2], memory.host_arena[0, :2])
    memory.let_pass(4)
    copier.wait_layer(2)
    finished = list(copier.wait_any())
    while len(finished) < 2:
        finished += copier.wait_any()
    assert sorted(finished) == [1, 2]


def test_every_copy_is_reported_once(memory: GatedMemory, copier: CpuCopier) -> None:
    memory.let_pass(6)
    copier.submit([SwapIn(1, 0, 0, 4)], [SwapOut(2, 3, 3, 4)])
    finished = list(copier.wait_any())
    while len(finished) < 2:
        finished += copier.wait_any()
    assert finished == [1, 2]
    assert copier.poll() == ()
    assert copier.wait_any() == ()  # with nothing outstanding, the call returns at once


def test_an_error_in_the_worker_is_raised_by_the_wait(memory: GatedMemory) -> None:
    copier = CpuCopier(memory)
    memory.let_pass(10)
    copier.submit([SwapIn(1, 99, 0, 4)], [])  # host page 99 does not exist
    for wait in (lambda: copier.wait_layer(2), copier.wait_any, copier.poll):
        with pytest.raises(DeviceError, match="copying pages between the tiers failed: "):
            wait()
    copier.close()


def test_close_abandons_outstanding_copies(memory: GatedMemory) -> None:
    copier = CpuCopier(memory)
    copier.submit([SwapIn(1, 0, 0, 4)], [])
    memory.wait_begun(1)
    closer = threading.Thread(target=copier.close)
    closer.start()
    while not copier._closing:
        time.sleep(0.001)
    memory.let_pass(1)
    closer.join(WAIT_SECONDS)
    assert memory.begun == [("in", 0)]


def test_memory_reports_its_sizes_and_refuses_too_large_or_empty_tiers() -> None:
    memory = KVMemory(SHAPE, 8, 5, 4)
    assert memory.page_bytes == 2 * 3 * 1 * 4 * 4 * 4
    assert (memory.device_bytes, memory.host_bytes) == (8 * 384, 5 * 384)
    assert memory.device_arena.shape == (3, 8 + 1, 2, 1, 4, 4)
    assert memory.key_pages(1).data_ptr() == memory.device_arena[1].data_ptr()
    with pytest.raises(DeviceError, match=r"cannot allocate .* GiB for the host tier"):
        KVMemory(SHAPE, 8, 1 << 50, 4)
    with pytest.raises(DeviceError, match="cannot hold KV in 0 device pages"):
        KVMemory(SHAPE, 0, 8, 4)
