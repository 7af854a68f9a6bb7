"""A constraint that takes long to compile delays only its own turn."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pensieve.builtin import MODEL_PATH
from pensieve.conversations.live_turn import LiveTurn
from pensieve.core.constraint import choice_of
from pensieve.core.turn import FinishReason
from pensieve.sampling import Sampling
from pensieve.text.grammars import Grammars, Matcher
from tests.conversations.in_process import Runtime
from tests.conversations.rig import finish, started

FREE = Sampling(max_tokens=30, ignore_eos=True, seed=5)
HELD = Sampling(max_tokens=30, seed=5)
SLOW = choice_of(("yes", "no"))


class Gate:
    """The engine's grammars compile only while the gate is open. The service does not wait for the gate."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.num_waiting = threading.Semaphore(0)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    found, matcher = Gate(), Grammars.matcher

    def slow(self: Grammars, kind: str, text: str) -> Matcher:
        found.num_waiting.release()
        assert found.is_open.wait(60)
        return matcher(self, kind, text)

    monkeypatch.setattr(Grammars, "matcher", slow)
    yield found
    found.is_open.set()


def send(runtime: Runtime, name: str, **options: Any) -> LiveTurn:
    runtime.conversations.create(name)
    return runtime.conversations.send(name, "Is it so?", **options)


def step(runtime: Runtime) -> bool:
    """Run the engine and handle its events, without waiting for turns that are held."""
    worked = runtime.engine.step()
    while (event := runtime.outbox.get(0)) is not None:
        runtime.conversations.handle(event)
        worked = True
    return worked


def words(turn: LiveTurn) -> tuple[list[int], str]:
    return list(turn.reply.token_ids), turn.text


def test_other_turns_continue_with_the_same_replies_while_a_constraint_compiles(
    gate: Gate, tmp_path: Path
) -> None:
    with started(MODEL_PATH, tmp_path / "alone") as runtime:
        finish(runtime, [alone := send(runtime, "free", sampling=FREE)])
        gate.is_open.set()
        finish(runtime, [quick := send(runtime, "held", sampling=HELD, constraint=SLOW)])
    gate.is_open.clear()
    while gate.num_waiting.acquire(blocking=False):
        pass
    with started(MODEL_PATH, tmp_path / "beside") as runtime:
        held = send(runtime, "held", sampling=HELD, constraint=SLOW)
        step(runtime)
        assert gate.num_waiting.acquire(timeout=60)  # a thread is compiling, and waits at the gate
        free = send(runtime, "free", sampling=FREE)
        while free.finish is None:
            assert step(runtime)
        assert words(free) == words(alone)
        assert (held.finish, len(held.reply.token_ids)) == (None, 0)
        gate.is_open.set()
        finish(runtime, [held])
    assert words(held) == words(quick)
    assert held.text in ("yes", "no")


def test_running_constrained_turns_continue_while_other_constraints_compile(
    gate: Gate, tmp_path: Path
) -> None:
    """The threads that make masks are not the threads that compile."""
    gate.is_open.set()
    with started(MODEL_PATH, tmp_path / "data") as runtime:
        held = send(runtime, "held", sampling=HELD, constraint=choice_of(("it is so", "it is not")))
        runtime.engine.held.wait()
        while not held.reply.token_ids:
            runtime.engine.held.wait()
            step(runtime)
        gate.is_open.clear()
        slow = [
            send(runtime, f"slow{n}", sampling=HELD, constraint=choice_of((f"yes{n}",)))
            for n in range(6)
        ]
        while held.finish is None:
            assert step(runtime)
        assert held.text in ("it is so", "it is not")
        assert not any(each.reply.token_ids for each in slow)
        gate.is_open.set()
        finish(runtime, slow)
        assert [each.text for each in slow] == [f"yes{n}" for n in range(6)]


def test_a_turn_that_waits_for_its_constraint_can_be_cancelled(gate: Gate, tmp_path: Path) -> None:
    with started(MODEL_PATH, tmp_path / "data") as runtime:
        held = send(runtime, "held", sampling=HELD, constraint=SLOW)
        step(runtime)
        runtime.conversations.cancel(held)
        while held.finish is None:
            assert step(runtime)
        assert held.finish is FinishReason.CANCELLED
        assert not runtime.engine.held.turns
        gate.is_open.set()
        turn = runtime.conversations.send("held", "And now?", sampling=HELD, constraint=SLOW)
        finish(runtime, [turn])
        assert turn.text in ("yes", "no")
