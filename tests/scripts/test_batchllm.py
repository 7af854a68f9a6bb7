"""The figures of the paper BatchLLM are computed, and compared with the paper's numbers."""

from __future__ import annotations

import pytest

from scripts.measurements import batchllm
from scripts.measurements.batch_simulation import SHAPES, BatchShape
from scripts.measurements.batchllm import (
    FIGURES,
    NOT_REPRODUCED,
    REPRODUCED,
    SAME_SHAPE,
    gain_verdict,
    verdict,
)

TINY = BatchShape(24, 96, 32, 4, output_tokens=8, output_tokens_max=20, apart=3.0)


def test_a_number_is_compared_with_the_paper() -> None:
    assert verdict(9.1, 10.0, claim_holds=False) == REPRODUCED
    assert verdict(8.9, 10.0, claim_holds=True) == SAME_SHAPE
    assert verdict(8.9, 10.0, claim_holds=False) == NOT_REPRODUCED


def test_a_gain_is_compared_as_a_factor() -> None:
    assert [gain_verdict(each, 1.44) for each in (0.9, 1.0, 1.08, 1.12, 1.2, 1.4, 1.5, 1.8)] == [
        *(NOT_REPRODUCED, NOT_REPRODUCED, NOT_REPRODUCED),
        *(SAME_SHAPE, SAME_SHAPE, REPRODUCED, REPRODUCED, SAME_SHAPE),
    ]
    assert gain_verdict(0.86, 0.85) == REPRODUCED
    assert gain_verdict(1.01, 0.85) == NOT_REPRODUCED


@pytest.mark.parametrize(
    ("figure", "num_rows"),
    [
        *(("job-limits", 1), ("table-1", 12), ("figure-5", 5), ("figure-6", 2), ("figure-7", 11)),
        ("identification", 1),
    ],
)
def test_each_figure_has_its_rows(
    figure: str,
    num_rows: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in SHAPES:
        monkeypatch.setitem(SHAPES, name, TINY)
    monkeypatch.setattr(batchllm, "LENGTHS", ("64/32", "32/64"))
    rows = FIGURES[figure](True)
    assert len(rows) == num_rows
    for row in rows:
        assert row.verdict in (REPRODUCED, SAME_SHAPE, NOT_REPRODUCED)
        assert all(row)
    batchllm.main(["--quick", "--figure", "job-limits"])
    assert capsys.readouterr().out.startswith("tokens per iteration, limited by memory;")
