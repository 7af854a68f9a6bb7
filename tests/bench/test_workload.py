"""Scripted conversations are the same for the same seed."""

from __future__ import annotations

from pensieve.bench import workload


def test_chat_scripts_are_determined_by_their_seed() -> None:
    shape = workload.WorkloadShape(4, 3, 20, 5, rate=10.0, think_seconds=1.0)
    first, again, other = (workload.scripts_of(shape, seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert [len(script.turns) for script in first] == [3] * 4
    assert all(len(message.text.split()) == 20 for script in first for message in script.turns)
    assert all(script.turns[0].think_seconds == 0 for script in first)
    assert sorted(script.arrives_at for script in first) == [s.arrives_at for s in first]
