"""What the engine tells of its cache, held against the cache itself."""

from __future__ import annotations

from typing import Any

import pytest

from pensieve.core.prefix_tree import Chunk
from pensieve.engine import cache_watch
from pensieve.engine.cache_watch import CacheWatch
from pensieve.engine.messages import CacheChanged, WatchCache
from tests.core.world import Shape, Stage, World
from tests.engine.rig import Rig, submit

SIZE = 4
Prefix = tuple[int, ...]


class Listener:
    """Watches a world, and believes what it is reported."""

    def __init__(self, world: World, prefix: str = "") -> None:
        self.world = world
        self.watch = CacheWatch(world.cache, 7, prefix)
        self.held: dict[int, tuple[int, ...]] = {}  # parent and tokens, by number
        self.num_removed = 0
        launch = world.executor.launch

        def planned(iteration: Any) -> None:
            self.watch.planned(iteration, world.scheduler)
            launch(iteration)

        world.executor.launch = planned  # type: ignore[method-assign]

    def hear(self) -> None:
        """One round."""
        for news in self.watch.news():
            assert news.watch_id == 7
            for number in news.removed:
                del self.held[number]
                self.num_removed += 1
            for number, *rest in news.stored:
                assert number not in self.held
                self.held[number] = tuple(rest)

    def hear_all(self) -> None:
        while self.watch.pending:
            self.hear()

    def check(self) -> None:
        """All that is there is known; and nothing is that is not, but for what was cut off in its chunk."""
        sure, others = blocks_of(self.world)
        known = sorted(row[1:] for row in self.held.values())
        missing = list(known)
        for prefix in sure:
            missing.remove(prefix[-SIZE:])  # fails where it is not known
        assert len(missing) <= others
        numbers = {row: number for number, row in self.held.items()}
        first = {row[1:]: number for row, number in numbers.items() if not row[0]}
        for prefix in sorted(sure, key=len):
            if len(prefix) == SIZE:
                assert prefix in first
        for prefix in sure:
            if len(prefix) == 2 * SIZE and prefix[:SIZE] in sure:
                assert (first[prefix[:SIZE]], *prefix[SIZE:]) in numbers


def blocks_of(world: World) -> tuple[set[Prefix], int]:
    """Blocks that the logs of the cached conversations show; and how many chunks are held beyond them."""
    sure: set[Prefix] = set()
    seen: set[Chunk] = set()
    others: set[Chunk] = set()
    for conversation in world.cache.conversations.values():
        for chunk in conversation.chunks():
            if chunk.filled < SIZE or not chunk.resident:
                continue
            end = (chunk.index + 1) * SIZE
            if len(conversation.log) >= end:
                sure.add(tuple(conversation.log[:end]))
                seen.add(chunk)
            else:
                others.add(chunk)
    return sure, len(others - seen)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("restless", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_what_is_told_is_what_is_there(seed: int, restless: bool, overlap: bool) -> None:
    shape = Shape(
        14, 8, overlap=overlap, restless=restless, failing=0.01, damaging=0.02, scope="t/"
    )
    world = World(seed, shape)
    listener = Listener(world)
    for number in range(400):
        world.act()
        listener.hear()
        world.step(check=False)
        if number % 10 == 0:
            listener.hear_all()
            listener.check()
    world.run_until_idle(checks_every=50)
    listener.hear_all()
    listener.check()
    assert listener.num_removed > 50


def test_who_begins_late_is_told_what_is_there() -> None:
    world = World(3, Shape(14, 8, scope="t/"))
    early = Listener(world)
    for _ in range(150):
        world.act()
        early.hear()
        world.step(check=False)
    world.run_until_idle()
    early.hear_all()
    early.watch.end()
    late = Listener(world)
    late.hear_all()
    late.check()
    assert late.held.items() <= early.held.items()  # who listened longer knows what was cut off
    assert late.held


def test_two_who_computed_the_same_hold_one_block() -> None:
    stage = Stage(12, 12)
    listener = Listener(stage)
    prompt = list(range(8))
    stage.ask("t/a", 8, 3, prompt=prompt)
    stage.ask("t/b", 8, 3, prompt=prompt)
    stage.run_until_idle()
    listener.hear_all()
    assert sorted(row[1:] for row in listener.held.values())[:2] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    num_blocks = len(listener.held)
    stage.delete("t/a")
    listener.hear_all()
    assert len(listener.held) == num_blocks
    stage.delete("t/b")
    listener.hear_all()
    assert not listener.held


def test_scopes_are_apart_and_others_are_not_watched() -> None:
    stage = Stage(16, 16)
    listener = Listener(stage, "~unstored/")
    for name in ("~unstored/red/1", "~unstored/blue/1", "red/a", "a", "~unstored/a"):
        stage.ask(name, 4, 2, prompt=[1, 2, 3, 4])
        stage.run_until_idle()
    reported = [news for _ in range(3) for news in listener.watch.news()]
    assert [(news.scope, news.stored[0][2:]) for news in reported] == [
        ("~unstored/red", (1, 2, 3, 4)),
        ("~unstored/blue", (1, 2, 3, 4)),
    ]
    assert reported[0].stored[0][0] != reported[1].stored[0][0]  # no number tells of another scope


def test_a_round_looks_at_so_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_watch, "CHUNKS_MAX", 2)
    stage = Stage(12, 12)
    stage.ask("t/a", 20, 1)
    stage.run_until_idle()
    listener = Listener(stage)
    sizes = []
    while listener.watch.pending:
        listener.hear()
        sizes.append(len(listener.held))
    assert sizes == [2, 4, 5]


def test_nothing_is_remembered_while_nobody_watches() -> None:
    stage = Stage(12, 12)
    assert stage.cache.tiers.watched is None
    listener = Listener(stage)
    assert stage.cache.tiers.watched is not None
    listener.watch.end()
    stage.ask("t/a", 20, 1)
    stage.run_until_idle()
    stage.delete("t/a")
    assert stage.cache.tiers.watched is None


def test_an_engine_tells_while_it_is_asked_to() -> None:
    rig = Rig()
    rig.mailbox.put(WatchCache(1, ""))
    rig.mailbox.put(submit(1, "t/a", [], list(range(20))))
    rig.run()
    reported = [each for each in rig.sink.events if isinstance(each, CacheChanged)]
    assert {(each.watch_id, each.scope) for each in reported} == {(1, "t")}
    assert reported[0].stored[0][2:] == (0, 1, 2, 3)
    assert sum(len(each.stored) for each in reported) >= 5
    rig.sink.events.clear()
    rig.mailbox.put(WatchCache(0))
    rig.mailbox.put(submit(2, "t/b", [], list(range(20))))
    rig.run()
    assert not [each for each in rig.sink.events if isinstance(each, CacheChanged)]
