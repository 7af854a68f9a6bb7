"""A journal replays to the same iterations, and one that was changed is refused."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from pensieve.engine.journal import opened, replay
from pensieve.errors import ConfigError
from tests.engine.rig import Rig, submit, traffic


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_a_journal_replays_to_the_same_iterations(seed: int, depth: int):
    lines = io.StringIO()
    rig = Rig(seed, lines, depth=depth, failing=0.02)
    traffic(rig, seed, 60)
    lines.seek(0)
    assert replay(lines) == rig.scheduler.counters.iterations > 60


def test_a_journal_tells_how_far_planning_ran_ahead():
    lines = io.StringIO()
    rig = Rig(0, lines, depth=2, stops=False)
    rig.mailbox.put(submit(1, "a", [], [1, 2, 3], reply=3))
    rig.run()
    kinds = [next(iter(json.loads(line))) for line in lines.getvalue().splitlines()[1:]]
    ahead = ["message", "plan", "plan", "commit", "plan", "commit", "plan", "commit", "plan"]
    assert kinds == ahead
    lines.seek(0)
    assert replay(lines) == 3


def test_a_journal_that_was_tampered_with_is_refused():
    lines = io.StringIO()
    rig = Rig(0, lines)
    rig.mailbox.put(submit(1, "a", [], [1, 2, 3, 4, 5]))
    rig.run()
    assert "[1, 2, 3, 4, 5]" not in lines.getvalue()  # lengths, no ids
    tampered = lines.getvalue().replace('"tokens":20', '"tokens":24')
    with pytest.raises(ValueError, match="replay plans"):
        replay(tampered.splitlines())
    with pytest.raises(ValueError, match="not a journal"):
        replay(["{}"])


@pytest.mark.parametrize("text", ['{"version":1}\n', "Dear diary\n", "[]\n", '{"plan":1.0}\n'])
def test_nothing_is_appended_to_what_could_not_be_read_afterwards(tmp_path: Path, text: str):
    path = tmp_path / "journal"
    path.write_text(text)
    with pytest.raises(ConfigError, match="cannot append"):
        opened(path)
    assert path.read_text() == text
