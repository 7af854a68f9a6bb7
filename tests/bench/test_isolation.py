"""What one tenant notices of another one that does its worst."""

from __future__ import annotations

import json

import pytest

from pensieve.cli.main import main

pytestmark = pytest.mark.executed  # the bench finds the engine among the children of the daemon


def test_both_tenants_are_answered_and_the_times_of_both_halves_compared(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "isolation", "--rounds", "1", "--seconds", "1.5", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    for name in ("first_p50", "first_p99", "gap_p50", "gap_p99"):
        assert min(figures[name].values()) > 0
    assert figures["refused"] == 0
    assert figures["noise"]["OK"] > 0
    assert figures["noise"]["INVALID_ARGUMENT"] > 0, "what is too large"
    assert figures["noise"]["RESOURCE_EXHAUSTED"] > 0, "what is beyond its limits"
