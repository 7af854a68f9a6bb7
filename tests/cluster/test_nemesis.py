"""Parts of a cluster are killed, paused and cut off while people talk; see nemesis.py."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.nemesis import RECOVERY_SECONDS, Storm, run
from tests.cluster.sharing import needs_sqlite
from tests.cluster.world import Kind
from tests.scale import SCALE, SEED
from tests.store.postgres_server import missing, serving

on_both = pytest.mark.parametrize(
    "name", [pytest.param("sqlite", marks=needs_sqlite), "postgresql"]
)


async def _weathered(folder: Path, storm: Storm) -> None:
    outcome = await run(folder / "storm", storm)
    print(outcome)
    assert outcome.problems == []
    assert outcome.num_turns >= 2 * storm.num_talkers
    assert sum(outcome.faults.values()) >= storm.seconds / storm.every - 1
    if storm.seconds >= 180:
        assert outcome.recovery_seconds <= RECOVERY_SECONDS


@contextmanager
def history(name: str) -> Iterator[str]:
    """The address of a new database; empty for a SQLite file."""
    if name == "sqlite":
        yield ""
        return
    if why := missing():
        pytest.skip(why)
    with serving(max_connections="200") as server:
        yield server.new_database()


@on_both
@pytest.mark.timeout(600)
def test_nothing_is_lost_or_doubled_and_nobody_owns_what_another_does(
    tmp_path: Path, name: str
) -> None:
    with history(name) as store:
        kind = Kind(lease_seconds=2.0, store=store)
        storm = Storm(100 + SEED, seconds=16.0, every=2.0, num_talkers=12, kind=kind)
        asyncio.run(_weathered(tmp_path, storm))


@on_both
@pytest.mark.full
@pytest.mark.timeout(1200 * SCALE)
@pytest.mark.parametrize("lease_seconds", [2.0, 10.0])
def test_three_minutes_with_fifty_people(tmp_path: Path, lease_seconds: float, name: str) -> None:
    for number in range(SCALE):
        with history(name) as store:
            kind = Kind(lease_seconds=lease_seconds, store=store)
            storm = Storm(1000 * (1 + SEED) + number, kind=kind)
            asyncio.run(_weathered(tmp_path / str(number), storm))
