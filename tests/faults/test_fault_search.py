"""Run four hundred worlds: nothing acknowledged is lost, nothing is wrong, and everything ends.

world.py describes the moves and the checks of a world. `python -m tests.faults SEED` prints the events of
one world.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.faults.disk import shelf
from tests.faults.kept import KEPT
from tests.faults.kinds import KINDS
from tests.faults.world import World, run
from tests.scale import SCALE

ROOT = Path(__file__).parents[2]
SEEDS_AT_ONCE = 50
SEARCHES = range(8 * SCALE)
TWICE_EVERY = 100


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with shelf() as path:
        yield path


def run_world(seed: int, place: Path) -> World:
    world = run(seed, place)
    shutil.rmtree(place / f"world-{seed}")
    return world


@cache
def run_worlds(first: int, place: Path) -> Counter[str]:
    """Run these worlds, which must find no error. Return how often each event happened."""
    happened: Counter[str] = Counter()
    for seed in range(first, len(SEARCHES) * SEEDS_AT_ONCE, len(SEARCHES)):
        world = run_world(seed, place)
        happened += world.happened
        if seed % TWICE_EVERY == 0:
            assert run_world(seed, place).hash == world.hash, (
                f"seed {seed} gives two different worlds"
            )
    return happened


@pytest.mark.parametrize("first", SEARCHES)
def test_nothing_acknowledged_is_lost_and_everything_ends_under_random_faults(
    first: int, place: Path
) -> None:
    run_worlds(first, place)


def test_every_kind_of_fault_has_happened(place: Path, request: pytest.FixtureRequest) -> None:
    """Check the searches of this run, which may be only a third of all searches (tests/selection.py)."""
    search = test_nothing_acknowledged_is_lost_and_everything_ends_under_random_faults.__name__
    callspecs = (
        item.callspec
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == search
    )
    firsts = [callspec.params["first"] for callspec in callspecs] or list(SEARCHES)
    happened = sum((run_worlds(first, place) for first in firsts), Counter[str]())
    print(*(f"{happened[kind]:7} {kind}" for kind in KINDS), sep="\n")
    assert len(KINDS) > 12
    least = 20 * SCALE if len(firsts) == len(SEARCHES) else 1
    rare = {kind: happened[kind] for kind in KINDS if happened[kind] < least}
    assert not rare, rare


@pytest.mark.parametrize("seed", KEPT, ids=lambda seed: f"{seed}: {KEPT[seed]}")
def test_seeds_that_once_found_bugs_pass(seed: int, place: Path) -> None:
    run_world(seed, place)


def test_a_world_is_the_same_in_another_process(place: Path) -> None:
    """A world must not depend on string hashes, addresses, clocks or unseeded randomness."""
    for seed in (1, 2):
        told = subprocess.run(
            [sys.executable, "-m", "tests.faults", str(seed)],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": "7"},
            capture_output=True,
            text=True,
            check=True,
        )
        world = run_world(seed, place)
        *events, _, last = told.stdout.splitlines()
        assert last.split()[0] == world.hash
        assert len(events) == world.num_events


def test_the_error_of_a_failing_seed_has_the_command_to_replay_it(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(World, "settle", lambda self: [][0])
    with pytest.raises(IndexError) as caught:
        run(-7, place)
    assert caught.value.__notes__ == ["python -m tests.faults -7"]
