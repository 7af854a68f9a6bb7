"""The check for real models finds errors; here it runs with a tiny random model."""

from __future__ import annotations

from pathlib import Path

from tests.conversations.rig import write_model
from tests.real_model import exactness, problems
from tests.text.families import QWEN_2_5


def test_eight_conversations_under_tiny_caches_equal_plain_transformers(tmp_path: Path) -> None:
    """The histories have 1,600 tokens. 800 fit on the device and 600 on the host."""
    model = write_model(tmp_path / "model", QWEN_2_5)
    small = ("--device-cache", "800t", "--host-cache", "600t")
    figures = exactness(str(model), tmp_path / "data", 2, (*small, "--policy", "value"), "8")
    assert problems(figures) == [], figures
    assert figures["replies"] > 200
    assert figures["wrong"] == 0


def test_wrong_tokens_and_too_large_caches_are_reported_as_problems() -> None:
    figures = {"device": 5, "host": 0, "recomputed": 5, "replies": 90, "wrong": 2, "ties": 0}
    assert problems(figures) == [
        "2 of 90 tokens are wrong",
        "there were no tokens of the kind 'host'",
    ]
