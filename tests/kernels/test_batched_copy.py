"""Pages as pieces for the driver's batched copy; the driver is a library that copies on the CPU."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pensieve.errors import DeviceError
from pensieve.kernels import batched_copy
from pensieve.kernels.attention import reference
from pensieve.kernels.batched_copy import copy_pieces
from pensieve.model.kv.memory import PageMoves

# As cuda.h of CUDA 13.0 declares it; what the driver would refuse is refused.
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
def test_pieces_move_what_the_kernel_moves(driver: None, num_slots: list[int]) -> None:
    """Neighbours are one piece; of a page that is not full only its tokens move."""
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


def test_what_the_driver_refuses_is_an_error_of_the_device(driver: None) -> None:
    arena = torch.zeros(2, 2, 1, 8, 16)
    moves = PageMoves(torch.tensor([0]), torch.tensor([1]), torch.tensor([8]))
    pieces = moves.in_pieces(8, 2, 8 * 16 * 4)
    with pytest.raises(DeviceError, match="answers 1 for 1 pieces"):
        copy_pieces(pieces, arena, arena, stream=0)


def test_without_such_a_driver_the_choice_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched_copy, "LIBRARY", "libnothing.so.1")
    batched_copy._driver.cache_clear()
    moves = PageMoves(torch.tensor([0]), torch.tensor([1]), torch.tensor([8]))
    with pytest.raises(DeviceError, match="copy_engine=1 needs a driver"):
        copy_pieces(moves.in_pieces(8, 2, 64), torch.zeros(9), torch.zeros(9), stream=1)
