"""Render the blocks of a reply as rows of a terminal, and make control characters harmless.

Unlike in standard Markdown, line breaks and indentation are kept, because poems and code without fences need
both. HTML is shown as text, links show their target, and code keeps its fences so that it can be copied. rich
uses no colours if NO_COLOR is set.
"""

from __future__ import annotations

import io
import re
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from pensieve.cli.reply_blocks import Block

CODE_THEME = "ansi_dark"  # the terminal's own colours and background
TAB_COLUMNS = CODE_COLUMNS = 4  # a line with this indentation is code in Markdown
# One space is no indentation: if a notice interrupts a line, the rest of the line may begin with a space.
INDENT_COLUMNS_MIN = 2
INDENT = "\ue000"  # placeholder for a leading space, which Markdown would drop
ITEM = re.compile(r"(?:[-*+]|\d{1,9}[.)])(?: |$)")
STARTS_BLOCK = re.compile(r"[>|]|#{1,6}(?: |$)|(?:-+|=+)\s*$")
PUNCTUATION = re.compile(r"([!-/:-@\[-`{-~])")  # to escape with a backslash in plain text
CONTROL = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n\r"}  # symbols
CONTROL |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def without_control(text: str) -> str:
    """Replace control characters by visible symbols. Tabs stay, and each line break becomes a newline."""
    return text.replace("\r\n", "\n").replace("\r", "\n").translate(CONTROL)


def rows_of(block: Block, width: int) -> list[str]:
    """Return the rows of a block, none of them wider than `width`."""
    rows = _rows(_markdown(block.text), width) if not block.is_code else _code_rows(block, width)
    return ["", *rows] if block.gap else rows


def dim_rows(text: str, width: int) -> list[str]:
    from rich.text import Text

    return _rows(Text(text, style="dim"), width)


def _code_rows(block: Block, width: int) -> list[str]:
    from rich.syntax import Syntax

    rows = dim_rows(f"```{block.language}", width) if block.opens else []
    if block.text:
        language = (block.language.split() or ["text"])[0]
        code = Syntax(
            block.text, language, theme=CODE_THEME, background_color="default", word_wrap=True
        )
        rows += _rows(code, width, strip=False)
    return rows + (dim_rows("```", width) if block.closes else [])


def _rows(renderable: RenderableType, width: int, strip: bool = True) -> list[str]:
    console = _console(width)
    with console.capture() as capture:
        console.print(renderable)
    text = capture.get().removesuffix("\n").replace(INDENT, " ")
    rows = [row.rstrip() for row in text.split("\n")]
    while strip and rows and not rows[-1]:
        rows.pop()
    while strip and rows and not rows[0]:
        rows.pop(0)
    return rows


@lru_cache(4)
def _console(width: int) -> Console:
    from rich.console import Console
    from rich.theme import Theme

    return Console(
        file=io.StringIO(),
        force_terminal=True,
        width=width,
        markup=False,
        emoji=False,
        highlight=False,
        legacy_windows=False,
        theme=Theme({"markdown.code": "cyan", "markdown.h1": "bold underline"}),
    )


@cache
def _parser() -> Any:
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])


@cache
def _markdown_class() -> Any:
    from rich.markdown import Heading, Markdown

    class LeftHeading(Heading):
        """A heading at the left, without a frame."""

        def __rich_console__(self, console: Any, options: Any) -> Any:
            self.text.justify = "left"
            yield self.text

    class ReplyMarkdown(Markdown):
        elements = {**Markdown.elements, "heading_open": LeftHeading}  # noqa: RUF012

        def __init__(self, text: str) -> None:
            super().__init__("", code_theme=CODE_THEME, hyperlinks=False)
            self.parsed = _parser().parse(text)
            for token in self.parsed:
                for child in token.children or ():
                    if child.type == "softbreak":
                        child.type = "hardbreak"

    return ReplyMarkdown


def _markdown(text: str) -> RenderableType:
    made: RenderableType = _markdown_class()(_with_indentation(text))
    return made


def _with_indentation(text: str) -> str:
    """Mark the indentation that Markdown would drop. Lines that are indented like code are shown verbatim."""
    lines = []
    offset = 0  # column where the text of the current list item begins
    for line in text.split("\n"):
        rest = line.lstrip(" \t")
        column = len(line[: len(line) - len(rest)].expandtabs(TAB_COLUMNS))
        indent = max(column - offset, 0)
        if indent < CODE_COLUMNS and (item := ITEM.match(rest)):
            offset = column + len(item[0])
        elif (
            rest
            and indent >= INDENT_COLUMNS_MIN
            and not (indent < CODE_COLUMNS and STARTS_BLOCK.match(rest))
        ):
            shown = PUNCTUATION.sub(r"\\\1", rest) if indent >= CODE_COLUMNS else rest
            line = " " * (column - indent) + INDENT * indent + shown
        lines.append(line)
    return "\n".join(lines)
