"""The picture of the cache: the meaning of its letters, and what it leaves out."""

from __future__ import annotations

from typing import Any

import pytest

from pensieve.engine import cache_views
from pensieve.engine.cache_views import picture
from tests.core.world import Stage


def world(**shape: Any) -> Stage:
    return Stage(12, 24, batch_tokens_max=64, **shape)


def test_a_strip_shows_the_tier_of_each_chunk() -> None:
    stage = world()
    stage.ask("a", 16, 2)
    stage.run_until_idle()
    ((name, tokens, running, left_out, strip),) = picture(stage.cache, 10, "")
    assert (name, running, left_out) == ("a", 0.0, 0)
    letters = stage.where("a").replace("D", "d")
    assert isinstance(strip, str)
    runs = "".join(strip[n] * int(strip[n + 1]) for n in range(0, len(strip), 2))
    assert len(runs) == len(letters)
    assert tokens == stage.cache.conversations["a"].num_tokens


def test_long_conversations_show_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_views, "SHOWN_CHUNKS_MAX", 3)
    stage = world()
    stage.ask("a", 20, 2)
    stage.run_until_idle()
    ((_, _, _, left_out, strip),) = picture(stage.cache, 10, "")
    assert left_out == len(stage.where("a")) - 3
    assert isinstance(strip, str)
    assert sum(int(each) for each in strip if each.isdigit()) == 3


def test_running_conversations_come_first_and_the_number_is_limited() -> None:
    stage = world()
    for name in "abc":
        stage.ask(name, 5, 1)
        stage.run_until_idle()
    stage.ask("a", 5, 5)
    stage.next()
    shown = picture(stage.cache, 2, "")
    assert [row[0] for row in shown] == ["a", "c"]
    assert [row[2] for row in shown] == [1.0, 0.0]


def test_a_tenant_sees_only_its_own_conversations() -> None:
    stage = world()
    for name in ("red/a", "blue/a", "a", "~unstored/red/1"):
        stage.ask(name, 5, 1)
        stage.run_until_idle()
    assert [row[0] for row in picture(stage.cache, 10, "")] == ["a"]
    assert [row[0] for row in picture(stage.cache, 10, "red/")] == ["a"]
