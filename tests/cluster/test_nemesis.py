"""Parts of a cluster are killed, paused and cut off while people talk; see nemesis.py."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.cluster.nemesis import RECOVERY_SECONDS, Storm, run
from tests.cluster.sharing import needs_sqlite
from tests.cluster.world import Kind
from tests.scale import SCALE, SEED

pytestmark = needs_sqlite


async def _weathered(folder: Path, storm: Storm) -> None:
    outcome = await run(folder / "storm", storm)
    print(outcome)
    assert outcome.problems == []
    assert outcome.num_turns >= 2 * storm.num_talkers
    assert sum(outcome.faults.values()) >= storm.seconds / storm.every - 1
    if storm.seconds >= 180:
        assert outcome.recovery_seconds <= RECOVERY_SECONDS


@pytest.mark.timeout(600)
def test_nothing_is_lost_or_doubled_and_nobody_owns_what_another_does(tmp_path: Path) -> None:
    storm = Storm(100 + SEED, seconds=16.0, every=2.0, num_talkers=12, kind=Kind(lease_seconds=2.0))
    asyncio.run(_weathered(tmp_path, storm))


@pytest.mark.full
@pytest.mark.timeout(1200 * SCALE)
@pytest.mark.parametrize("lease_seconds", [2.0, 10.0])
def test_three_minutes_with_fifty_people(tmp_path: Path, lease_seconds: float) -> None:
    for number in range(SCALE):
        storm = Storm(1000 * (1 + SEED) + number, kind=Kind(lease_seconds=lease_seconds))
        asyncio.run(_weathered(tmp_path / str(number), storm))
