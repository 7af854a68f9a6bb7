"""Plant mistakes in the AMX kernels. Checks on a machine without AMX must find each of them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.kernels.tiles import COMPILED, EMULATED, Mistake, program

SUMS, ATTEND, AMX = "tile_sums.h", "amx_attend.h", "amx.cpp"
MISTAKES = {
    "a product of the wrong tiles": Mistake(SUMS, "TILE_DOT(3, 5, 7)", "TILE_DOT(3, 4, 7)"),
    "a stride of rows that is too short": Mistake(
        SUMS, "rows + kTileRows * p.row_bytes", "rows + (kTileRows - 1) * p.row_bytes"
    ),
    "a product of bytes of the wrong tiles": Mistake(
        SUMS, "TILE_DOT_BYTES(2, 5, 6)", "TILE_DOT_BYTES(2, 5, 7)"
    ),
    "bytes as if they were bfloat16": Mistake(
        SUMS, "std::is_same_v<Input, uint8_t>", "std::is_same_v<Input, char>"
    ),
    "a step of inputs left out": Mistake(SUMS, "step < p.steps", "step < p.steps - 1"),
    "a shape that does not fit": Mistake(SUMS, "num_rows - top;", "0;"),
    "a stretch that begins anew": Mistake(AMX, "tiles.more = first_step > 0;", ""),
    "inputs of the first stretch": Mistake(
        AMX, "row_bytes_ + first_step * kTileBytes", "row_bytes_"
    ),
    "weights of the first stretch": Mistake(
        AMX, "panel_bytes + first_step * kStepBytes", "panel_bytes"
    ),
    "sums of another panel": Mistake(AMX, "sums[at - panel] +", "sums[0] +"),
    "sums of other rows": Mistake(AMX, "(from - first) * kPanel", "0"),
    "a shape that stays": Mistake(AMX, "if (num_rows != shaped_)", "if (!shaped_)"),
    "tiles that stay configured by a product": Mistake(
        AMX, "~RowsInTiles() { TILE_RELEASE(); }", "~RowsInTiles() {}"
    ),
    "sums that are not continued": Mistake(ATTEND, "sums.more = true;", "sums.more = false;"),
    "sums that are not rescaled": Mistake(
        ATTEND, "if (rescale == 1.0f) continue;", "if (rescale <= 1.0f) continue;"
    ),
    "a part that begins anew behind shared pages": Mistake(
        ATTEND, "const bool more = part.continues &&", "const bool more = false &&"
    ),
    "weighted values that begin anew behind shared pages": Mistake(
        ATTEND, "  if (part.continues)\n    memcpy", "  if (false)\n    memcpy"
    ),
    "rows that are not looked up": Mistake(
        ATTEND,
        "query_at(part, (row + r) / part.group)",
        "(row + r) / part.group * part.token_stride",
    ),
    "a row that does not see itself": Mistake(ATTEND, "slot <= last ?", "slot < last ?"),
    "slots that are not masked": Mistake(
        ATTEND, "- first + 1;  // later rows", "- first + 2;  // later rows"
    ),
    "a row that has seen nothing": Mistake(ATTEND, "largest == none ? Floats{} :", ""),
    "a row that sees what follows": Mistake(
        ATTEND, "part.position + r / part.group;", "part.position + r / part.group + 1;"
    ),
    "heads of a group at different positions": Mistake(
        ATTEND, "part.position + r / part.group;", "part.position + r;"
    ),
    "queries of one head": Mistake(ATTEND, "(row + r) % part.group * part.head_stride", "0"),
    "values that were never written": Mistake(
        ATTEND, "if (slot + 1 < num_slots) second", "if (slot < num_slots) second"
    ),
    "pairs of slots that are turned round": Mistake(
        ATTEND, "epi16(first, high, second)", "epi16(second, high, first)"
    ),
    "weights of the wrong slots": Mistake(
        ATTEND, "(__m512)second, (__m512)first", "(__m512)first, (__m512)second"
    ),
    "a weight that is not in the sum": Mistake(ATTEND, "(total[0] + total[1])", "total[0]"),
    "the rows of the second panel left out": Mistake(
        ATTEND, "row < num_rows; row += kTilePanel", "row < 1; row += kTilePanel"
    ),
    "blocks that depend on how many rows there are": Mistake(
        ATTEND,
        "from == part.first_page && !part.continues ? from + 1",
        "from == part.first_page && !part.continues ? from + 1 + part.num_tokens % 2",
    ),
    "tiles that stay configured by attention": Mistake(ATTEND, "  TILE_RELEASE();\n", ""),
}


IN_INSTRUCTIONS = {
    "operands that are swapped": Mistake(
        "tiles.h", '"tdpbf16ps %%tmm" #b ", %%tmm" #a', '"tdpbf16ps %%tmm" #a ", %%tmm" #b'
    ),
    "bytes whose signs are swapped": Mistake("tiles.h", '"tdpbusd %%tmm"', '"tdpbsud %%tmm"'),
    # As in GCC 12's intrinsic, the operand has eight bytes. So the compiler drops writes to the other bytes.
    "shapes of which eight bytes are read": Mistake(
        "tiles.h", '::"m"(shapes) : "memory")', '::"m"(*(const void* const*)&shapes))'
    ),
}


OFTEN = 8  # one mistake in eight is planted each time, and all of them by scripts/test --full


def some_of(mistakes: dict[str, Mistake]) -> list[object]:
    return [
        pytest.param(name, marks=() if number % OFTEN == 0 else pytest.mark.full)
        for number, name in enumerate(mistakes)
    ]


def run(built: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([built, *arguments], capture_output=True, check=False, text=True)


@pytest.mark.parametrize("flags", [EMULATED, COMPILED], ids=["emulated", "compiled"])
def test_the_checks_pass_without_a_planted_mistake(flags: tuple[str, ...], tmp_path: Path) -> None:
    ran = run(program(tmp_path, "checks.cpp", flags=flags))
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    assert flags != EMULATED or run(tmp_path / "program", "works").returncode == 0


@pytest.mark.parametrize(
    "name",
    [
        "a step of inputs left out",
        "a product of bytes of the wrong tiles",
        "weights of the wrong slots",
    ],
)
def test_tiles_with_wrong_results_are_not_used(name: str, tmp_path: Path) -> None:
    """When the library is loaded, it compares the tiles with AVX-512."""
    assert run(program(tmp_path, "checks.cpp", MISTAKES[name]), "works").returncode == 3


@pytest.mark.parametrize("name", some_of(MISTAKES))
def test_a_planted_mistake_is_found(name: str, tmp_path: Path) -> None:
    assert run(program(tmp_path, "checks.cpp", MISTAKES[name])).returncode != 0


@pytest.mark.parametrize("name", some_of(IN_INSTRUCTIONS))
def test_a_mistake_in_the_instructions_is_found(name: str, tmp_path: Path) -> None:
    mistake = IN_INSTRUCTIONS[name]
    assert run(program(tmp_path, "checks.cpp", mistake, flags=COMPILED)).returncode != 0
