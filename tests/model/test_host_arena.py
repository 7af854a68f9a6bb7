"""The page-locked host tier, where there is nothing to lock it for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pensieve.errors import DeviceError
from pensieve.model import host_arena
from pensieve.model.host_arena import PIECE_BYTES, node_of, pieces

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_bytes", [1, PIECE_BYTES, PIECE_BYTES + 1, 5 * PIECE_BYTES - 7])
def test_pieces_tile_it(num_bytes: int) -> None:
    found = list(pieces(num_bytes))
    assert [first for first, _ in found] == list(range(0, num_bytes, PIECE_BYTES))
    assert sum(size for _, size in found) == num_bytes


def test_it_is_memory_that_begins_at_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[tuple[int, int]] = []

    def register(address: int, num_bytes: int) -> int:
        locked.append((address, num_bytes))
        return 0

    monkeypatch.setattr(host_arena, "_register", register)
    arena = host_arena.allocate(10_000, CPU)
    assert locked == [(arena.data_ptr(), 10_000)]
    assert arena.data_ptr() % 4096 == 0
    arena.fill_(7)
    assert int(arena.view(2, 5000).sum()) == 70_000
    assert host_arena.allocate(0, CPU).numel() == 0


def test_how_far_it_is_and_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_arena, "PIECE_BYTES", 1 << 20)
    monkeypatch.setattr(host_arena, "_register", lambda address, num_bytes: 0)
    told: list[str] = []
    host_arena.allocate(4 << 20, CPU, told.append)
    assert told == [f"locking the host tier: {share}%" for share in (25, 50, 75, 100)]
    answers = iter([0, 0, 2])
    monkeypatch.setattr(host_arena, "_register", lambda address, num_bytes: next(answers))
    with pytest.raises(DeviceError, match=r"refuses to lock.*answers 2.*--host-cache.*ulimit -l"):
        host_arena.allocate(4 << 20, CPU)


def test_more_than_there_is_says_so() -> None:
    with pytest.raises(DeviceError, match="--host-cache"):
        host_arena.allocate(1 << 62, CPU)


def test_the_node_of_a_device(tmp_path: Path) -> None:
    for address, written in (("0000:1b:00.0", "1\n"), ("0000:1c:00.0", "-1\n")):
        (tmp_path / address).mkdir()
        (tmp_path / address / "numa_node").write_text(written)
    assert node_of("0000:1b:00.0", tmp_path) == 1
    assert node_of("0000:1c:00.0", tmp_path) is None
    assert node_of("0000:ff:00.0", tmp_path) is None


def test_pages_may_be_asked_of_a_node() -> None:
    """Whatever this machine thinks of it, memory comes, and the wish is taken back."""
    with host_arena._preferring(0):
        assert bytearray(1 << 20)[-1] == 0
    with host_arena._preferring(None):
        assert bytearray(1 << 20)[-1] == 0
