"""How the SDK's values are displayed: one helpful line, without secrets."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pensieve.client import (
    AsyncClient,
    Client,
    ConversationState,
    Delta,
    Message,
    Reply,
    Restarted,
    ServerInfo,
    TokenLogprob,
    Usage,
)
from pensieve.client.admin import Admin
from pensieve.errors import InvalidArgument
from tests.conversations.rig_daemon import DaemonRig

SECRET = "a-token-that-nobody-may-read"


def test_the_repr_of_a_client_has_its_address_and_never_its_token() -> None:
    with Client("127.0.0.1:1", token=SECRET) as client:
        assert repr(client) == "<Client of 127.0.0.1:1>"
        assert repr(client.conversation("trip")) == "<Conversation 'trip' at 127.0.0.1:1>"
        turn = client.conversation("trip").send("Hello.", request_id="r1")
        assert repr(turn) == "<Turn r1 of 'trip': not sent yet>"
    with Admin("unix:/nowhere", token=SECRET) as admin:
        assert repr(admin) == "<Admin of unix:/nowhere>"

    async def look() -> list[str]:
        async with AsyncClient("127.0.0.1:1", token=SECRET) as client:
            trip = client.conversation("trip")
            return [repr(client), repr(trip), repr(trip.send("Hello.", request_id="r1"))]

    assert asyncio.run(look()) == [
        "<AsyncClient of 127.0.0.1:1>",
        "<AsyncConversation 'trip' at 127.0.0.1:1>",
        "<AsyncTurn r1 of 'trip': not sent yet>",
    ]


def test_the_repr_of_a_turn_shows_its_progress(tmp_path: Path) -> None:
    with DaemonRig(tmp_path / "data") as rig, Client(rig.server.address) as client:
        turn = client.conversation("trip").send("Hello.", max_tokens=5, ignore_eos=True)
        next(turn)
        assert repr(turn).endswith(
            f"{turn.turn_id} of 'trip': {len(next_ids(turn))} tokens so far>"
        )
        for _ in turn:
            pass
        assert repr(turn) == f"<Turn {turn.turn_id} of 'trip': ended (length)>"
        left = client.conversation("trip").send("More.")
        next(left)
        left.close()
        assert repr(left) == f"<Turn {left.turn_id} of 'trip': stopped>"
        failed = client.conversation("trip").send("More.", max_tokens=-1)
        with pytest.raises(InvalidArgument):
            next(failed)
        assert repr(failed).endswith(" of 'trip': failed (InvalidArgument)>")


def next_ids(turn: object) -> list[int]:
    return turn._course.progress._token_ids  # type: ignore[attr-defined]


def test_the_repr_of_a_value_is_one_line_without_empty_or_long_parts() -> None:
    usage = Usage(prompt_tokens=12, new_tokens=12, output_tokens=300, total_seconds=0.123456)
    shown = "Usage(prompt_tokens=12, new_tokens=12, output_tokens=300, total_seconds=0.1235)"
    assert repr(usage) == shown
    reply = Reply("word " * 300, tuple(range(300)), "stop", usage, 2, "7", "r1", False)
    assert repr(reply) == (
        "Reply(text='" + "word " * 12 + "…' (1,500 characters), "
        "token_ids=(0, 1, 2, 3, 4, 5, … 300 in all), finish_reason='stop', "
        f"usage={shown}, revision=2, turn_id='7', request_id='r1', replayed=False)"
    )
    message = Message(0, "user", "two\nlines", "", 1, 0, 5, (), "", {"mood": "good"})
    assert repr(message) == (
        "Message(index=0, role='user', text='two\\nlines', revision=1, first_token=0, num_tokens=5, "
        "metadata={'mood': 'good'})"
    )
    when = datetime(2026, 11, 22, 9, 30, 15, 123456, UTC)
    many = {f"k{number}": "v" * 100 for number in range(50)}
    state = ConversationState("trip", 2, 3, 40, 512, many, (), {}, "", "", when, when)
    assert "created_at=2026-11-22T09:30:15+00:00" in repr(state)
    assert "context_max_tokens=512, metadata={'k0': 'vvv" in repr(state)
    assert len(repr(state)) < 1000
    assert repr(Delta("Hi", (5,))) == "Delta(text='Hi', token_ids=(5,))"
    assert repr(Restarted(2)) == "Restarted(attempt=2)"
    logprob = TokenLogprob(-0.12345678, ((5, -0.1),))
    assert repr(logprob) == "TokenLogprob(logprob=-0.1235, alternatives=((5, -0.1),))"
    info = ServerInfo("built-in", "ab", "loading", "", "", "", 0, "0.1", "2.13", "5.23", 1.5)
    assert repr(info).startswith("ServerInfo(model='built-in', fingerprint='ab', state='loading', ")
