"""A reply on a terminal looks the same, however its pieces arrive."""

from __future__ import annotations

import os
import random
import re

import pytest

from pensieve.cli.markdown import without_control
from pensieve.cli.reply_blocks import BLOCK_CHARACTERS_MAX, CODE_LINES_MAX, Blocks
from pensieve.cli.reply_view import LiveRows, ReplyView
from tests.cli.screen import TerminalScreen

REPLY = """# A title

Some *words* and **others** with `code`, a [link](http://x.y/z)
and a second line, <b>as it is</b>.

- one
- two **bold**
  - nested

  goes on
- three

1. first
2. second
```python
def f(x):
    return "a" + str(x)  # a comment

print(f(1))
```
| a | b |
|---|---|
| 1 | 2 |

> quoted
> twice

Underlined
======
---
Grüße, 日本, and an end without one: **bold
"""


class Shown:
    """A reply on an emulated screen."""

    def __init__(self, columns: int = 60, lines: int = 24) -> None:
        self.screen = TerminalScreen(columns, lines)
        self.num_written = 0
        self.seconds = 0.0
        size = os.terminal_size((columns, lines))
        self.view = ReplyView(self._write, lambda: size, lambda: self.seconds)

    def _write(self, text: str) -> None:
        self.num_written += len(text)
        self.screen.write(text)

    def push(self, text: str, kind: str = "text") -> None:
        self.seconds += 1.0
        self.view.push(text, kind)

    def whole(self, text: str) -> str:
        self.push(text)
        self.view.end()
        return self.screen.text


@pytest.fixture(autouse=True)
def colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")


def test_a_reply_is_shown_as_markdown() -> None:
    rows = Shown().whole(REPLY).split("\n")
    assert rows[:5] == [
        "A title",
        "",
        "Some words and others with code, a link (http://x.y/z)",
        "and a second line, <b>as it is</b>.",
        "",
    ]
    assert [row.strip() for row in rows[5:11]] == [
        *("• one", "• two bold", "• nested", "goes on", "• three", "")
    ]
    code = rows.index("```python")
    assert rows[code + 1 : code + 6] == [
        "def f(x):",
        '    return "a" + str(x)  # a comment',
        "",
        "print(f(1))",
        "```",
    ]
    assert "Underlined" in rows
    assert rows[-1] == "Grüße, 日本, and an end without one: **bold"


@pytest.mark.parametrize("columns", [20, 33, 60])
def test_a_reply_looks_the_same_however_it_is_split(columns: int) -> None:
    at_once = Shown(columns).whole(REPLY)
    for seed in range(12):
        draw, shown, left = random.Random(seed), Shown(columns), REPLY
        while left:
            size = draw.choice((1, 2, 3, 7, 40))
            shown.push(left[:size])
            left = left[size:]
        shown.view.end()
        assert shown.screen.text == at_once, seed


def test_the_output_of_a_long_reply_is_linear_in_its_text() -> None:
    """Each piece of the growing text is written once, and lines of code a few times."""
    words = "a word and another one, " * 400
    shown = Shown()
    for start in range(0, len(words), 12):
        shown.push(words[start : start + 12])
    shown.view.end()
    assert shown.num_written < 3 * len(words)
    assert shown.screen.text.replace("\n", " ").split() == words.split()
    code = "```c\n" + "int a = 1;\n" * 2000 + "```\n"
    blocks = Blocks()
    most = 0
    for start in range(0, len(code), 100):
        blocks.push(code[start : start + 100])
        most = max(most, len(blocks.open.text) if blocks.open else 0)
    assert most <= CODE_LINES_MAX * len("int a = 1;\n")
    blocks = Blocks()
    for _ in range(100):
        blocks.push("x" * 1000)
        assert blocks.open is None or len(blocks.open.text) <= BLOCK_CHARACTERS_MAX


def test_a_long_code_block_that_is_split_stays_one_block() -> None:
    lines = [f"line_{number} = {number}" for number in range(3 * CODE_LINES_MAX + 5)]
    code = "\n".join(["```python", *lines, "```", "and so on"])
    shown = Shown(lines=10)
    for start in range(0, len(code), 9):
        shown.push(code[start : start + 9])
    shown.view.end()
    assert shown.screen.text.split("\n") == ["```python", *lines, "```", "and so on"]


def test_an_unclosed_code_block_ends_with_the_reply() -> None:
    assert Shown().whole("```sh\nls") == "```sh\nls\n```"
    assert Shown().whole("```") == "```\n```"


def test_control_characters_reach_no_terminal() -> None:
    text = "a\x1b[2Jb\x07 `c\x9b31m` \x00d\r\ne\x7f"
    assert Shown().whole(text) == "a␛[2Jb␇ c\ufffd31m ␀d\ne␡"
    every = "".join(map(chr, range(0xA0)))
    kept = {each for each in without_control(every) if not each.isprintable()}
    assert kept == {"\t", "\n"}


def test_thinking_is_shown_while_it_streams_and_then_folded() -> None:
    shown = Shown(columns=40)
    for word in range(200):
        shown.push(f"word{word} ", "thinking")
    while_it_comes = shown.screen.text.split("\n")
    assert len(while_it_comes) == 3
    assert "word199" in while_it_comes[-1]
    shown.push("\n\nIt is **so**.")
    shown.view.end()
    assert shown.screen.text == "[thought: 200 words]\nIt is so."


def test_a_note_below_a_reply_disappears_but_a_cut_stays() -> None:
    shown = Shown()
    shown.push("Some **bold")
    shown.view.note("[waiting]")
    assert shown.screen.text == "Some **bold\n[waiting]"
    shown.view.note("")
    assert shown.screen.text == "Some **bold"
    shown.view.cut()
    shown.screen.write("[a notice]\n")
    shown.push(" and more")
    shown.view.end()
    assert shown.screen.text == "Some **bold\n[a notice]\nand more"


def test_code_continues_as_code_after_a_cut() -> None:
    shown = Shown()
    shown.push("```\nfirst *a*\n")
    shown.view.cut()
    shown.push("second *b*\n```\n*c*")
    shown.view.end()
    assert shown.screen.text.split("\n") == ["```", "first *a*", "second *b*", "```", "c"]


def test_no_color_turns_colours_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from pensieve.cli import markdown

    def written() -> str:
        markdown._console.cache_clear()
        pieces: list[str] = []
        view = ReplyView(pieces.append, lambda: os.terminal_size((60, 24)))
        view.push("a `b`\n```python\nimport os\n```\n", "text")
        view.end()
        return "".join(pieces)

    assert "\x1b[36m" in written()
    monkeypatch.setenv("NO_COLOR", "1")
    codes = {
        code for found in re.findall(r"\x1b\[([0-9;]*)m", written()) for code in found.split(";")
    }
    assert codes <= {"0", "1", "2", "3", "4", "9"}  # bold, dim and similar
    monkeypatch.delenv("NO_COLOR")
    markdown._console.cache_clear()


def test_only_changed_rows_are_rewritten() -> None:
    written: list[str] = []
    rows = LiveRows(written.append, lambda: 24)
    screen = TerminalScreen(40, 24)
    for shown in (["a"], ["ab"], ["ab", "c"], ["ab", "d", "e"], ["ab"], [], ["f", "g"], ["h"]):
        rows.show(shown)
        screen.write("".join(written))
        assert screen.text == "\n".join(shown)
        if shown == ["ab", "c"]:
            assert written == ["\nc"]
        written.clear()
    rows.keep()
    assert written == ["\n"]


def test_rows_that_scrolled_off_are_not_rewritten() -> None:
    screen = TerminalScreen(40, 4)
    rows = LiveRows(screen.write, lambda: 4)
    rows.show([f"old {number}" for number in range(8)])
    rows.show([f"new {number}" for number in range(9)])
    assert screen.rows == [f"old {n}" for n in range(4)] + [f"new {n}" for n in range(4, 9)]


CODE_WITHOUT_FENCES = """Here it is:
def fib(n):
    if __debug__ and n < 2:
\treturn n * 1 ** n

    return fib(n - 1)

1. In a list:

   for each in those:
       print(`each`)
   - nested
     with more
  two spaces
"""


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_code_without_fences_keeps_its_indentation_and_its_characters(size: int) -> None:
    shown = Shown()
    for first in range(0, len(CODE_WITHOUT_FENCES), size):
        shown.seconds += 1
        shown.view.push(CODE_WITHOUT_FENCES[first : first + size], "text")
    shown.view.end()
    assert shown.screen.text.splitlines() == [
        "Here it is:",
        "def fib(n):",
        "    if __debug__ and n < 2:",
        "    return n * 1 ** n",
        "",
        "    return fib(n - 1)",
        "",
        " 1 In a list:",
        "   for each in those:",
        "       print(`each`)",
        "    • nested",
        "      with more",
        "      two spaces",
    ]
