"""Compute published figures by simulation, and compare them with the papers (scripts/reproduce_figures).

A folder gets all figures as one sheet and as tables: `figures.md` for people, and `figures.json` with the
curves. Nothing is measured on a GPU: the scheduler and the cache are the daemon's, and times come from
pensieve/sim/cost.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from pensieve.bench import plots
from pensieve.bench.plots import Sheet
from pensieve.errors import ConfigError, PensieveError
from scripts.paper_figures import (
    baton_paper,
    pensieve_paper,
    sarathi_capacity,
    sarathi_paper,
    tables,
)
from scripts.paper_figures.study import (
    ASSUMED,
    GPU,
    HOST_BYTES,
    KV_BYTES,
    QUICK,
    Extent,
    Line,
    Study,
)

FOLDER = Path("build/figures")
COLUMNS = 3  # columns of the sheet
FIGURES: dict[str, Callable[[Study], Iterator[Line]]] = {
    **pensieve_paper.FIGURES,
    "sarathi-9": lambda study: sarathi_capacity.capacities(study, "9"),
    "sarathi-10": lambda study: sarathi_capacity.capacities(study, "10"),
    "sarathi-11": sarathi_capacity.figure_11,
    "table-4": sarathi_paper.table_4,
    **baton_paper.FIGURES,
}


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        prog="scripts/reproduce_figures",
        description="Compute figures of the Pensieve, Sarathi-Serve and Baton papers by simulation: plots, "
        "and a table with the paper's numbers and ours, over several seeds. All figures take about an hour "
        "of an idle core, each of them one to seven minutes. The folder is written after each figure.",
    )
    command.add_argument(
        "folder", nargs="?", type=Path, default=FOLDER, help=f"output folder (default: {FOLDER})"
    )
    command.add_argument(
        "--figure",
        action="append",
        choices=list(FIGURES),
        help="only this figure; may be repeated (default: all)",
    )
    command.add_argument(
        "--seeds",
        type=int,
        metavar="N",
        help=f"number of runs per figure, with different conversations (default: {Extent().seeds})",
    )
    command.add_argument(
        "--seconds",
        type=float,
        metavar="N",
        help="measured time of each simulation (default: "
        f"{Extent().seconds:g}, or {Extent().grouped_seconds:g} for models whose query heads share KV)",
    )
    command.add_argument(
        "--quick",
        action="store_true",
        help="run for seconds only: every row, with one seed and too little time to be meaningful",
    )
    command.add_argument(
        "--svg", action="store_true", help="draw figures.svg (default: figures.png)"
    )
    command.add_argument("--json", action="store_true", help="print figures.json")
    return command


def run(arguments: argparse.Namespace) -> int:
    plots.matplotlib()
    began = time.monotonic()

    def progress(line: str) -> None:
        print(f"{time.monotonic() - began:5.0f} s  {line}", file=sys.stderr, flush=True)

    for assumption in ASSUMED:
        print(f"assumed: {assumption}", file=sys.stderr)
    study = Study(_extent(arguments), progress)
    lines: list[Line] = []
    for figure in arguments.figure or FIGURES:
        for line in FIGURES[figure](study):
            lines.append(line)
            paper = f"the paper: {line.paper}" if line.paper else "no number in the paper's text"
            progress(f"{line.figure}, {line.what}: {line.shown} ({paper})")
        _write(arguments, lines, study)  # keeps the results if a later figure is interrupted
    shown = arguments.folder / ("figures.json" if arguments.json else "figures.md")
    print(shown.read_text(encoding="utf-8"), end="")
    return 0


def _write(arguments: argparse.Namespace, lines: list[Line], study: Study) -> None:
    folder, quick = arguments.folder, arguments.quick
    written = json.dumps(tables.values(lines, study, quick), indent=1)
    table = "\n".join(tables.markdown(lines, study, quick))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "figures.json").write_text(written + "\n", encoding="utf-8")
        (folder / "figures.md").write_text(table + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}") from error
    if study.panels:
        sheet(study, quick).save(folder / ("figures.svg" if arguments.svg else "figures.png"))


def _extent(arguments: argparse.Namespace) -> Extent:
    extent = QUICK if arguments.quick else Extent()
    if arguments.seeds is not None:
        if arguments.seeds < 1:
            raise ConfigError("--seeds must be 1 or more")
        extent = replace(extent, seeds=arguments.seeds)
    if arguments.seconds is not None:
        if arguments.seconds <= 0:
            raise ConfigError("--seconds must be above 0")
        seconds = arguments.seconds
        extent = replace(extent, seconds=seconds, grouped_seconds=seconds)
    return extent


def sheet(study: Study, quick: bool) -> Sheet:
    """Draw every figure as a panel of one sheet."""
    seeds = study.extent.seeds
    lines = "first seed" if seeds == 1 else f"first of {seeds} seeds, the others thin"
    facts = [
        f"simulated, {GPU}: {KV_BYTES / 1e9:.0f} GB of KV and {HOST_BYTES / 1e9:.0f} GB of host memory each",
        "conversations like ShareGPT's",
        lines,
    ]
    too_short = "Too short to mean anything: figures" if quick else "Figures"
    made = Sheet(f"{too_short} of papers by simulation", facts, width=3.4)
    for number, panel in enumerate(study.panels):
        if number % COLUMNS == 0:
            made.row()
        drawn = made.panel(panel.title, panel.x, panel.y, most=panel.most)
        if panel.limit is not None:
            drawn.level(f"{panel.limit:g} ms", panel.limit)
        for label, points in panel.lines.items():
            drawn.line(label, [x for x, _ in points], [y for _, y in points])
            others = panel.repeats.get(label, [])
            drawn.traces(label, [([x for x, _ in each], [y for _, y in each]) for each in others])
    return made


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
