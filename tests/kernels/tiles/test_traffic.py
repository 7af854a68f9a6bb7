"""Count the bytes that large tiled products load into the second-level cache, with a model of the cache.

No machine with AMX was available for timing. These counts come from the library's own loads and stores, in
their real order.
"""

from __future__ import annotations

import subprocess
from math import ceil
from pathlib import Path

import pytest

from tests.kernels.tiles import EMULATED, Mistake, program

ROWS, COLUMNS = 256, 256  # size of a block
FLAGS = (*EMULATED, "-O1", "-ffunction-sections", "-Wl,--gc-sections")
SHAPES = [(512, 4096, 1024), (256, 4096, 1024), (512, 11008, 512)]


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return program(tmp_path_factory.mktemp("traffic"), "traffic.cpp", flags=FLAGS)


def counted(program: Path, shape: tuple[int, int, int], kilobytes: int) -> tuple[int, int, int]:
    """Return the bytes of all loads and stores, and of cache misses: in blocks, and panel by panel."""
    arguments = [str(each) for each in (*shape, kilobytes)]
    ran = subprocess.run([program, *arguments], capture_output=True, check=True, text=True)
    touched, missed, by_panel = map(int, ran.stdout.split())
    return touched, missed, by_panel


def floor(rows: int, inputs: int, outputs: int) -> int:
    """Return the bytes for reading each block's rows and weights once."""
    return 2 * inputs * (rows * ceil(outputs / COLUMNS) + outputs * ceil(rows / ROWS))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_block_reads_its_rows_and_weights_once(
    counting: Path, shape: tuple[int, int, int]
) -> None:
    touched, missed, by_panel = counted(counting, shape, 2048)
    assert missed <= 1.05 * floor(*shape)
    assert by_panel >= 3.5 * missed
    # Storing and loading partial sums again adds little to the loads of a step.
    rows, inputs, outputs = shape
    assert touched <= 1.15 * (rows // 32 * inputs // 32 * outputs // 32 * 4096)
    # Half the cache, as if two threads shared it.
    _, missed, by_panel = counted(counting, shape, 1024)
    assert missed <= 1.3 * floor(*shape)
    assert by_panel >= 3 * missed


def test_rows_that_stay_in_the_cache_are_not_cut_into_blocks(counting: Path) -> None:
    rows, inputs, outputs = shape = (256, 1024, 512)
    _, missed, by_panel = counted(counting, shape, 1024)
    assert missed == by_panel <= 1.05 * 2 * inputs * (rows + outputs)


@pytest.mark.parametrize(
    ("mistake", "shape"),
    [
        (Mistake("amx.cpp", "kStretchSteps = 16;", "kStretchSteps = 256;"), SHAPES[0]),
        pytest.param(
            Mistake("amx.cpp", "kStretchSteps = 16;", "kStretchSteps = 2;"),
            SHAPES[0],
            marks=pytest.mark.full,
        ),
        (Mistake("copies.h", "row_bytes % 4096 ?", "row_bytes ?"), SHAPES[0]),
        pytest.param(
            Mistake("layer.h", "kBlockPanels = 8", "kBlockPanels = 2"),
            SHAPES[0],
            marks=pytest.mark.full,
        ),
    ],
    ids=[
        "stretches that are too long",
        "too short",
        "rows 8 KiB apart",
        "blocks that are too narrow",
    ],
)
def test_blocks_of_the_wrong_size_for_the_cache_are_found(
    mistake: Mistake, shape: tuple[int, int, int], tmp_path: Path
) -> None:
    built = program(tmp_path, "traffic.cpp", mistake, flags=FLAGS)
    with pytest.raises(AssertionError):
        test_a_block_reads_its_rows_and_weights_once(built, shape)
