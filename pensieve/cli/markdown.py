"""Blocks of a reply as rows of a terminal, by rich; and text without what a terminal would obey.

Every line of the reply stays a line (a model that writes a poem means that), HTML is text, links show where
they lead, and code stands between its fences so that it can be copied.  rich leaves colours out where
NO_COLOR is set.
"""

from __future__ import annotations

import io
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from pensieve.cli.reply_blocks import Block

CODE_THEME = "ansi_dark"  # the terminal's own colours, on its own background
CONTROL = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n\r"}  # as pictures
CONTROL |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def without_control(text: str) -> str:
    """The text with pictures in the place of control characters; lines and tabs stay."""
    return text.replace("\r\n", "\n").replace("\r", "\n").translate(CONTROL)


def rows_of(block: Block, width: int) -> list[str]:
    """How a block looks; none of the rows is wider than that."""
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
    rows = [row.rstrip() for row in capture.get().removesuffix("\n").split("\n")]
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

    class Left(Heading):
        """A heading at the left, without a box."""

        def __rich_console__(self, console: Any, options: Any) -> Any:
            self.text.justify = "left"
            yield self.text

    class ReplyMarkdown(Markdown):
        elements = {**Markdown.elements, "heading_open": Left}  # noqa: RUF012

        def __init__(self, text: str) -> None:
            super().__init__("", code_theme=CODE_THEME, hyperlinks=False)
            self.parsed = _parser().parse(text)
            for token in self.parsed:
                for child in token.children or ():
                    if child.type == "softbreak":
                        child.type = "hardbreak"

    return ReplyMarkdown


def _markdown(text: str) -> RenderableType:
    made: RenderableType = _markdown_class()(text)
    return made
