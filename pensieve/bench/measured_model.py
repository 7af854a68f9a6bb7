"""Find or make the model that a benchmark measures."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pensieve.bench.random_model import SHAPES, make
from pensieve.bench.report import progress
from pensieve.errors import InvalidArgument
from pensieve.launch.model_folder import resolve_model


def model_in_words(name: str, shape: str) -> str:
    """Return the model's name, or a description of the random weights."""
    return name or f"random weights {shape}"


@contextmanager
def measured_model(name: str, shape: str) -> Iterator[Path]:
    """Yield the folder of the named model, or of a temporary model with random weights."""
    if name:
        yield resolve_model(name, progress)
        return
    if shape not in SHAPES:
        raise InvalidArgument("shape", f"must be one of {', '.join(SHAPES)}")
    with tempfile.TemporaryDirectory(prefix="pensieve-bench-") as folder:
        progress(f"making random weights, {shape}")
        make(Path(folder), SHAPES[shape])
        yield Path(folder)
