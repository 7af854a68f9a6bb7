"""Run every interleaving of a few client actions, iterations and finishing copies, with a few pages."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.small_worlds import Chooser, SmallWorld, enumerate_worlds
from tests.core.world import Shape
from tests.scale import SCALE

MORE = int(SCALE > 1)
TINY: dict[str, Any] = {
    "chunk_tokens": 2,
    "batch_tokens_max": 4,
    "turns_max": 2,
    "stops": False,
}
WORLDS = {
    "3 pages, no host": SmallWorld(
        Shape(3, 0, **TINY),
        ("ask a", "ask b", "fork a", "cancel a", "rewind a", "delete a"),
        num_choices=5 + MORE,
        first_tokens=1,
        prompt_tokens=1,
    ),
    "4 pages, 1 on the host": SmallWorld(
        Shape(4, 1, swap_out_below=0.5, **TINY),
        ("ask a", "ask b", "cancel b", "evict a"),
        num_choices=6 + MORE,
        first_tokens=2,
        prompt_tokens=2,
    ),
    "6 pages, 2 on the host, everything copied ahead": SmallWorld(
        Shape(6, 2, swap_out_below=1.0, **TINY),
        ("ask a", "fork a", "ask b", "delete a", "warm a"),
        num_choices=5 + MORE,
    ),
    "one place, and turns that are entitled to it": SmallWorld(
        Shape(6, 2, **{**TINY, "turns_max": 1}),
        ("ask a", "urge b", "visit c", "cancel b"),
        num_choices=6 + MORE,
    ),
    "few pages, and turns that are entitled to them, planned ahead": SmallWorld(
        Shape(5, 1, overlap=True, swap_out_below=0.5, **{**TINY, "turns_max": 3}),
        ("ask a", "urge b", "visit c", "delete a"),
        num_choices=5 + MORE,
        first_tokens=1,
        prompt_tokens=2,
    ),
    "streamed over 4 pages of the host": SmallWorld(
        Shape(3, 4, staging_pages=3, **TINY),
        ("ask a", "fork a", "ask b", "cancel a", "delete b"),
        num_choices=5 + MORE,
        first_tokens=3,
        prompt_tokens=2,
    ),
    "streamed over 6 pages of the host, planned ahead, narrow groups": SmallWorld(
        Shape(3, 6, overlap=True, staging_pages=2, **{**TINY, "turns_max": 3}),
        ("ask a", "ask b", "visit c", "rewind a", "cancel b"),
        num_choices=5 + MORE,
        first_tokens=1,
        prompt_tokens=2,
    ),
    "5 pages, 2 on the host, planned ahead": SmallWorld(
        Shape(5, 2, overlap=True, **TINY),
        ("ask a", "fork a", "ask b", "cancel a", "delete b"),
        num_choices=5 + MORE,
    ),
}


@pytest.mark.parametrize("name", WORLDS)
def test_every_small_world_keeps_the_invariants(name: str) -> None:
    num_worlds = enumerate_worlds(WORLDS[name])
    print(f"{name}: {num_worlds} worlds")
    assert num_worlds > 250


def test_a_chooser_gives_every_sequence_of_answers_once() -> None:
    chooser, seen = Chooser(), []
    for _ in chooser.runs():
        first = chooser.choose(2)
        seen.append((first, chooser.choose(3) if first else chooser.choose(1)))
    assert seen == [(0, 0), (1, 0), (1, 1), (1, 2)]
