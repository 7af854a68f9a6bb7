"""Print the tables and figures of the papers, the papers' numbers beside ours (scripts/paper).

Most rows are simulated: the scheduler and the cache are the daemon's, and times come from
pensieve/sim/cost.py.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

from pensieve.errors import ConfigError, PensieveError
from scripts.measurements.machine_options import Progress
from scripts.papers import batchllm, batchmaker, baton, fluidinfer, pensieve, sarathi
from scripts.papers.claims import NO_VERDICT, VERDICTS
from scripts.papers.rows import QUICK, Extent, Figure, Row

# The registry. Each figure is a function of its extent that yields rows; a paper is a dict of such functions.
PAPERS = {
    "Pensieve": pensieve.FIGURES,
    "Sarathi-Serve": sarathi.FIGURES,
    "Baton": baton.FIGURES,
    "FluidInfer": fluidinfer.FIGURES,
    "BatchLLM": batchllm.FIGURES,
    "BatchMaker": batchmaker.FIGURES,
}
FIGURES: dict[str, tuple[str, Figure]] = {
    name: (paper, figure) for paper, figures in PAPERS.items() for name, figure in figures.items()
}
# These take longest, so they begin first: then no core is idle at the end.
LONGEST = ("sarathi-10", "sarathi-9", "fluidinfer-opt-125m", "fluidinfer", "pensieve-3.12b")


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        prog="scripts/paper",
        description="Print tables and figures of the papers: the paper's number, ours, a verdict "
        "computed from both, and the reason. Most rows are simulated.",
    )
    command.add_argument(
        "figure",
        nargs="+",
        choices=["all", *FIGURES],
        metavar="FIGURE",
        help="all, or " + ", ".join(FIGURES),
    )
    command.add_argument(
        "--quick",
        action="store_true",
        help="one seed and short simulations: at most 20 minutes on two cores",
    )
    command.add_argument(
        "--seeds",
        type=int,
        metavar="N",
        help=f"loads per row (default: {Extent().seeds}, quick: {QUICK.seeds})",
    )
    command.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="processes (default: one per core)"
    )
    command.add_argument(
        "--json", type=Path, metavar="FILE", help="write the rows to this file, too"
    )
    return command


def run(arguments: argparse.Namespace) -> int:
    extent = QUICK if arguments.quick else Extent()
    if arguments.seeds is not None:
        if arguments.seeds < 1:
            raise ConfigError("--seeds must be 1 or more")
        extent = replace(extent, seeds=arguments.seeds)
    names = list(FIGURES) if "all" in arguments.figure else list(dict.fromkeys(arguments.figure))
    found: dict[str, list[Row]] = {}
    rows: list[Row] = []
    progress = Progress()
    with ProcessPoolExecutor(arguments.jobs) as pool:
        tasks = {pool.submit(rows_of, name, extent): name for name in sorted(names, key=_place)}
        for task in as_completed(tasks):
            name = tasks[task]
            found[name], seconds = task.result()
            progress(f"{name}: {len(found[name])} rows in {seconds:.0f} s")
            rows = [row for each in names for row in found.get(each, ())]
            if arguments.json is not None:
                _write(arguments.json, rows)
    print("\n".join(table(rows)))
    return 0


def _place(name: str) -> int:
    return next((i for i, each in enumerate(LONGEST) if name.startswith(each)), len(LONGEST))


def _write(path: Path, rows: list[Row]) -> None:
    """Write the rows so far, so that an interrupted run keeps them."""
    written = json.dumps([values_of(row) for row in rows], indent=1)
    try:
        path.write_text(written + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def rows_of(name: str, extent: Extent) -> tuple[list[Row], float]:
    """Return a figure's rows and the seconds that they took."""
    began, (paper, figure) = time.monotonic(), FIGURES[name]
    rows = [replace(row, figure=f"{paper}, {row.figure}") for row in figure(extent)]
    return rows, time.monotonic() - began


def table(rows: list[Row]) -> Iterable[str]:
    """Yield a Markdown table."""
    yield "| figure | what | paper | ours | verdict | reason |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        cells = (row.figure, row.name, row.paper.shown, row.ours_shown, row.verdict, row.reason)
        yield f"| {' | '.join(cells)} |"
    counts = Counter(row.verdict for row in rows)
    yield ""
    yield f"{len(rows)} rows: " + ", ".join(
        f"{counts[each]} {'without a claim of the paper' if each == NO_VERDICT else each}"
        for each in VERDICTS
    )


def values_of(row: Row) -> dict[str, Any]:
    return {
        "figure": row.figure,
        "name": row.name,
        "paper": None if row.paper.is_empty else row.paper.shown,
        "ours": row.ours_shown,
        "by_seed": row.ours,
        "verdict": row.verdict,
        "reason": row.reason,
    }


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        return run(arguments)
    except PensieveError as error:
        print(f"paper: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
