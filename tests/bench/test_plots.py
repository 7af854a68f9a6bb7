"""What the benches measured is drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from pensieve.bench import chat as bench_chat
from pensieve.bench import step as bench_step
from pensieve.bench import swap as bench_swap


def test_plots_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    turns = [bench_chat.Turn(number, 0.1, 1.0, [0.1, 0.2], 3) for number in (0, 1)]
    bench_chat.plot(turns, tmp_path / "chat.png")
    row = bench_step.Row("decode", 1, 8, 0, 0.02, 0.02, 0.01, 2.0, 50.0)
    bench_step.plot([row], tmp_path / "step.png")
    bench_swap.plot([bench_swap.TurnRow("host", 9, 9, 0.1, 0.1, 1.0)], tmp_path / "swap.png")
    for path in tmp_path.glob("*.png"):
        assert path.stat().st_size > 1000
