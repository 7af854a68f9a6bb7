"""Options that several benchmarks of `pensieve bench` have in common."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_model(parser: argparse.ArgumentParser, size: str) -> None:
    text = f"a folder or a hub id (default: random weights of {size})"
    parser.add_argument("model", nargs="?", default="", help=text)


def add_plot(parser: argparse.ArgumentParser, what: str) -> None:
    text = f"draw {what} (needs the extra `bench`)"
    parser.add_argument("--plot", type=Path, metavar="FILE", help=text)


def counts(text: str) -> tuple[int, ...]:
    """Parse a comma-separated list of whole numbers."""
    try:
        return tuple(int(each) for each in text.split(","))
    except ValueError:
        raise ValueError("must be whole numbers with commas between them") from None
