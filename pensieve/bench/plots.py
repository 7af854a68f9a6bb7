"""Draw a study as one sheet of panels with matplotlib, if it is installed.

A `Panel` is one pair of axes with its data. A `Sheet` has a title, the facts that a reader needs (model,
machine, load, seeds), and rows of panels. The sheet is laid out in inches before it is drawn; the width of a
text comes from its font. All panels show their data in the same style:

lines     each line has its own colour, marker, dashes and width. The first line is the widest, so lines that
          coincide are both visible. Colour-blind readers can tell the colours (Okabe and Ito) apart
names     up to `NAMES_AT_LINES_MAX` names are next to the ends of their lines, moved if they would overlap.
          More names become a legend. Names and legend are right of the axes and never cover data
repeats   a band or whiskers from the lowest to the highest value
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pensieve.bench.plot_scale import Numbers, Scale, inches, plain, scale_of, spread, wrap_lines
from pensieve.errors import ConfigError
from pensieve.extras import need

DOTS_PER_INCH = 150
TITLE_SIZE = 12.0  # points
TITLE_INCHES = 0.23  # height of a line of the title
X_LABEL_INCHES = 0.62  # for the ticks and the label of x
WIDTH_MIN = 6.4
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
MARKERS = "osD^vP"
DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (2, 1.2), (6, 2, 1.5, 2), (1, 1), (9, 3))
INK, FAINT = "#222222", "#777777"
NAMES_AT_LINES_MAX = 6
TEXT_SIZE, SMALL_SIZE = 9.0, 8.0  # points
LINE_INCHES = 0.165  # line height of text
LEFT, RIGHT, EDGE = 0.78, 0.25, 0.15  # inches around axes without names, and around the sheet
NAME_OFFSET = 0.28  # inches from the axes to the names of lines
LEGEND_INCHES = 0.19  # line height of a legend


@dataclass(frozen=True)
class _Name:
    text: str
    colour: str
    x: float
    y: float


@dataclass
class Panel:
    """One pair of axes. Its contents are drawn when the sheet is saved."""

    axes: Any
    title: str
    x: str
    y: str
    swept: Numbers = ()  # the swept values of x, which become its ticks
    most: float | None = None  # the upper end of y, such as 100 for a percentage
    y_group: str = ""  # panels with equal values share the scale of y; "": none
    height: float = 2.3
    left: float = LEFT
    num_lines: int = 0
    xs: list[float] = field(default_factory=list)
    ys: list[float] = field(default_factory=list)
    names: list[_Name] = field(default_factory=list)
    bar_values: list[tuple[float, int, str, str]] = field(default_factory=list)

    def line(
        self,
        name: str,
        xs: Numbers,
        ys: Numbers,
        least: Numbers = (),
        most: Numbers = (),
        *,
        marked: bool = True,
        step: bool = False,
    ) -> None:
        """Draw a line, and a band from the minimum to the maximum of its repeats."""
        index = self.num_lines % len(PALETTE)
        colour, width = PALETTE[index], max(3.2 - 0.5 * self.num_lines, 1.2)
        self.num_lines += 1
        drawn = self.axes.plot(
            *(xs, ys),
            color=colour,
            linewidth=width if len(xs) > 1 else 0,
            drawstyle="steps-post" if step else "default",
            label=name,
            zorder=3 + 0.1 * self.num_lines,
        )[0]
        if DASHES[index]:
            drawn.set_dashes(DASHES[index])
        if marked:
            size = max(8.5 - 1.1 * (self.num_lines - 1), 4)
            drawn.set(marker=MARKERS[index], markersize=size, markerfacecolor="white")
        if least and tuple(least) != tuple(most):
            if len(xs) > 1:
                self.axes.fill_between(xs, least, most, color=colour, alpha=0.16, linewidth=0)
            else:
                self.axes.vlines(xs, least, most, color=colour, linewidth=1)
        self._extend_ranges(xs, (*ys, *least, *most))
        ends = [(x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(y)]
        if ends and name:
            self.names.append(_Name(name, colour, *ends[-1]))

    def traces(self, name: str, lines: Iterable[tuple[Numbers, Numbers]]) -> None:
        """Draw each repeat of the named line as a thin line in its colour.

        For repeats with different values of x, from which no band can be drawn.
        """
        colour = next((each.colour for each in self.names if each.text == name), FAINT)
        for xs, ys in lines:
            self.axes.plot(xs, ys, color=colour, linewidth=0.8, alpha=0.55, zorder=2.5)
            self._extend_ranges(xs, ys)

    def area(self, name: str, xs: Numbers, low: Numbers, high: Numbers) -> None:
        index = self.num_lines % len(PALETTE)
        self.num_lines += 1
        self.axes.fill_between(xs, low, high, color=PALETTE[index], alpha=0.45, linewidth=0)
        self._extend_ranges(xs, high)
        ends = [(x, (a + b) / 2) for x, a, b in zip(xs, low, high, strict=True) if math.isfinite(b)]
        if ends:
            self.names.append(_Name(name, PALETTE[index], *ends[-1]))

    def horizontal_line(self, name: str, y: float) -> None:
        """Draw a horizontal reference line."""
        self.axes.axhline(y, color=FAINT, linewidth=1, linestyle=":", zorder=2)
        self._extend_ranges((), (y,))
        self.names.append(_Name(name, FAINT, math.inf, y))

    def vertical_line(self, x: float) -> None:
        """Draw a vertical line."""
        self.axes.axvline(x, color=FAINT, linewidth=1, linestyle=":", zorder=2)

    def bars(self, names: Sequence[str], values: Numbers, least: Numbers, most: Numbers) -> None:
        """Draw horizontal bars below each other, with values and the whiskers of their repeats."""
        for row, (name, value, low, high) in enumerate(
            zip(names, values, least, most, strict=True)
        ):
            colour = PALETTE[row % len(PALETTE)]
            self.axes.barh(row, value, height=0.62, color=colour, alpha=0.75, zorder=2)
            text = plain(value)
            if low < high:
                self.axes.hlines(row, low, high, color=INK, linewidth=1.4, zorder=3)
                self.axes.plot([low, high], [row, row], "|", color=INK, markersize=7, zorder=3)
                text += f" ({plain(low)} to {plain(high)})"
            self.bar_values.append((max(value, high), row, text, name))
        self.height = 0.32 * len(names) + 0.15
        self.left = max(inches(name, SMALL_SIZE) for name in names) + 0.25
        self._extend_ranges([0.0, *most], ())

    def _extend_ranges(self, xs: Iterable[float], ys: Iterable[float]) -> None:
        self.xs.extend(xs)
        self.ys.extend(ys)

    @property
    def has_names_at_lines(self) -> bool:
        """Whether names are next to the ends of their lines, and not in a legend."""
        return self.num_lines <= NAMES_AT_LINES_MAX

    @property
    def right(self) -> float:
        """Inches to the right of the axes, for the names or the legend."""
        if not self.names:
            return RIGHT
        widest = max(inches(name.text, SMALL_SIZE) for name in self.names)
        if self.has_names_at_lines:
            return NAME_OFFSET + widest + EDGE
        columns = math.ceil(len(self.names) / self._legend_rows)
        return columns * (widest + 0.55) + EDGE

    @property
    def _legend_rows(self) -> int:
        return max(int(self.height / LEGEND_INCHES), 1)

    def finish(self, width: float) -> None:
        """Set scales, ticks and names for axes of this width in inches."""
        self.axes.tick_params(labelsize=SMALL_SIZE, colors=INK, length=3, which="major")
        self.axes.spines[["top", "right"]].set_visible(False)
        self.axes.set_axisbelow(True)
        if self.bar_values:
            self._finish_bars(width)
            return
        x = scale_of(self.xs, self.swept)
        y = scale_of(self.ys, most=self.most)
        self._set_scale(self.axes.xaxis, x)
        self._set_scale(self.axes.yaxis, y)
        self.axes.set_xlim(x.least, x.most)
        self.axes.set_ylim(y.least, y.most)
        self.axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        self._set_label(self.axes.set_xlabel, self.x, x, width + self.left / 2)
        self._set_label(self.axes.set_ylabel, self.y, y, self.height + 0.4)
        if self.has_names_at_lines:
            self._write_names(x, y, width)
        else:
            self.axes.legend(
                loc="upper left",
                bbox_to_anchor=(1.01, 1.02),
                frameon=False,
                fontsize=SMALL_SIZE,
                ncols=math.ceil(len(self.names) / self._legend_rows),
                borderaxespad=0.0,
            )

    def _finish_bars(self, width: float) -> None:
        widest = max(inches(text, SMALL_SIZE) for _, _, text, _ in self.bar_values)
        most = max((end for end, *_ in self.bar_values), default=0.0) or 1.0
        scale = scale_of([most])
        scale.most = most / max(1 - (widest + 0.12) / width, 0.3)
        self.axes.set_xlim(0.0, scale.most)
        self._set_scale(self.axes.xaxis, scale)
        self.axes.set_yticks([row for _, row, _, _ in self.bar_values])
        self.axes.set_yticklabels([name for *_, name in self.bar_values])
        self.axes.invert_yaxis()
        self.axes.set_xlabel(self.x, fontsize=TEXT_SIZE, color=INK)
        gap = 0.06 / width * scale.most
        for end, row, text, _ in self.bar_values:
            self.axes.text(end + gap, row, text, fontsize=SMALL_SIZE, color=INK, va="center")

    def _set_scale(self, axis: Any, scale: Scale) -> None:
        from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

        if scale.logarithmic:
            (self.axes.set_xscale if axis is self.axes.xaxis else self.axes.set_yscale)("log")
        if scale.ticks is not None:
            axis.set_major_locator(FixedLocator(scale.ticks))
        else:
            axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))

    def _set_label(self, set_text: Any, text: str, scale: Scale, width: float) -> None:
        label = f"{text}, logarithmic" if scale.logarithmic else text
        set_text("\n".join(wrap_lines(label, TEXT_SIZE, width)), fontsize=TEXT_SIZE, color=INK)

    def _write_names(self, x: Scale, y: Scale, width: float) -> None:
        ends = [y.share(name.y) * self.height for name in self.names]
        for name, place in zip(self.names, spread(ends, LINE_INCHES, self.height), strict=True):
            at = min(name.x, x.most)
            self.axes.annotate(
                name.text,
                xy=(at, name.y),
                xytext=(1 + NAME_OFFSET / width, place / self.height),
                textcoords="axes fraction",
                va="center",
                fontsize=SMALL_SIZE,
                color=name.colour,
                annotation_clip=False,
                arrowprops={
                    "arrowstyle": "-",
                    "color": name.colour,
                    "linewidth": 0.7,
                    "alpha": 0.7,
                    "shrinkA": 1,
                    "shrinkB": 3,
                },
            )


def matplotlib() -> None:
    """Raise an error that says how to install matplotlib, if it is missing."""
    need("bench", "matplotlib", "--plot")


class Sheet:
    """All panels of a study, saved as one file."""

    def __init__(self, title: str, facts: Iterable[str], width: float = 3.6) -> None:
        matplotlib()
        from matplotlib.figure import Figure

        self.title = title
        self.facts = [fact for fact in facts if fact]
        self.figure = Figure(dpi=DOTS_PER_INCH, facecolor="white")
        self._width = width  # inches, of the axes of each panel
        self._rows: list[tuple[str, list[Panel]]] = []

    def row(self, heading: str = "") -> None:
        """Begin a new row of panels."""
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
        """Set the positions of all texts and panels."""
        for group in {panel.y_group for panel in self.panels if panel.y_group}:
            members = [panel for panel in self.panels if panel.y_group == group]
            values = [value for panel in members for value in panel.ys]
            for panel in members:
                panel.ys = values
        columns = max(len(panels) for _, panels in self._rows)
        by_column = [
            [panels[index] for _, panels in self._rows if index < len(panels)]
            for index in range(columns)
        ]
        lefts = [max(panel.left for panel in panels) for panels in by_column]
        rights = [max(panel.right for panel in panels) for panels in by_column]
        margins = sum(lefts) + sum(rights) + 2 * EDGE
        width = max(self._width, (WIDTH_MIN - margins) / columns)
        total = margins + columns * width
        title = wrap_lines(self.title, TITLE_SIZE, total - 2 * EDGE, bold=True)
        facts = wrap_lines(" · ".join(self.facts), TEXT_SIZE, total - 2 * EDGE)
        head = TITLE_INCHES * len(title) + LINE_INCHES * len(facts) + 0.25
        plans = []
        for heading, panels in self._rows:
            titles = [
                wrap_lines(panel.title, TEXT_SIZE, width + rights[index], bold=True)
                for index, panel in enumerate(panels)
            ]
            title_inches = LINE_INCHES * max(map(len, titles)) + 0.14 + (0.3 if heading else 0.0)
            plans.append((title_inches, max(panel.height for panel in panels), titles))
        rows_inches = sum(above + tall + X_LABEL_INCHES for above, tall, _ in plans)
        height = head + rows_inches + EDGE / 2
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
        for (heading, panels), (title_inches, panel_inches, titles) in zip(
            self._rows, plans, strict=True
        ):
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
                bottom = top - title_inches - panel.height
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
            top -= title_inches + panel_inches + X_LABEL_INCHES

    def save(self, path: Path) -> Path:
        self.lay_out()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.figure.savefig(path, dpi=DOTS_PER_INCH)
        except OSError as error:
            raise ConfigError(f"cannot draw {path}: {error.strerror or error}") from error
        except ValueError as error:  # the file name has an unknown extension
            raise ConfigError(f"cannot draw {path}: {error}") from error
        return path
