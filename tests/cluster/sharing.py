"""Databases that daemons share, and daemons in threads of the test process that share a SQLite file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from pensieve.guard.exposure import Listening
from pensieve.store.connection import preferred_driver
from pensieve.store.shared_file import SHARED_SQLITE_MIN
from tests.cluster import owner_log
from tests.conversations.rig_daemon import DaemonRig
from tests.store.postgres_server import missing, serving

needs_sqlite = pytest.mark.skipif(
    preferred_driver.sqlite_version_info < SHARED_SQLITE_MIN, reason="needs a newer SQLite"
)
on_both = [pytest.param("sqlite", marks=needs_sqlite), "postgresql"]


@contextmanager
def history(name: str) -> Iterator[str]:
    """Yield the URL of a new database, or "" for a SQLite file. `name` is one of `on_both`."""
    if name == "sqlite":
        yield ""
        return
    if why := missing():
        pytest.skip(why)
    with serving(max_connections="200") as server:
        yield server.new_database()


@contextmanager
def sharing(
    folder: Path,
    names: Sequence[str],
    listening: Mapping[str, Any],
    *,
    each_listening: Sequence[Mapping[str, Any]] = (),
    **daemon: Any,
) -> Iterator[list[DaemonRig]]:
    """Run daemons that share one history, in which triggers log every change of an owner (owner_log.py).

    `listening` and `daemon` are settings of all daemons; `each_listening` has settings of single daemons.
    """
    url = f"sqlite://{folder / 'history.db'}"
    owner_log.create_history(url, folder / "maker")
    with ExitStack() as stack:
        rigs = []
        for number, name in enumerate(names):
            data, more = folder / name, each_listening[number] if each_listening else {}
            places = Listening("127.0.0.1:0", data / "admin.sock", **{**listening, **more})
            rig = DaemonRig(data, listening=places, store=url, **daemon)
            rigs.append(stack.enter_context(rig))
        yield rigs
