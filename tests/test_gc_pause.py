"""Long-lived objects are not scanned again and again, and a full collection waits for an idle moment."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from pensieve import gc_pause
from pensieve.conversations.live_turn import LiveTurn
from pensieve.core.iteration import SampledToken
from pensieve.engine import engine as engine_module
from tests.engine.rig import Rig, submit


@pytest.fixture
def thawed() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


def test_tokens_of_a_live_turn_create_few_objects() -> None:
    live = LiveTurn(1, "c", 0, 3)
    gc.collect()
    before = len(gc.get_objects())
    for number in range(1000):
        live.take(SampledToken(1, number, f"word {number}"))
    assert live.num_tokens == 1000
    assert live.text.endswith("word 999")
    assert len(gc.get_objects()) - before < 20


@pytest.mark.usefixtures("thawed")
def test_freeze_excludes_existing_objects_from_collections_but_new_cycles_are_found() -> None:
    gc_pause.freeze()
    assert gc.get_freeze_count() > 10_000
    assert len(gc.get_objects()) < 1_000
    loop: list[object] = []
    loop.append(loop)
    del loop
    assert gc.collect() >= 1


def test_an_idle_engine_collects_once_until_it_has_work_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collections = []
    monkeypatch.setattr(engine_module, "IDLE_SECONDS", 0.01)
    collected = threading.Event()

    def collect() -> None:
        collections.append(rig.engine.scheduler.counters.finished)
        collected.set()

    monkeypatch.setattr(gc_pause, "collect", collect)
    rig = Rig()
    thread = threading.Thread(target=rig.engine.run)
    thread.start()
    assert collected.wait(60)
    collected.clear()
    assert not collected.wait(0.1)
    rig.mailbox.put(submit(1, "a", [], [5, 6, 7], reply=3))
    assert collected.wait(60)
    rig.mailbox.close()
    thread.join(60)
    assert collections == [0, 1]
