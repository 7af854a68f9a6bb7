"""What a turn costs the service, by the length of its conversation."""

from __future__ import annotations

import json

import pytest

from pensieve.cli.main import main

pytestmark = pytest.mark.executed  # the bench finds the engine among the children of the daemon


def test_each_history_is_as_long_as_was_asked_and_has_its_figures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "service", "--history", "40,400", "--tokens", "5", "--json"]) == 0
    short, long = json.loads(capsys.readouterr().out)["turns"]
    assert 40 <= short["history_tokens"] < 400 <= long["history_tokens"]
    assert short["turns"] == long["turns"] == 5
    assert short["first_token_seconds"] > 0


def test_turns_do_not_lengthen_the_history_that_they_are_measured_with(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Else 400 turns after 90,000 tokens, as the docs show it, do not fit into the context of 100,000."""
    assert main(["bench", "service", "--history", "96000", "--tokens", "300", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["turns"]
    assert row["history_tokens"] >= 96_000
