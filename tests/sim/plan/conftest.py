"""What one replica of the made-up machine carries, found once for all tests."""

from __future__ import annotations

import pytest

from pensieve.sim.plan.capacity import (
    capacity,
    first_guess,
)
from pensieve.sim.plan.replica import Row
from tests.sim.plan.world import LOAD, SLO, SMALL, trial


@pytest.fixture(scope="module")
def carried() -> tuple[float, Row]:
    return capacity(trial, SLO, first_guess(SMALL, LOAD.typical))
