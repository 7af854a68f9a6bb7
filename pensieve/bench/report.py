"""Report what a benchmark ran on, and its figures, as lines for people or as one JSON object."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pensieve.config.machine import num_cores, processor_name

if TYPE_CHECKING:
    from rich.console import RenderableType


class Report:
    """With `as_json`, lines go to standard error, and one JSON object goes to standard output."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self.facts: list[str] = []

    def about(self, *facts: str) -> None:
        """Print the model, machine and load, and keep them for the title of a plot."""
        known = [fact for fact in facts if fact]
        self.facts += known
        self.line(", ".join(known))

    def line(self, text: str) -> None:
        print(text, file=sys.stderr if self._as_json else sys.stdout, flush=True)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table: a name in the first column, numbers in the others. No output with `as_json`."""
        if self._as_json:
            return
        from rich import box
        from rich.table import Table

        table = Table(title=title, box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
        for index, name in enumerate(columns):
            table.add_column(name, justify="right" if index else "left")
        for row in rows:
            table.add_row(*row)
        print_whole(table)

    def finish(self, figures: Mapping[str, object]) -> None:
        if self._as_json:
            print(json.dumps(figures))


def print_whole(table: RenderableType) -> None:
    """Print a table without truncating words; if it is too wide, the terminal wraps it."""
    from rich.console import Console

    console = Console()
    unbounded = console.options.update(width=1_000_000)
    console.width = max(console.width, console.measure(table, options=unbounded).maximum)
    console.print(table)


def progress(text: str) -> None:
    """Print a progress line to standard error."""
    print(text, file=sys.stderr, flush=True)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that this share of the values does not exceed."""
    return sorted(values)[int(share * (len(values) - 1))]


def machine(device: str = "cpu") -> str:
    """Return the GPU's name, or the processor and the number of CPUs this process may use."""
    if device.startswith("cuda"):
        import torch

        return str(torch.cuda.get_device_name(device))
    count = num_cores()
    return f"{processor_name()}, {count} CPU{'s' * (count != 1)}"
