"""A store in a folder of its own, over each SQLite there is, with a clock that counts."""

from __future__ import annotations

import importlib
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pensieve.store import ConversationStore
from tests.store.faulty import world
from tests.store.talk import DRIVERS

MEMORY = Path("/dev/shm")  # these tests sync a lot, and what that costs is not their subject


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    if not os.access(MEMORY, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="pensieve-test-", dir=MEMORY) as path:
        yield Path(path)


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest) -> Any:
    return importlib.import_module(request.param)


@pytest.fixture
def open_store(tmp_path: Path, driver: Any) -> Iterator[Callable[..., ConversationStore]]:
    """Opens tmp_path/data; every store it gave out is closed in the end."""
    opened = []
    seconds = itertools.count(1000)

    def open_one(**options: Any) -> ConversationStore:
        options = {"driver": driver, "now": lambda: float(next(seconds)), **options}
        store = ConversationStore.open(tmp_path / "data", "pensieve test", **options)
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store: Callable[..., ConversationStore]) -> ConversationStore:
    return open_store()


@pytest.fixture
def folder(tmp_path: Path, driver: Any) -> Path:
    """A closed store that holds the small history of `world`."""
    with ConversationStore.open(tmp_path / "world", "test", driver=driver) as store:
        world(store)
    return tmp_path / "world"
