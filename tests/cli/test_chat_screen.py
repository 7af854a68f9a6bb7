"""A reply is rendered as Markdown on a terminal, and unchanged elsewhere."""

from __future__ import annotations

import io

import pytest

from pensieve.cli.chat_screen import Screen
from tests.cli.screen import TerminalScreen

REPLY = ("A **bold** word,\n", "and `co", "de`\x1b[2J.\r\n")


class Output(io.StringIO):
    """Standard output that may be a terminal."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.fixture(autouse=True)
def window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("LINES", "24")


def written(monkeypatch: pytest.MonkeyPatch, is_terminal: bool, plain: bool = False) -> str:
    out = Output(is_terminal)
    monkeypatch.setattr("sys.stdout", out)
    screen = Screen(plain)
    for piece in REPLY:
        screen.reply(piece)
    screen.reply_ended()
    return out.getvalue()


def test_a_pipe_gets_the_unchanged_text(monkeypatch: pytest.MonkeyPatch) -> None:
    assert written(monkeypatch, False) == "".join(REPLY) + "\n"


def test_a_terminal_gets_markdown(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = TerminalScreen(60, 24)
    screen.write(written(monkeypatch, True))
    assert screen.text == "A bold word,\nand code␛[2J."


@pytest.mark.parametrize(
    ("name", "value", "plain"), [("TERM", "dumb", False), ("COLUMNS", "12", False), ("A", "", True)]
)
def test_a_limited_terminal_or_plain_mode_shows_no_markdown(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, plain: bool
) -> None:
    monkeypatch.setenv(name, value)
    assert written(monkeypatch, True, plain) == "A **bold** word,\nand `code`␛[2J.\n\n"


def test_a_restarted_reply_is_shown_below_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Output(True)
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", out)
    screen = Screen()
    screen.reply("```\ncode")
    screen.show_temporary("[waiting]")
    assert "[waiting]" in out.getvalue()
    screen.begin_again("[again]")
    screen.reply("It is *so*.")
    screen.reply_ended()
    shown = TerminalScreen(60, 24)
    shown.write(out.getvalue())
    assert shown.text.split("\n") == ["```", "code", "[again]", "It is so."]


def test_a_rewritten_row_has_no_control_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = Output(True)
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", out)
    screen = Screen(plain=True)
    screen.reply("hi \x1b]0;evil\x07\x1b[2J")
    screen.show_temporary("[waiting]")
    screen.clear()
    assert "hi " in out.getvalue().rpartition("[waiting]")[2]
    assert "\x1b]0;" not in out.getvalue()
    assert "\x1b[2J" not in out.getvalue()
    assert "\x07" not in out.getvalue()
