"""`pensieve chat` in a terminal: pastes, lines, commands, completion, and a daemon that disappears."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pensieve.cli.line_editor import HISTORY_ENTRIES_MAX, _read_history
from pensieve.store import ConversationStore
from tests.cli.terminal import CTRL_C, PROMPT, Terminal, text_of
from tests.conversations.rig_daemon import ServeProcess

PASTE_BEGINS, PASTE_ENDS = "\x1b[200~", "\x1b[201~"  # marks that a terminal sends
ALT_ENTER, UP = "\x1b\r", "\x1b[A"


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    arguments = ("chat", "--conversation=c", "--max-tokens=8")
    with Terminal(tmp_path / "data", *arguments, echo_seconds=0.0) as terminal:
        terminal.read_until(PROMPT)
        yield terminal


def leave(terminal: Terminal, data: Path, conversation_id: str = "c") -> list[str]:
    """End the program, and return the user's messages in the history."""
    terminal.type("/bye\n")
    assert terminal.wait() == 0
    with ConversationStore.open(data, "a test") as store:
        return [each.content for each in store.messages(conversation_id) if each.role == "user"]


def said(terminal: Terminal, line: str) -> str:
    """Type a line, and return the output up to the next prompt."""
    terminal.type(f"{line}\n")
    return text_of(terminal.read_until(PROMPT)).removeprefix(line).strip()


def test_three_pasted_lines_are_one_message(terminal: Terminal, tmp_path: Path) -> None:
    terminal.type(f"{PASTE_BEGINS}one\n\ttwo\n/three\n{PASTE_ENDS}")
    terminal.read_until("/three")
    said(terminal, "")
    assert leave(terminal, tmp_path / "data") == ["one\n\ttwo\n/three"]


def test_a_paste_is_never_parsed_as_a_command_or_quotes(terminal: Terminal, tmp_path: Path) -> None:
    for text in ('"""A module.\n"""\nimport os', "/usr/bin\n/usr/lib"):
        terminal.type(f"{PASTE_BEGINS}{text}{PASTE_ENDS}")
        said(terminal, "")
    assert leave(terminal, tmp_path / "data") == [
        '"""A module.\n"""\nimport os',
        "/usr/bin\n/usr/lib",
    ]


def test_alt_enter_and_three_quotes_make_messages_of_several_lines(
    terminal: Terminal, tmp_path: Path
) -> None:
    said(terminal, f"one{ALT_ENTER}two")
    terminal.type('"""one\n')
    terminal.read_until("... ")
    terminal.type("two\n")
    terminal.read_until("... ")
    said(terminal, 'three"""')
    said(terminal, '"""one line"""')
    assert leave(terminal, tmp_path / "data") == ["one\ntwo", "one\ntwo\nthree", "one line"]


def test_ctrl_c_within_three_quotes_discards_the_message(
    terminal: Terminal, tmp_path: Path
) -> None:
    terminal.type('"""one\n')
    terminal.read_until("... ")
    terminal.type(CTRL_C)
    terminal.read_until(PROMPT)
    said(terminal, "two")
    assert leave(terminal, tmp_path / "data") == ["two"]


def test_the_line_editor_remembers_whole_messages(terminal: Terminal, tmp_path: Path) -> None:
    said(terminal, f"a \\n b{ALT_ENTER}c")
    terminal.type("/bye\n")
    assert terminal.wait() == 0
    assert (tmp_path / "data" / "chat_history").stat().st_mode & 0o777 == 0o600
    with Terminal(tmp_path / "data", "chat", "--conversation=d", echo_seconds=0.0) as again:
        again.read_until(PROMPT)
        again.type(UP)  # the newest entry is /bye
        said(again, UP)
        assert leave(again, tmp_path / "data", "d") == ["a \\n b\nc"]


def test_the_line_history_is_limited(tmp_path: Path) -> None:
    path = tmp_path / "chat_history"
    path.write_text("".join(f"line {number}\n" for number in range(2 * HISTORY_ENTRIES_MAX + 1)))
    kept = _read_history(path)
    assert (len(kept), kept[-1]) == (HISTORY_ENTRIES_MAX, f"line {2 * HISTORY_ENTRIES_MAX}")
    assert path.read_text().splitlines() == kept == _read_history(path)


def test_tab_completes_commands_settings_and_conversations(terminal: Terminal) -> None:
    said(terminal, "Hello there.")
    said(terminal, "/fork cat-and-mouse")
    assert "conversation cat-and-mouse" in said(terminal, "/resume cat\t")
    assert "max_tokens         8" in said(terminal, "/set max\t")
    assert "/retry" in said(terminal, "/he\t")
    terminal.type("a message\t has no completion\n")
    assert "a message has no completion" in text_of(terminal.read_until(PROMPT))


def test_resume_accepts_a_number_an_id_or_its_beginning(terminal: Terminal) -> None:
    said(terminal, "Hello there.")
    for name in ("trip-1", "trip-2", "2"):
        said(terminal, f"/fork {name}")
    shown = said(terminal, "/list").splitlines()[1:]
    assert [line.split()[-1] for line in shown] == ["2", "trip-2", "trip-1", "c"]
    assert shown[0].startswith("*  1  Hello there.")
    assert " just now " in shown[0]
    assert "conversation trip-1" in said(terminal, "/resume 3")
    assert "conversation 2" in said(terminal, "/resume 2")  # an id is preferred to a number
    assert "conversation trip-2" in said(terminal, "/resume trip-2")
    assert "! trip: is ambiguous: trip-2, trip-1" in said(terminal, "/resume trip")
    assert "! no conversation has the number or the id '9'" in said(terminal, "/resume 9")


def test_text_typed_during_a_reply_waits_for_the_prompt(tmp_path: Path) -> None:
    with Terminal(tmp_path / "data", "chat", "--conversation=c", echo_seconds=0.1) as terminal:
        terminal.read_until(PROMPT)
        terminal.type("Hello there.\n")
        terminal.read_until("\n")
        time.sleep(0.5)  # the reply takes about two seconds
        terminal.type("TYPED")
        reply = terminal.read_until(PROMPT)
        assert "TYPED" not in reply
        terminal.type(" behind\n")
        assert "TYPED behind" in text_of(terminal.read_until(PROMPT))
        assert leave(terminal, tmp_path / "data") == ["Hello there.", "TYPED behind"]


def test_delete_asks_first_and_keeps_the_system_prompt(terminal: Terminal, tmp_path: Path) -> None:
    assert "! /delete: this conversation has no messages yet" in said(terminal, "/delete")
    assert "system prompt" not in said(terminal, "/new d")
    said(terminal, "/system Be brief.")
    said(terminal, "/new c")
    said(terminal, "Hello there.")
    question = 'Delete "Hello there." (3 messages) for good? [y/N] '
    for answer in ("", "n", CTRL_C):
        terminal.type("/delete\n")
        terminal.read_until(question)
        assert "nothing is deleted" in said(terminal, answer)
    terminal.type("/delete\n")
    terminal.read_until(question)
    shown = said(terminal, "y")
    assert "deleted\nconversation chat-" in shown
    assert "the system prompt stays: Be brief." in shown
    assert said(terminal, "/list") == "no conversations yet"
    assert said(terminal, "/system none").endswith("system prompt of new conversations: none")
    said(terminal, "/new c")
    said(terminal, "Again.")
    assert leave(terminal, tmp_path / "data") == ["Again."]


def test_retry_resends_the_last_message(terminal: Terminal, tmp_path: Path) -> None:
    assert "! " in said(terminal, "/retry")
    first = said(terminal, "Hello there.")
    second = said(terminal, "And now?")
    again = said(terminal, "/retry")
    assert again.startswith(second)  # the echo engine gives the same reply
    assert "[the same reply again: /set temperature 0.7 varies it]" in again
    texts = said(terminal, "/messages")
    assert texts.splitlines()[0] == "user: Hello there."
    assert first in texts
    assert leave(terminal, tmp_path / "data") == ["Hello there.", "And now?"]


def test_a_retry_uses_another_seed_than_the_set_one(terminal: Terminal, tmp_path: Path) -> None:
    said(terminal, "/set seed 5")
    said(terminal, "Hello there.")
    said(terminal, "/retry")
    assert leave(terminal, tmp_path / "data") == ["Hello there."]
    (database,) = (tmp_path / "data").glob("*.db")
    with contextlib.closing(sqlite3.connect(database)) as connection:
        seeds = [int(row[0]) for row in connection.execute("SELECT seed FROM turns")]
    assert seeds[0] == 5
    assert seeds[1] != 5


def test_set_shows_current_values_and_their_sources(terminal: Terminal) -> None:
    lines = said(terminal, "/set").splitlines()
    assert lines[0] == "temperature        0.0          (the model's own)"
    assert lines[1] == "top_p              1.0          (the model's own)"
    assert lines[9] == "max_tokens         8            (--max-tokens)"
    assert said(terminal, "/set temperature 0.7") == "temperature        0.7          (/set)"
    assert said(terminal, "/set temperature") == "temperature        0.7          (/set)"
    assert said(terminal, "/set temperature default") == lines[0]
    assert "! /set: top_p must be a number in 0..1, not '7'" in said(terminal, "/set top_p 7")
    assert "! /set: unknown setting 'colour'. The settings are temperature, top_p" in said(
        terminal, "/set colour 7"
    )
    said(terminal, "/set max_tokens 3")
    said(terminal, "Hello there.")
    (row,) = said(terminal, "/list").splitlines()[1:]
    assert row.split()[-5:][0] == "2"


def test_chat_waits_for_a_daemon_that_restarts(tmp_path: Path) -> None:
    first = ServeProcess(tmp_path / "data")
    first.start()
    arguments = ("chat", "--address", first.address, "--conversation=c", "--max-tokens=8")
    with Terminal(tmp_path / "mine", *arguments) as terminal:
        terminal.read_until(PROMPT)
        first.kill()
        terminal.type("Hello there.\n")
        waiting = f"[{first.address} is not ready; retrying, Ctrl-C gives up]"
        terminal.read_until(waiting)
        terminal.type(CTRL_C)
        assert f"! {first.address} is not ready" in terminal.read_until(PROMPT)
        terminal.type("Hello again.\n")
        terminal.read_until(waiting)
        second = ServeProcess(tmp_path / "data", "--address", first.address.removeprefix("grpc://"))
        second.start()
        shown = terminal.read_until(PROMPT)
        assert "\r\x1b[K" in shown  # the line was cleared
        assert "!" not in text_of(shown)
        terminal.type("/bye\n")
        assert terminal.wait() == 0
    assert second.stop() == 0
    with ConversationStore.open(tmp_path / "data", "a test") as store:
        assert store.messages("c")[-2].content == "Hello again."
