"""A model with random weights for the benchmarks."""

from __future__ import annotations

from pathlib import Path

import pytest

from pensieve.bench.random_model import RandomShape, make


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random-model")
    make(folder, RandomShape(2, 64, 2, 1, 128, 8000), context=1024)
    return folder
