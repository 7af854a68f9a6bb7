"""Draws a study as one sheet of panels with matplotlib, if it is installed.

A `Sheet` has a title, the facts without which a figure says nothing (model, machine, load, seeds), and
panels in rows (plot_panel.py).  Everything is laid out in inches before it is drawn: a text's width comes
from its font.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pensieve.bench.plot_panel import (
    EDGE,
    FAINT,
    INK,
    LINE_INCHES,
    PALETTE,
    TEXT_SIZE,
    Panel,
)
from pensieve.bench.plot_scale import wrapped
from pensieve.errors import ConfigError
from pensieve.extras import need

DOTS_PER_INCH = 150
TITLE_SIZE = 12.0  # points
TITLE_INCHES = 0.23  # of a line of the title
BELOW = 0.62  # inches, for ticks and label of x
WIDTH_MIN = 6.4


def matplotlib() -> None:
    """Make sure of it."""
    need("bench", "matplotlib", "--plot")


class Sheet:
    """All panels of a study, to be saved as one file."""

    def __init__(self, title: str, facts: Iterable[str], width: float = 3.6) -> None:
        matplotlib()
        from matplotlib.figure import Figure

        self.title = title
        self.facts = [fact for fact in facts if fact]
        self.figure = Figure(dpi=DOTS_PER_INCH, facecolor="white")
        self._width = width  # of each panel's axes, inches
        self._rows: list[tuple[str, list[Panel]]] = []

    def row(self, heading: str = "") -> None:
        """What follows begins a new row."""
        self._rows.append((heading, []))

    def panel(self, title: str, x: str, y: str = "", **options: Any) -> Panel:
        if not self._rows:
            self.row()
        panel = Panel(self.figure.add_axes((0, 0, 1, 1)), title, x, y, **options)
        self._rows[-1][1].append(panel)
        return panel

    @property
    def panels(self) -> list[Panel]:
        return [panel for _, panels in self._rows for panel in panels]

    def lay_out(self) -> None:
        """Gives every text and every panel its place."""
        for alike in {panel.alike for panel in self.panels if panel.alike}:
            same = [panel for panel in self.panels if panel.alike == alike]
            values = [value for panel in same for value in panel.ys]
            for panel in same:
                panel.ys = values
        columns = max(len(panels) for _, panels in self._rows)
        by_column = [
            [panels[index] for _, panels in self._rows if index < len(panels)]
            for index in range(columns)
        ]
        lefts = [max(panel.left for panel in panels) for panels in by_column]
        rights = [max(panel.right for panel in panels) for panels in by_column]
        around = sum(lefts) + sum(rights) + 2 * EDGE
        width = max(self._width, (WIDTH_MIN - around) / columns)
        total = around + columns * width
        title = wrapped(self.title, TITLE_SIZE, total - 2 * EDGE, bold=True)
        facts = wrapped(" · ".join(self.facts), TEXT_SIZE, total - 2 * EDGE)
        head = TITLE_INCHES * len(title) + LINE_INCHES * len(facts) + 0.25
        plans = []
        for heading, panels in self._rows:
            titles = [
                wrapped(panel.title, TEXT_SIZE, width + rights[index], bold=True)
                for index, panel in enumerate(panels)
            ]
            above = LINE_INCHES * max(map(len, titles)) + 0.14 + (0.3 if heading else 0.0)
            plans.append((above, max(panel.height for panel in panels), titles))
        height = head + sum(above + tall + BELOW for above, tall, _ in plans) + EDGE / 2
        self.figure.set_size_inches(total, height)
        top = height - EDGE
        for lines, size, weight, colour, step in (
            (title, TITLE_SIZE, "bold", INK, TITLE_INCHES),
            (facts, TEXT_SIZE, "normal", FAINT, LINE_INCHES),
        ):
            for line in lines:
                self.figure.text(
                    *(EDGE / total, top / height, line),
                    fontsize=size,
                    weight=weight,
                    color=colour,
                    va="top",
                )
                top -= step
        top = height - head
        for (heading, panels), (above, tall, titles) in zip(self._rows, plans, strict=True):
            if heading:
                self.figure.text(
                    *(EDGE / total, (top - 0.04) / height, heading),
                    fontsize=TEXT_SIZE + 1,
                    weight="bold",
                    color=PALETTE[0],
                    va="top",
                )
            left = EDGE
            for index, panel in enumerate(panels):
                left += lefts[index]
                bottom = top - above - panel.height
                panel.axes.set_position(
                    (left / total, bottom / height, width / total, panel.height / height)
                )
                panel.axes.set_title(
                    "\n".join(titles[index]),
                    loc="left",
                    fontsize=TEXT_SIZE,
                    weight="bold",
                    color=INK,
                    pad=6,
                )
                panel.finish(width)
                left += width + rights[index]
            top -= above + tall + BELOW

    def save(self, path: Path) -> Path:
        self.lay_out()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.figure.savefig(path, dpi=DOTS_PER_INCH)
        except OSError as error:
            raise ConfigError(f"cannot draw {path}: {error.strerror or error}") from error
        except ValueError as error:  # an ending that is no format
            raise ConfigError(f"cannot draw {path}: {error}") from error
        return path
