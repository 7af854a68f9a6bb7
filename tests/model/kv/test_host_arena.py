"""The page-locked host tier, on a machine without a device to lock pages for."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from pensieve.errors import DeviceError
from pensieve.model.kv import host_arena
from pensieve.model.kv.host_arena import node_of

CPU = torch.device("cpu")


def test_the_arena_is_page_aligned_locked_by_layer_and_unlocked_after_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    locked: list[tuple[int, int]] = []
    unlocked: list[int] = []

    def register(address: int, num_bytes: int) -> int:
        locked.append((address, num_bytes))
        return 0

    monkeypatch.setattr(host_arena, "_register", register)
    monkeypatch.setattr(host_arena, "_unregister", unlocked.append)
    arena = host_arena.allocate(3, 8192, CPU)
    begin = arena.data_ptr()
    assert locked == [(begin + 8192 * i, 8192) for i in range(3)], "each layer is locked separately"
    assert begin % 4096 == 0
    arena.fill_(7)
    view = arena.view(2, -1)
    assert int(view.sum()) == 7 * 3 * 8192
    del arena
    gc.collect()
    assert not unlocked, "a view of it is still alive"
    del view
    gc.collect()
    assert unlocked == [begin + 8192 * i for i in range(3)]
    assert host_arena.allocate(4, 0, CPU).numel() == 0


def test_layers_that_share_a_memory_page_are_registered_as_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    locked: list[int] = []
    monkeypatch.setattr(host_arena, "_register", lambda address, size: locked.append(size) or 0)
    monkeypatch.setattr(host_arena, "_unregister", lambda address: None)
    host_arena.allocate(5, 1000, CPU)
    assert locked == [5000]


def test_locking_reports_its_progress_and_a_refusal_unlocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_arena, "REPORTED_BYTES", 1 << 20)
    monkeypatch.setattr(host_arena, "_register", lambda address, num_bytes: 0)
    unlocked: list[int] = []
    monkeypatch.setattr(host_arena, "_unregister", unlocked.append)
    told: list[str] = []
    host_arena.allocate(32, 1 << 17, CPU, told.append)
    assert told == [f"locking the host tier: {share}%" for share in range(10, 101, 10)]
    gc.collect()
    unlocked.clear()
    answers = iter([0, 0, 2])
    monkeypatch.setattr(host_arena, "_register", lambda address, num_bytes: next(answers))
    with pytest.raises(DeviceError, match=r"refuses to lock.*returned 2.*--host-cache.*ulimit -l"):
        host_arena.allocate(4, 1 << 20, CPU)
    gc.collect()
    assert len(unlocked) == 2, "layers that were already locked must be unlocked"


def test_an_arena_larger_than_memory_is_refused() -> None:
    with pytest.raises(DeviceError, match="--host-cache"):
        host_arena.allocate(1 << 20, 1 << 42, CPU)


def test_the_numa_node_of_a_device_is_found(tmp_path: Path) -> None:
    for address, written in (("0000:1b:00.0", "1\n"), ("0000:1c:00.0", "-1\n")):
        (tmp_path / address).mkdir()
        (tmp_path / address / "numa_node").write_text(written)
    assert node_of("0000:1b:00.0", tmp_path) == 1
    assert node_of("0000:1c:00.0", tmp_path) is None
    assert node_of("0000:ff:00.0", tmp_path) is None


def test_pages_can_be_allocated_on_a_numa_node() -> None:
    """On any machine, memory is allocated, and the preference for a node is reset afterwards."""
    with host_arena._preferring(0):
        assert bytearray(1 << 20)[-1] == 0
    with host_arena._preferring(None):
        assert bytearray(1 << 20)[-1] == 0
