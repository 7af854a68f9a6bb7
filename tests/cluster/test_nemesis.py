"""Run the nemesis: parts of a cluster are killed, paused and cut off while users talk (nemesis.py)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.cluster.nemesis import RECOVERY_SECONDS, Storm, run
from tests.cluster.sharing import history, on_both
from tests.cluster.world import Kind
from tests.scale import SCALE, SEED


async def _check_storm(folder: Path, storm: Storm) -> None:
    outcome = await run(folder / "storm", storm)
    print(outcome)
    assert outcome.problems == []
    assert outcome.num_turns >= 2 * storm.num_talkers
    assert sum(outcome.faults.values()) >= storm.seconds / storm.every - 1
    if storm.seconds >= 180:
        assert outcome.recovery_seconds <= RECOVERY_SECONDS


@pytest.mark.parametrize("name", on_both)
@pytest.mark.timeout(600)
def test_no_turn_is_lost_or_duplicated_and_no_conversation_has_two_owners(
    tmp_path: Path, name: str
) -> None:
    with history(name) as store:
        kind = Kind(lease_seconds=2.0, store=store)
        storm = Storm(100 + SEED, seconds=16.0, every=2.0, num_talkers=12, kind=kind)
        asyncio.run(_check_storm(tmp_path, storm))


@pytest.mark.parametrize("name", on_both)
@pytest.mark.full
@pytest.mark.timeout(1200 * SCALE)
@pytest.mark.parametrize("lease_seconds", [2.0, 10.0])
def test_three_minutes_with_fifty_people(tmp_path: Path, lease_seconds: float, name: str) -> None:
    for number in range(SCALE):
        with history(name) as store:
            kind = Kind(lease_seconds=lease_seconds, store=store)
            storm = Storm(1000 * (1 + SEED) + number, kind=kind)
            asyncio.run(_check_storm(tmp_path / str(number), storm))
