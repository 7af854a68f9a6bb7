"""The /commands and the line editor of `pensieve chat`, on a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pensieve.cli.chat_terminal import HELP, Commands
from pensieve.client import Message
from tests.cli.terminal import CTRL_C, PROMPT, Terminal, text_of
from tests.cli.test_chat_terminal import leave, said

CTRL_R, CTRL_U = "\x12", "\x15"


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    arguments = ("chat", "--conversation=c", "--max-tokens=8")
    with Terminal(tmp_path / "data", *arguments, echo_seconds=0.0) as terminal:
        terminal.read_until(PROMPT)
        yield terminal


def test_a_trailing_backslash_continues_the_message(terminal: Terminal, tmp_path: Path) -> None:
    terminal.type("one\\\n")
    terminal.read_until("... ")
    terminal.type("two\\\n")
    terminal.read_until("... ")
    said(terminal, "three")
    terminal.type("given up\\\n")
    terminal.read_until("... ")
    terminal.type(CTRL_C)
    terminal.read_until(PROMPT)
    assert leave(terminal, tmp_path / "data") == ["one\ntwo\nthree"]


def test_ctrl_r_finds_what_was_typed_before(terminal: Terminal, tmp_path: Path) -> None:
    said(terminal, "The first message.")
    said(terminal, "Another one.")
    terminal.type(f"{CTRL_R}first")
    terminal.read_until("\x1b[7mfirst\x1b[27m")  # the match is highlighted
    terminal.type("\r")  # the Enter key; a line feed would only end the search
    terminal.read_until(PROMPT)
    assert leave(terminal, tmp_path / "data") == [
        *("The first message.", "Another one.", "The first message.")
    ]


def test_edit_replaces_the_last_message(terminal: Terminal, tmp_path: Path) -> None:
    assert "! /edit: this conversation has no turn yet" in said(terminal, "/edit")
    said(terminal, "One.")
    said(terminal, "Two.")
    terminal.type("/edit\n")
    terminal.read_until("Two.")
    said(terminal, " And more.")
    said(terminal, "Three.")
    said(terminal, "/edit Four.")
    terminal.type("/edit\n")
    terminal.read_until("Four.")
    terminal.type(CTRL_C)
    terminal.read_until(PROMPT)
    terminal.type("/edit\n")
    terminal.read_until("Four.")
    assert "nothing is changed" in said(terminal, CTRL_U)
    assert leave(terminal, tmp_path / "data") == ["One.", "Two. And more.", "Four."]


def test_rewind_removes_the_given_number_of_turns(terminal: Terminal, tmp_path: Path) -> None:
    assert "! /rewind: this conversation has no turn yet" in said(terminal, "/rewind")
    for text in ("One.", "Two.", "Three.", "Four."):
        said(terminal, text)
    assert "the last 2 turns are removed" in said(terminal, "/rewind 2")
    assert "the last turn is removed" in said(terminal, "/rewind")
    assert "! /rewind: this conversation has only one turn" in said(terminal, "/rewind 2")
    assert "! /rewind: needs a number of turns, not '-1'" in said(terminal, "/rewind -1")
    assert leave(terminal, tmp_path / "data") == ["One."]


def test_system_starts_a_new_conversation_with_the_prompt(
    terminal: Terminal, tmp_path: Path
) -> None:
    said(terminal, "One.")
    assert said(terminal, "/system") == "system prompt of new conversations: none"
    said(terminal, "/system Be brief.")
    said(terminal, "Two.")
    shown = said(terminal, "/messages").splitlines()
    assert shown[:2] == ["system: Be brief.", "user: Two."]
    said(terminal, "/new d")
    said(terminal, "Three.")
    assert "system: Be brief." in said(terminal, "/messages")
    said(terminal, "/resume c")
    assert "system:" not in said(terminal, "/messages")
    assert leave(terminal, tmp_path / "data") == ["One."]


def test_a_conversation_is_saved_as_markdown_or_as_a_line_of_json(
    terminal: Terminal, tmp_path: Path
) -> None:
    assert "! /save: needs the name of a file" in said(terminal, "/save")
    said(terminal, "Hello there.")
    for name in ("talk.md", "talk.jsonl"):
        assert "saved in " in said(terminal, f"/save {tmp_path / name}")
    assert "exists already" in said(terminal, f"/save {tmp_path / 'talk.md'}")
    assert "No such file" in said(terminal, f"/save {tmp_path / 'nowhere' / 'talk.md'}")
    line = json.loads((tmp_path / "talk.jsonl").read_text())
    assert line["id"] == "c"
    user, reply = line["messages"]
    assert user == {"role": "user", "content": "Hello there."}
    written = (tmp_path / "talk.md").read_text()
    assert written.startswith("# c\n\n## user\n\nHello there.\n\n## assistant\n\n")
    assert reply["content"].rstrip() in written


def test_several_settings_may_be_set_at_once(terminal: Terminal) -> None:
    lines = said(terminal, "/set temperature=0.7 top_p=0.9").splitlines()
    assert lines == [
        "temperature        0.7          (/set)",
        "top_p              0.9          (/set)",
    ]
    hot = said(terminal, "/set temperature=2.5")
    assert "[temperature 2.5 is very high" in hot
    assert "! /set: temperature must be a number in 0..100, not '-1'" in said(
        terminal, "/set temperature -1"
    )
    said(terminal, "/set temperature=0.7")
    assert "Did you mean temperature?" in said(terminal, "/set temprature 1")
    assert "! unknown command: /stat. Did you mean /stats?" in said(terminal, "/stat")
    assert "! unknown command: /xyzzy (try /help)" in said(terminal, "/xyzzy")
    assert said(terminal, "/set top_k = 7") == "top_k              7            (/set)"
    assert said(terminal, "/thinking") == "the last reply has no thinking"


def test_control_characters_in_a_user_message_are_shown_escaped(tmp_path: Path) -> None:
    arguments = ("chat", "--conversation=c", "--max-tokens=4", "-q", "a\x1b[2Jb")
    with Terminal(tmp_path / "data", *arguments, echo_seconds=0.0) as terminal:
        assert terminal.wait() == 0
    with Terminal(tmp_path / "data", "chat", "--conversation=c", echo_seconds=0.0) as terminal:
        terminal.read_until(PROMPT)
        terminal.type("/messages\n")
        shown = terminal.read_until(PROMPT)
        assert "\x1b[2J" not in shown
        assert "user: a␛[2Jb" in text_of(shown)


def test_help_names_every_command() -> None:
    source = Path(Commands.__init__.__code__.co_filename).read_text()
    names = {
        line.split('"')[1] for line in source.splitlines() if line.startswith('            "/')
    }
    assert len(names) > 12
    for name in names:
        assert name in HELP
    assert max(map(len, HELP.splitlines())) <= 80


def test_resending_a_turn_repeats_all_its_messages() -> None:
    call: Any = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    blank: dict[str, Any] = {field.name: None for field in fields(Message)} | {
        "text": "",
        "metadata": {},
    }
    turn = [
        Message(**{**blank, "role": "assistant", "tool_calls": (call,)}),
        Message(**{**blank, "role": "tool", "text": "Waves.", "tool_call_id": "c"}),
        Message(**{**blank, "role": "user", "text": "And?"}),
        Message(**{**blank, "role": "assistant", "text": "Sand.", "finish_reason": "stop"}),
    ]
    sent: list[object] = []
    commands = object.__new__(Commands)
    commands._talk = SimpleNamespace(  # type: ignore[assignment]
        sampling=SimpleNamespace(options={}),
        say=lambda messages: sent.extend(messages) or SimpleNamespace(text="Shells."),
    )
    assert commands._say_again(turn, [each.text for each in turn]) == "Shells."
    assert sent == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "Waves.", "tool_call_id": "c"},
        {"role": "user", "content": "And?"},
    ]
