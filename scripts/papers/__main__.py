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
from scripts.papers import batchllm, batchmaker, baton, fluidinfer, pensieve, sarathi
from scripts.papers.rows import (
    NO_CLAIM,
    NOT_REPRODUCED,
    QUICK,
    REPRODUCED,
    SAME_SHAPE,
    Extent,
    Figure,
    Row,
)

# The registry. Each figure is a function of its extent that yields rows; a paper is a dict of such functions.
FIGURES: dict[str, Figure] = {
    **pensieve.FIGURES,
    **sarathi.FIGURES,
    **baton.FIGURES,
    **fluidinfer.FIGURES,
    **batchllm.FIGURES,
    **batchmaker.FIGURES,
}
# These take longest, so they begin first: then no core is idle at the end.
LONGEST = ("sarathi-10", "sarathi-9", "fluidinfer-opt-125m", "fluidinfer", "pensieve-3.12b")
VERDICTS = (REPRODUCED, SAME_SHAPE, NOT_REPRODUCED, NO_CLAIM)


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
    began = time.monotonic()
    found: dict[str, list[Row]] = {}
    with ProcessPoolExecutor(arguments.jobs) as pool:
        tasks = {pool.submit(rows_of, name, extent): name for name in sorted(names, key=_place)}
        for task in as_completed(tasks):
            name = tasks[task]
            found[name], seconds = task.result()
            took = f"{time.monotonic() - began:5.0f} s  {name}: {len(found[name])} rows in {seconds:.0f} s"
            print(took, file=sys.stderr, flush=True)
            if arguments.json is not None:
                _write(arguments.json, _in_order(names, found))
    print("\n".join(table(_in_order(names, found))))
    return 0


def _place(name: str) -> int:
    return next((i for i, each in enumerate(LONGEST) if name.startswith(each)), len(LONGEST))


def _in_order(names: list[str], found: dict[str, list[Row]]) -> list[Row]:
    return [row for name in names if name in found for row in found[name]]


def _write(path: Path, rows: list[Row]) -> None:
    """Write the rows so far, so that an interrupted run keeps them."""
    written = json.dumps([values_of(row) for row in rows], indent=1)
    try:
        path.write_text(written + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def rows_of(name: str, extent: Extent) -> tuple[list[Row], float]:
    """Return a figure's rows and the seconds that they took."""
    began = time.monotonic()
    return list(FIGURES[name](extent)), time.monotonic() - began


def table(rows: list[Row]) -> Iterable[str]:
    """Yield a Markdown table."""
    yield "| figure | what | paper | ours | verdict | reason |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        cells = (row.figure, row.name, row.paper_shown, row.ours_shown, row.verdict, row.reason)
        yield f"| {' | '.join(cells)} |"
    counts = Counter(row.verdict for row in rows)
    yield ""
    yield f"{len(rows)} rows: " + ", ".join(
        f"{counts[each]} {'without a claim of the paper' if each == NO_CLAIM else each}"
        for each in VERDICTS
    )


def values_of(row: Row) -> dict[str, Any]:
    return {
        "figure": row.figure,
        "name": row.name,
        "paper": None if row.paper is None else row.paper_shown,
        "ours": row.ours_shown,
        "by_seed": list(row.ours.values),
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
