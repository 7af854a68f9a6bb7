"""`pensieve bench` explains invalid arguments."""

from __future__ import annotations

import pytest

from pensieve.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["step", "--batch", "0"], "at least 1"),
        (["step", "--shape", "7T"], "must be one of 0.03B, 0.37B, 1.1B"),
        (["chat", "--turns", "0"], "at least 1"),
        (["chat", "--think", "-1"], "must not be negative"),
        (["step", "./nowhere"], "no model folder"),
    ],
)
def test_impossible_options_are_explained(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) != 0
    assert message in capsys.readouterr().err
