"""The picture of the cache: the meaning of its letters, and what it leaves out."""

from __future__ import annotations

from typing import Any

import pytest

from pensieve.engine import cache_views
from pensieve.engine.cache_views import picture
from tests.core.world import ScriptedWorld


def make_world(**shape: Any) -> ScriptedWorld:
    return ScriptedWorld(12, 24, batch_tokens_max=64, **shape)


def test_a_strip_shows_the_tier_of_each_chunk() -> None:
    world = make_world()
    world.ask("a", 16, 2)
    world.run_until_idle()
    ((name, tokens, running, left_out, strip),) = picture(world.cache, 10, "")
    assert (name, running, left_out) == ("a", 0.0, 0)
    letters = world.where("a").replace("D", "d")
    assert isinstance(strip, str)
    runs = "".join(strip[n] * int(strip[n + 1]) for n in range(0, len(strip), 2))
    assert len(runs) == len(letters)
    assert tokens == world.cache.conversations["a"].num_tokens


def test_long_conversations_show_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_views, "SHOWN_CHUNKS_MAX", 3)
    world = make_world()
    world.ask("a", 20, 2)
    world.run_until_idle()
    ((_, _, _, left_out, strip),) = picture(world.cache, 10, "")
    assert left_out == len(world.where("a")) - 3
    assert isinstance(strip, str)
    assert sum(int(each) for each in strip if each.isdigit()) == 3


def test_running_conversations_come_first_and_the_number_is_limited() -> None:
    world = make_world()
    for name in "abc":
        world.ask(name, 5, 1)
        world.run_until_idle()
    world.ask("a", 5, 5)
    world.next()
    shown = picture(world.cache, 2, "")
    assert [row[0] for row in shown] == ["a", "c"]
    assert [row[2] for row in shown] == [1.0, 0.0]


def test_a_tenant_sees_only_its_own_conversations() -> None:
    world = make_world()
    for name in ("red/a", "blue/a", "a", "~unstored/red/1"):
        world.ask(name, 5, 1)
        world.run_until_idle()
    assert [row[0] for row in picture(world.cache, 10, "")] == ["a"]
    assert [row[0] for row in picture(world.cache, 10, "red/")] == ["a"]
