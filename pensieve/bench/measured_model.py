"""The model that a bench measures: one that is named, or one with random weights."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pensieve.bench.random_model import SHAPES, make
from pensieve.errors import InvalidArgument
from pensieve.launch.engine import resolve_model


@contextmanager
def measured_model(name: str, shape: str) -> Iterator[Path]:
    """The folder of the model named, or of one with random weights that is gone afterwards."""
    if name:
        yield resolve_model(name)
        return
    if shape not in SHAPES:
        raise InvalidArgument("shape", f"is one of {', '.join(SHAPES)}")
    with tempfile.TemporaryDirectory(prefix="pensieve-bench-") as folder:
        print(f"making random weights, {shape}", file=sys.stderr, flush=True)
        make(Path(folder), SHAPES[shape])
        yield Path(folder)
