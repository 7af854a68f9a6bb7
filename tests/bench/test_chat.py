"""The chat bench replays conversations with a daemon."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pensieve.bench.chat import NEAR, CheckedReply, part_where_as_likely
from pensieve.cli.main import main
from pensieve.client.values import TokenLogprob


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


@pytest.mark.parametrize(
    ("sampled", "runner_up", "likely"),
    [
        (8, (9, -1.0 - NEAR / 2), True),
        (8, (9, -1.0 - 2 * NEAR), False),  # the other token was clearly less likely here
        (8, (7, -1.0), False),  # the other token was not among the likely ones
    ],
)
def test_replies_may_part_only_where_two_tokens_are_about_as_likely(
    sampled: int, runner_up: tuple[int, float], likely: bool
) -> None:
    same = TokenLogprob(-0.1, ((3, -0.1), (4, -3.0)))
    one = CheckedReply([3, sampled], [same, TokenLogprob(-1.0, ((sampled, -1.0), runner_up))])
    other = CheckedReply([3, 9], [same, TokenLogprob(-1.0, ((9, -1.0), (sampled, -1.0)))])
    assert part_where_as_likely(one, other) is likely
