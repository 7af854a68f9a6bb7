"""The list of conversations: pages, titles, ages."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pensieve.cli.chat_list import ChatList, age_of, shortened
from pensieve.client import Client
from pensieve.config import resolve
from pensieve.launch import programs
from pensieve.launch.embedded_daemon import EmbeddedDaemon


def test_a_page_has_ten_and_numbers_go_on(tmp_path: Path) -> None:
    settings = resolve({"data": str(tmp_path)}, {})
    with (
        EmbeddedDaemon(settings, "a test", lambda line: None, programs.ECHO_ENGINE) as daemon,
        Client(daemon.address) as client,
    ):
        for number in range(12):
            trip = client.conversation(f"trip-{number:02}")
            trip.create(system_prompt="Be brief.")
            trip.ask(f"Where to,\n day {number}?", max_tokens=1)
        conversations = ChatList(client)
        first, second = (conversations.page(each, "trip-01") for each in (1, 2))
        assert [line.split()[-1] for line in first] == [
            *(f"trip-{each:02}" for each in range(11, 1, -1)),
            "ones",
        ]
        assert first[0].startswith("   1  Where to, day 11?  ")
        assert first[-1] == "/list 2 has older ones"
        assert second[0].startswith("* 11  Where to, day 1?  ")
        assert len(second) == 2
        client.conversation("later").ask("Hello.", max_tokens=1)
        assert conversations.find("11") == "trip-01"  # what was shown, not what would be now
        assert conversations.page(3, "") == []


def test_a_title_is_one_line_without_what_a_terminal_obeys() -> None:
    assert shortened("one\n\x1b[31mtwo   three", 30) == "one [31mtwo three".ljust(30)
    assert shortened("a" * 99, 8) == "aaaaaaa…"


@pytest.mark.parametrize(
    ("passed", "said"),
    [
        (timedelta(seconds=5), "now"),
        (timedelta(minutes=5), "5 min"),
        (timedelta(hours=30), "30 h"),
        (timedelta(days=9), "9 days"),
        (timedelta(seconds=-5), "now"),  # clocks differ
    ],
)
def test_an_age_is_rough(passed: timedelta, said: str) -> None:
    now = datetime(2026, 11, 22, 12, tzinfo=UTC)
    assert age_of(now - passed, now) == said
