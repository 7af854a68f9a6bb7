"""The chat bench replays conversations with a daemon."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pensieve.cli.main import main


def test_chat_replays_conversations_with_a_daemon(
    random_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--conversations", "3", "--turns", "3", "--input-tokens", "40", "--output-tokens", "9"]
    assert (
        main(
            [
                *("bench", "chat", str(random_model), "--shape", "pressure", *small),
                *("--think", "0.05", "--rate", "50", "--seed", "7", "--json"),
            ]
        )
        == 0
    )
    figures = json.loads(capsys.readouterr().out)
    assert figures["turns"] == 9
    assert figures["shape"]["conversations"] == 3
    assert figures["tokens"]["new"] >= 9 * 40
    reused = figures["tokens"]["device"] + figures["tokens"]["host"]
    assert reused >= 0.99 * 3 * (60 + 120)  # after the first and the second turn
    assert figures["reused_share"] >= 0.99
    assert figures["output_tokens_per_second"] == pytest.approx(81 / figures["seconds"])
