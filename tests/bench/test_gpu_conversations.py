"""The GPU bench's conversations are as long as those of the paper."""

from __future__ import annotations

import pytest

from pensieve.bench import gpu_conversations


def test_conversations_are_as_long_as_theirs() -> None:
    found = gpu_conversations.talks(5.0, 200.0, 3.0, 1000, 1)
    assert len(found) == pytest.approx(1000, rel=0.15)
    talks = [talk for _, talk in found]
    turns = sum(len(talk.messages) for talk in talks)
    assert turns / len(talks) == pytest.approx(5.56, rel=0.1)
    assert sum(len(each) for t in talks for each in t.messages) / turns == pytest.approx(
        37.8, rel=0.1
    )
    assert sum(sum(talk.outputs) for talk in talks) / turns == pytest.approx(204.6, rel=0.1)
