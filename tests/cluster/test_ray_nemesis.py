"""Run the nemesis on Ray: parts are killed, paused and cut off while users talk (ray_world.py)."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.nemesis import RECOVERY_SECONDS, Storm, run
from tests.cluster.ray_nodes import why_unavailable
from tests.cluster.ray_world import ALL_FAULTS, CUT, NEVER_CUT, PROXIES, fault_kinds, schedule
from tests.cluster.world import Kind
from tests.scale import SCALE, SEED
from tests.store.postgres_server import missing, serving

pytestmark = pytest.mark.xdist_group("ray")


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short name, because the path of the daemon's socket is long."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    if why := why_unavailable():
        pytest.skip(f"no network namespaces: {why}")
    return tmp_path_factory.mktemp("ray")


@pytest.fixture
def database() -> Iterator[Callable[[], str]]:
    """Return a function that creates a database on a server with connections for all daemons."""
    if why := missing():
        pytest.skip(why)
    with serving(max_connections="200") as server:
        yield server.new_database


def check_storm(folder: Path, storm: Storm) -> None:
    outcome = asyncio.run(run(folder, storm))
    print(outcome)
    assert outcome.problems == []
    assert outcome.num_turns >= 2 * storm.num_talkers
    assert sum(outcome.faults.values()) >= storm.seconds / storm.every / 2
    if storm.seconds >= 180:
        assert outcome.recovery_seconds <= RECOVERY_SECONDS
        assert outcome.whole_seconds <= RECOVERY_SECONDS


def simultaneous_faults(num_nodes: int, seed: int) -> Iterator[tuple[str, int]]:
    """Yield the kind of each fault, and how many targets of the same role have a fault then."""
    until: dict[int, float] = {}
    for fault in schedule(seed, 180.0, 5.0, num_nodes, 10.0):
        assert fault.kind in fault_kinds(fault.target)
        targets = [fault.target, *([PROXIES + fault.target] if fault.kind == CUT else [])]
        for target in targets:
            assert until.get(target, 0.0) <= fault.at
            until[target] = fault.at + fault.seconds
            fellows = [each for each in until if (each >= PROXIES) == (target >= PROXIES)]
            faulty = [each for each in fellows if until[each] > fault.at]
            yield fault.kind, len(faulty)


@pytest.mark.parametrize("num_nodes", [2, 3])
def test_schedules_have_all_faults_and_spare_one_target_of_each_role(num_nodes: int) -> None:
    found = [each for seed in range(50) for each in simultaneous_faults(num_nodes, seed)]
    assert {kind for kind, _ in found} == set(ALL_FAULTS)
    assert max(faulty for _, faulty in found) < num_nodes
    faults = [each for seed in range(50) for each in schedule(seed, 180.0, 5.0, num_nodes, 10.0)]
    assert not [each for each in faults if each.target == NEVER_CUT and each.kind.startswith("cut")]
    assert len(faults) > 50 * 30


@pytest.mark.timeout(400)
def test_no_turn_is_lost_or_duplicated_on_two_nodes(
    folder: Path, database: Callable[[], str]
) -> None:
    kind = Kind(2, lease_seconds=10.0, store=database(), has_ray=True)
    check_storm(folder / "s", Storm(200 + SEED, 16.0, 2.5, num_talkers=12, kind=kind))


@pytest.mark.full
@pytest.mark.timeout(1200 * SCALE)
@pytest.mark.parametrize("num_nodes", [2, 3])
def test_three_minutes_with_fifty_people(
    folder: Path, database: Callable[[], str], num_nodes: int
) -> None:
    for number in range(SCALE):
        kind = Kind(num_nodes, lease_seconds=10.0, store=database(), has_ray=True)
        check_storm(folder / str(number), Storm(1000 * (1 + SEED) + number, kind=kind))
