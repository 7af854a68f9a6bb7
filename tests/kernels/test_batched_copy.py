"""Copy pages as pieces of the driver's batched copy. A library that copies on the CPU replaces the driver."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pensieve.core.iteration import SwapIn
from pensieve.errors import DeviceError
from pensieve.kernels import batched_copy
from pensieve.kernels.attention import reference
from pensieve.kernels.batched_copy import copy_pieces
from pensieve.model.kv import memory
from pensieve.model.kv.memory import BATCHED_BYTES_MIN, KVMemory, PageMoves, copies_batches
from pensieve.model.shape import ModelShape

CUDA = torch.device("cuda", 0)

# The declarations of cuda.h of CUDA 13.0. Arguments that the real driver refuses are refused.
DRIVER = """
#include <stddef.h>
#include <string.h>
struct Attributes { int order; struct { int type, id; } source, target; unsigned flags; };
int cuMemcpyBatchAsync_v2(unsigned long long* targets, unsigned long long* sources, size_t* sizes,
                          size_t count, struct Attributes* attributes, size_t* first, size_t kinds,
                          void* stream) {
  if (!stream || kinds != 1 || first[0] != 0 || attributes->order != 1 || attributes->flags > 1) return 1;
  for (size_t i = count; i-- > 0;) {
    if (sizes[i] == 0) return 1;
    memcpy((void*)targets[i], (void*)sources[i], sizes[i]);
  }
  return 0;
}
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "driver.c").write_text(DRIVER)
    built = tmp_path / "libcuda.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", built, tmp_path / "driver.c"], check=True)
    monkeypatch.setattr(batched_copy, "LIBRARY", str(built))
    batched_copy._driver.cache_clear()
    yield
    batched_copy._driver.cache_clear()


@pytest.mark.parametrize("num_slots", [[8] * 9, [8, 3, 8, 8, 8, 1, 8, 8, 8], [5] * 9])
def test_pieces_copy_the_same_slots_as_the_kernel(driver: None, num_slots: list[int]) -> None:
    """Neighbouring pages are one piece. Only the filled slots of a partly filled page are copied."""
    source = torch.randn(12, 2, 3, 8, 16).half()
    target = torch.full_like(source, 7.0)
    right = target.clone()
    sources = torch.tensor([4, 5, 6, 0, 11, 9, 2, 3, 8])
    targets = torch.tensor([1, 2, 3, 9, 0, 8, 6, 7, 11])
    moves = PageMoves(sources, targets, torch.tensor(num_slots))
    pieces = moves.in_pieces(8, 6, 8 * 16 * 2)
    copy_pieces(pieces, source, target, stream=5)
    reference.copy_pages(source, right, *moves[:3])
    assert torch.equal(target, right)
    if min(num_slots) == 8:
        assert len(pieces.sizes) == 6, "4 5 6 -> 1 2 3 and 2 3 -> 6 7 are one piece each"


def test_a_copy_that_the_driver_refuses_is_a_device_error(driver: None) -> None:
    arena = torch.zeros(2, 2, 1, 8, 16)
    moves = PageMoves(torch.tensor([0]), torch.tensor([1]), torch.tensor([8]))
    pieces = moves.in_pieces(8, 2, 8 * 16 * 4)
    with pytest.raises(DeviceError, match="returned 1 for 1 pieces"):
        copy_pieces(pieces, arena, arena, stream=0)


@pytest.mark.parametrize("library", ["libnothing.so.1", "libc.so.6"])
def test_without_batched_copies_of_the_driver_the_kernel_copies(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver library is missing, or lacks the function."""
    monkeypatch.setattr(batched_copy, "LIBRARY", library)
    batched_copy._driver.cache_clear()
    assert not batched_copy.available()
    assert not copies_batches(CUDA, 1 << 20)


def test_large_pages_of_a_gpu_are_copied_in_batches(driver: None) -> None:
    assert copies_batches(CUDA, BATCHED_BYTES_MIN)
    assert not copies_batches(CUDA, BATCHED_BYTES_MIN - 1)
    assert not copies_batches(torch.device("cpu"), 1 << 20)


@pytest.mark.parametrize("batches", [False, True])
def test_a_memory_prepares_pieces_only_for_moves_between_tiers(
    driver: None, batches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "copies_batches", lambda device, layer_page_bytes: batches)
    made = KVMemory(ModelShape(2, 4, 2, 8, 100, 512, torch.bfloat16, 0, 0), 9, 9, 4)
    moves = PageMoves.from_swap_ins([SwapIn(0, 3, 7, 4), SwapIn(1, 4, 8, 4), SwapIn(2, 5, 1, 2)])
    assert made.prepared(moves).pieces is None, "these moves stay on the device"
    pieces = made.prepared_for_swap(moves).pieces
    assert (pieces is not None) == batches
    if pieces is not None:
        assert pieces.sizes.tolist() == [2 * 4 * 4 * 8 * 2, *[2 * 8 * 2] * 4]
