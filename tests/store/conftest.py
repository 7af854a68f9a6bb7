"""A store in a temporary folder, over each available SQLite driver and PostgreSQL, with a counting clock.

A test that uses `store` or `open_store` runs on all databases. The mark `sqlite` limits a test to SQLite,
because the test uses SQLite's own files. The first test that needs PostgreSQL starts the server. Without a
server, those tests are skipped.
"""

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
from pensieve.store.connection import preferred_driver
from pensieve.store.shared_file import SHARED_SQLITE_MIN
from tests.store import postgres_server
from tests.store.faulty import write_history
from tests.store.postgres_server import PostgresServer
from tests.store.talk import DRIVERS

MEMORY = Path("/dev/shm")  # these tests sync often, and do not measure syncs


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    if not os.access(MEMORY, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="pensieve-test-", dir=MEMORY) as path:
        yield Path(path)


POSTGRES = "postgres"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrized = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "driver" not in metafunc.fixturenames or any("driver" in names for names in parametrized):
        return
    is_sqlite_only = any(metafunc.definition.iter_markers("sqlite"))
    runs_on_postgres = "open_store" in metafunc.fixturenames and not is_sqlite_only
    drivers = DRIVERS + [POSTGRES] * runs_on_postgres
    metafunc.parametrize("driver", drivers, indirect=True)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """The server for all tests of one process. Tests that stop or kill a server start their own."""
    if problem := postgres_server.missing():
        pytest.skip(problem)
    server = PostgresServer(MEMORY if os.access(MEMORY, os.W_OK) else None)
    try:
        server.initialise()
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def driver(request: pytest.FixtureRequest) -> Any:
    """The store's driver: a SQLite driver, or None for PostgreSQL."""
    return None if request.param == POSTGRES else importlib.import_module(request.param)


@pytest.fixture
def url(request: pytest.FixtureRequest, driver: Any) -> Iterator[str]:
    """The URL of a new PostgreSQL database, or "" for SQLite."""
    if driver is not None:
        yield ""
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    made = server.new_database()
    yield made
    server.drop(made)


@pytest.fixture
def open_store(tmp_path: Path, driver: Any, url: str) -> Iterator[Callable[..., ConversationStore]]:
    """Return a function that opens tmp_path/data, or the PostgreSQL database. Close all stores at the end."""
    opened: list[ConversationStore] = []
    seconds = itertools.count(1000)

    def open_one(**options: Any) -> ConversationStore:
        given = {"driver": driver, "now": lambda: float(next(seconds)), "url": url}
        store = ConversationStore.open(tmp_path / "data", "pensieve test", **{**given, **options})
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store: Callable[..., ConversationStore]) -> ConversationStore:
    return open_store()


@pytest.fixture(params=["sqlite", "postgres"])
def start(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Callable[..., ConversationStore]]:
    """Return a function that opens the store of a daemon. All daemons share a history."""
    opened: list[ConversationStore] = []
    server: PostgresServer | None = None
    url = f"sqlite://{tmp_path / 'history.db'}"
    if request.param == "postgres":
        server = request.getfixturevalue("postgres")
        url = server.new_database()
    elif preferred_driver.sqlite_version_info < SHARED_SQLITE_MIN:
        pytest.skip("needs a newer SQLite")

    def open_one(name: str, folder: str = "", **options: Any) -> ConversationStore:
        data = tmp_path / (folder or name)
        given = {"url": url, "replica": name, "num_lanes": 2, **options}
        store = ConversationStore.open(data, "a test", **given)
        store.announce(f"{name}:1", "", "")
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        store.close()
    if server is not None:
        server.drop(url)


@pytest.fixture
def folder(tmp_path: Path, driver: Any) -> Path:
    """A closed store with the small history of `write_history`."""
    with ConversationStore.open(tmp_path / "world", "test", driver=driver) as store:
        write_history(store)
    return tmp_path / "world"
