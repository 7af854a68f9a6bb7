"""Tiny checkpoints, saved and loaded once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pensieve.model.loader import LoadedModel, load
from tests.models import SERVED, save_tiny


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Use one thread: a second thread only slows such small models down."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives the checkpoint of a served family."""
    folders: dict[str, Path] = {}

    def folder_of(family: str) -> Path:
        if family not in folders:
            folders[family] = save_tiny(SERVED[family](), tmp_path_factory.mktemp(family))
        return folders[family]

    return folder_of


@pytest.fixture(scope="session")
def loaded(folder_of: Callable[[str], Path]) -> Callable[[str], LoadedModel]:
    """Return a function that loads a served family with our attention."""
    models: dict[str, LoadedModel] = {}

    def loaded(family: str) -> LoadedModel:
        if family not in models:
            models[family] = load(folder_of(family))
        return models[family]

    return loaded
