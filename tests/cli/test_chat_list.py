"""The list of conversations: pages, numbers, titles, ages, short ids, and which are cached."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pensieve.cli.chat_list import ChatList
from pensieve.cli.conversation_table import (
    age_of,
    cached_by_id,
    cached_text,
    id_with_beginning,
    short_ids,
    shortened,
)
from pensieve.client import Client
from pensieve.client.admin import Admin
from pensieve.config import resolve
from pensieve.errors import InvalidArgument, NotFound
from pensieve.launch import programs
from pensieve.launch.embedded_daemon import EmbeddedDaemon


def test_a_page_has_ten_conversations_and_numbers_continue(tmp_path: Path) -> None:
    settings = resolve({"data": str(tmp_path)}, {})
    with (
        EmbeddedDaemon(settings, "a test", lambda line: None, programs.ECHO_ENGINE) as daemon,
        Client(daemon.address) as client,
    ):
        for number in range(12):
            trip = client.conversation(f"trip-{number:02}")
            trip.create(system_prompt="Be brief.")
            trip.ask(f"Where to,\n day {number}?", max_tokens=1)
        cached = cached_by_id(lambda: Admin(daemon.address))
        conversations = ChatList(client, lambda conversation_id: cached)
        first, second = (conversations.page(each, "trip-01") for each in (1, 2))
        assert first[0].split() == ["title", "age", "messages", "tokens", "cached", "id"]
        assert [line.split()[-1] for line in first[1:]] == [
            *(f"trip-{each:02}" for each in range(11, 1, -1)),
            "conversations",
        ]
        assert first[1].startswith("   1  Where to, day 11?  ")
        assert " device  trip-11" in first[1]
        assert "/list 2 " in first[-1]
        assert second[1].startswith("* 11  Where to, day 1?  ")
        assert len(second) == 3
        client.conversation("later").ask("Hello.", max_tokens=1)
        assert conversations.find("11") == "trip-01"  # number 11 of the list as it was shown
        assert conversations.page(3, "") == []
        assert id_with_beginning(client, "lat") == id_with_beginning(client, "later") == "later"
        with pytest.raises(InvalidArgument, match=r"is ambiguous: trip-11, trip-10, .* and 8 more"):
            id_with_beginning(client, "trip-")
        with pytest.raises(NotFound, match="'elsewhere'"):
            id_with_beginning(client, "elsewhere")
        state = client.conversation("trip-03").get()
        found = (cached or {})["trip-03"]
        assert found.device_tokens > 0
        assert cached_text(state, found).endswith("% device")
        assert cached_text(state, None) == ""
    assert cached_by_id(lambda: Admin(daemon.address)) is None  # this daemon does not tell


def test_a_title_is_one_line_without_control_characters() -> None:
    assert shortened("one\n\x1b[31mtwo   three", 30) == "one \u241b[31mtwo three".ljust(30)
    assert shortened("a" * 99, 8) == "aaaaaaa…"
    assert shortened("日本" * 20, 8) == "日本日 …"  # these characters take two columns each


def test_long_ids_are_shortened_but_stay_unique() -> None:
    one, other = "a" * 25 + "1" * 7, "a" * 25 + "2" * 7
    ids = ["trip", one, other, "0123456789abcdef0123456789abcdef"]
    assert short_ids(ids) == ["trip", one[:26], other[:26], "0123456789ab"]


@pytest.mark.parametrize(
    ("passed", "said"),
    [
        (timedelta(seconds=5), "just now"),
        (timedelta(minutes=5), "5 min ago"),
        (timedelta(hours=30), "30 h ago"),
        (timedelta(days=9), "9 days ago"),
        (timedelta(seconds=-5), "just now"),  # clocks differ
    ],
)
def test_ages_are_rounded(passed: timedelta, said: str) -> None:
    now = datetime(2026, 11, 22, 12, tzinfo=UTC)
    assert age_of(now - passed, now) == said
