"""scripts/reproduce_figures: published figures played again on the virtual clock, beside what was published.

Into a folder go a plot of each figure, and all of it as a table: `figures.md` for people, `figures.json` with
the curves.  Nothing here is measured on a GPU: the scheduler and the cache are the daemon's, and time is what
sim/model.py says.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pensieve.bench import plots
from pensieve.errors import ConfigError, PensieveError
from pensieve.sim import figures
from pensieve.sim.figures import NOTES
from pensieve.sim.study import ASSUMED, QUICK, Extent, Line, Panel, Study

FOLDER = Path("build/figures")
HEADINGS = ("figure", "what", "paper", "ours", "aim")


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        prog="scripts/reproduce_figures",
        description="Plays figures of the Pensieve and Sarathi-Serve papers again by simulation: plots, and "
        "a table with the paper's number beside ours. About five minutes on an idle core.",
    )
    command.add_argument(
        "folder", nargs="?", type=Path, default=FOLDER, help=f"written there (default: {FOLDER})"
    )
    command.add_argument(
        "--quick",
        action="store_true",
        help="seconds: every row, from too short a time to mean anything",
    )
    command.add_argument("--svg", action="store_true", help="draw SVG (default: PNG)")
    command.add_argument("--json", action="store_true", help="print figures.json")
    return command


def run(arguments: argparse.Namespace) -> int:
    plots.matplotlib()
    began = time.monotonic()

    def told(line: str) -> None:
        print(f"{time.monotonic() - began:4.0f} s  {line}", file=sys.stderr, flush=True)

    for assumption in ASSUMED:
        print(f"assumed: {assumption}", file=sys.stderr)
    study = Study(QUICK if arguments.quick else Extent(), told)
    lines = []
    for line in figures.lines(study):
        lines.append(line)
        told(f"{line.figure}, {line.what}: {line.shown} ({_paper(line)})")
    suffix = ".svg" if arguments.svg else ".png"
    for panel in study.panels:
        _draw(panel, arguments.folder / f"{panel.name}{suffix}")
    written = json.dumps(_values(lines, study.panels, arguments.quick), indent=1)
    table = "\n".join(markdown(lines, arguments.quick)) + "\n"
    try:
        arguments.folder.mkdir(parents=True, exist_ok=True)
        (arguments.folder / "figures.json").write_text(written + "\n", encoding="utf-8")
        (arguments.folder / "figures.md").write_text(table, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write to {arguments.folder}: {error.strerror}") from error
    print(written if arguments.json else table, end="")
    return 0


def markdown(lines: Iterable[Line], quick: bool) -> Iterator[str]:
    if quick:
        yield "**Quick: too short to mean anything.**"
        yield ""
    yield "Simulated; the paper measured on GPUs. Assumed:"
    yield ""
    for assumption in ASSUMED:
        yield f"* {assumption}"
    yield ""
    yield f"| {' | '.join(HEADINGS)} |"
    yield "|" + "---|" * len(HEADINGS)
    shown = []
    for line in lines:
        ours = f"{line.shown} ({line.note})" if line.note else line.shown
        yield f"| {line.figure} | {line.what} | {line.paper or '-'} | {ours} | {line.aim or '-'} |"
        if line.figure not in shown:
            shown.append(line.figure)
    yield ""
    for figure in shown:
        if figure in NOTES:
            yield f"* {figure}: {NOTES[figure]}"


def _paper(line: Line) -> str:
    return f"the paper: {line.paper}" if line.paper else "no number in the paper's text"


def _values(lines: Iterable[Line], panels: Iterable[Panel], quick: bool) -> dict[str, Any]:
    return {
        "quick": quick,
        "assumed": list(ASSUMED),
        "rows": [
            {
                "figure": line.figure,
                "what": line.what,
                "paper": line.paper or None,
                "ours": line.ours,
                "shown": line.shown,
                "aim": line.aim or None,
                "note": line.note or None,
            }
            for line in lines
        ],
        "notes": NOTES,
        "curves": [
            {"name": each.name, "x": each.x, "y": each.y, "lines": each.lines} for each in panels
        ],
    }


def _draw(panel: Panel, path: Path) -> None:
    figure, drawn = plots.axes()
    for number, (label, points) in enumerate(panel.lines.items()):
        marker = "osD^v"[number % 5]
        drawn.plot(*zip(*points, strict=True) if points else ((), ()), marker=marker, label=label)
    if panel.limit is not None:
        drawn.axhline(
            panel.limit, color="grey", linestyle=":", label=f"{panel.limit:g} ms per token"
        )
    drawn.set(xlabel=panel.x, ylabel=panel.y, title=f"{panel.title} (simulated)")
    if panel.logarithmic:
        drawn.set_yscale("log")
    drawn.legend()
    plots.save(figure, path)


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        return run(arguments)
    except PensieveError as error:
        print(f"reproduce_figures: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
