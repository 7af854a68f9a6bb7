"""The folder of the model that a bench measures, named or with random weights."""

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
    """The model in words."""
    return name or f"random weights {shape}"


@contextmanager
def measured_model(name: str, shape: str) -> Iterator[Path]:
    """The folder of the model named, or of one with random weights that is gone afterwards."""
    if name:
        yield resolve_model(name, progress)
        return
    if shape not in SHAPES:
        raise InvalidArgument("shape", f"is one of {', '.join(SHAPES)}")
    with tempfile.TemporaryDirectory(prefix="pensieve-bench-") as folder:
        progress(f"making random weights, {shape}")
        make(Path(folder), SHAPES[shape])
        yield Path(folder)
