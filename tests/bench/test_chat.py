"""The chat benchmark replays conversations with a daemon."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from pensieve.bench import chat
from pensieve.bench.bench_daemon import serving
from pensieve.bench.chat import NEAR_TIE, CheckedReply, check_turns, differ_at_near_tie
from pensieve.cli.main import main
from pensieve.client.admin import Admin
from pensieve.client.aio import AsyncClient
from pensieve.client.values import TokenLogprob
from pensieve.errors import PensieveError


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
    assert reused >= 0.99 * 3 * (60 + 120)  # 60 tokens after the first turn, 120 after the second
    assert figures["reused_share"] >= 0.99
    assert figures["output_tokens_per_second"] == pytest.approx(81 / figures["seconds"])


@pytest.mark.parametrize(
    ("sampled", "runner_up", "likely"),
    [
        (8, (9, -1.0 - NEAR_TIE / 2), True),
        (8, (9, -1.0 - 2 * NEAR_TIE), False),  # the other token was clearly less likely
        (8, (7, -1.0), False),  # the other token was not among the alternatives
    ],
)
def test_replies_may_part_only_where_two_tokens_are_about_as_likely(
    sampled: int, runner_up: tuple[int, float], likely: bool
) -> None:
    same = TokenLogprob(-0.1, ((3, -0.1), (4, -3.0)))
    one = CheckedReply([3, sampled], [same, TokenLogprob(-1.0, ((sampled, -1.0), runner_up))])
    other = CheckedReply([3, 9], [same, TokenLogprob(-1.0, ((9, -1.0), (sampled, -1.0)))])
    assert differ_at_near_tie(one, other) is likely


def test_every_turn_is_compared_even_after_a_near_tie(
    random_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replies 1 and 2 are from the first run. Reply 3 repeats turn 2, and reply 4 repeats turn 1."""
    real, num_replies, evicted = chat.checked_reply, 0, list[int]()
    changed: set[int] = set()  # numbers of replies that get the second likeliest first token

    async def checked_reply(*given: Any) -> tuple[CheckedReply, int]:
        nonlocal num_replies
        reply, revision = await real(*given)
        num_replies += 1
        if num_replies in changed:
            best, second = reply.logprobs[0].alternatives[:2]
            swapped = TokenLogprob(second[1], (best, second))
            reply = CheckedReply([second[0], *reply.token_ids[1:]], [swapped, *reply.logprobs[1:]])
        return reply, revision

    async def checked(address: str, admin_address: str) -> None:
        nonlocal num_replies
        num_replies = 0
        async with AsyncClient(address) as client:
            conversation = client.conversation()
            with Admin(admin_address) as admin:
                evict = lambda: evicted.append(admin.evict(conversation.conversation_id))  # noqa: E731
                await check_turns(conversation, ("one", "two"), 5, evict, near_ties=True)

    monkeypatch.setattr(chat, "checked_reply", checked_reply)
    with serving([str(random_model)]) as daemon:
        asyncio.run(checked(daemon.address, daemon.admin_address))
        assert num_replies == 4
        assert evicted[0] > 0
        for near, replies, wrong in ((1e9, {3}, 0), (0.0, {3}, 2), (0.0, {4}, 1)):
            monkeypatch.setattr(chat, "NEAR_TIE", near)
            changed = replies
            expected: Any = contextlib.nullcontext()
            if wrong:
                expected = pytest.raises(PensieveError, match=f"turn {wrong} got another reply")
            with expected:
                asyncio.run(checked(daemon.address, daemon.admin_address))
            assert num_replies == (3 if wrong == 2 else 4)
