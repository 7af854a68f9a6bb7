"""The swap bench compares turns by where their history is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pensieve.cli.main import main


def test_swap_compares_where_a_history_is(
    random_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--history", "150", "--message", "10", "--repeats", "2", "--json"]
    assert main(["bench", "swap", str(random_model), *small]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert [row["direction"] for row in figures["copies"]] == ["swap-in", "swap-out"]
    assert [row["place"] for row in figures["turns"]] == ["device", "host", "dropped"]
    assert figures["turns"][0]["ratio"] == 1.0
