"""Replaying a journal gives the same iterations. A changed journal is refused."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

from pensieve.builtin import MODEL_PATH
from pensieve.config import resolve
from pensieve.core.cache import CacheConfig
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.engine.journal import opened, replay
from pensieve.engine.mailbox import Mailbox
from pensieve.engine.messages import TurnAdmitted
from pensieve.errors import ConfigError
from pensieve.launch.engine import build_engine
from pensieve.launch.model_folder import load_texts
from tests.engine.rig import ListSink, Rig, submit, traffic


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_a_journal_replays_to_the_same_iterations(seed: int, depth: int) -> None:
    lines = io.StringIO()
    rig = Rig(seed, lines, depth=depth, failing=0.02)
    traffic(rig, seed, 60)
    lines.seek(0)
    assert replay(lines) == rig.scheduler.counters.iterations > 60


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_content_lookups_replay_without_the_content(seed: int, depth: int) -> None:
    lines = io.StringIO()
    rig = Rig(seed, lines, depth=depth, failing=0.02)
    traffic(rig, seed, 90, roots=("a", "b"))
    assert '"found":' in lines.getvalue()
    assert sum(each.usage.shared_tokens for each in rig.sink.ends().values()) > 0
    lines.seek(0)
    assert replay(lines) == rig.scheduler.counters.iterations


def test_lookups_keep_their_numbers_after_equal_chunks_were_merged() -> None:
    lines, common = io.StringIO(), list(range(5, 17))
    cache = CacheConfig(40, 20, 4)
    rig = Rig(0, lines, cache=cache, scheduler=SchedulerConfig(64, 8), stops=False)
    rig.mailbox.put(submit(1, "a", [], [*common, 1], 6, root="r"))
    rig.mailbox.put(submit(2, "b", [], [*common, 2], 6, root="r"))
    rig.run()
    for number in (3, 4):
        rig.mailbox.put(submit(number, f"c{number}", [], [*range(40, 60), number], 6, root="r"))
        rig.run()
    assert rig.scheduler.cache.counters.merged > 0
    lines.seek(0)
    assert replay(lines) == rig.scheduler.counters.iterations


def test_a_journal_records_the_shares_and_weights_of_turns() -> None:
    lines = io.StringIO()
    rig = Rig(0, lines)
    for number in range(1, 5):
        share, weight = ("a", 1.0) if number < 3 else ("b", 4.0)
        turn = submit(number, f"{share}/c{number}", [], [1, 2, 3, 4, 5])
        rig.mailbox.put(replace(turn, share=share, weight=weight))
    rig.run()
    admitted = [each.attempt_id for each in rig.sink.events if isinstance(each, TurnAdmitted)]
    assert admitted == [1, 3, 4, 2]
    lines.seek(0)
    assert replay(lines) == rig.scheduler.counters.iterations
    changed = lines.getvalue().replace('"weight":4.0', '"weight":0.25')
    with pytest.raises(ValueError, match="replay plans"):
        replay(changed.splitlines())


def test_a_journal_records_the_planning_depth() -> None:
    lines = io.StringIO()
    rig = Rig(0, lines, depth=2, stops=False)
    rig.mailbox.put(submit(1, "a", [], [1, 2, 3], reply=3))
    rig.run()
    kinds = [next(iter(json.loads(line))) for line in lines.getvalue().splitlines()[1:]]
    ahead = ["message", "plan", "plan", "commit", "plan", "commit", "plan", "commit", "plan"]
    assert kinds == ahead
    lines.seek(0)
    assert replay(lines) == 3


def test_a_journal_that_was_tampered_with_is_refused() -> None:
    lines = io.StringIO()
    rig = Rig(0, lines)
    rig.mailbox.put(submit(1, "a", [], [1, 2, 3, 4, 5]))
    rig.run()
    assert "[1, 2, 3, 4, 5]" not in lines.getvalue()  # the journal has lengths, but no token ids
    tampered = lines.getvalue().replace('"tokens":20', '"tokens":24')
    with pytest.raises(ValueError, match="replay plans"):
        replay(tampered.splitlines())
    with pytest.raises(ValueError, match="not a journal"):
        replay(["{}"])


@pytest.mark.parametrize("text", ['{"version":1}\n', "Dear diary\n", "[]\n", '{"plan":1.0}\n'])
def test_an_unreadable_journal_is_not_appended_to(tmp_path: Path, text: str) -> None:
    path = tmp_path / "journal"
    path.write_text(text)
    with pytest.raises(ConfigError, match="cannot append"):
        opened(path)
    assert path.read_text() == text


class FullDisk(io.StringIO):
    """A file on a disk with room for a given number of lines."""

    def __init__(self, num_lines: int) -> None:
        super().__init__()
        self.num_lines = num_lines
        self.num_tries = 0

    def write(self, line: str) -> int:
        self.num_tries += 1
        if not self.num_lines:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.num_lines -= 1
        return super().write(line)

    def close(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("num_lines", [0, 1, 7])
def test_turns_continue_without_a_journal_that_cannot_be_written(
    num_lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    lines = FullDisk(num_lines)
    with caplog.at_level(logging.WARNING, "pensieve"):
        rig = Rig(0, lines)
        for number in (1, 2, 3):
            rig.mailbox.put(submit(number, f"c{number}", [], [1, 2, 3, 4, 5]))
        rig.run()
    assert set(rig.sink.ends()) == {1, 2, 3}
    assert lines.num_tries == num_lines + 1, "no line may be written after the failed one"
    assert caplog.text.count("stopped recording the journal") == 1
    assert "No space left on device" in caplog.text


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no device that is full")
def test_an_engine_starts_even_if_the_disk_of_its_journal_is_full(tmp_path: Path) -> None:
    settings = resolve(
        {
            "data": str(tmp_path),
            "journal": "/dev/full",
            "device_cache": "8MiB",
            "host_cache": "8MiB",
        },
        {},
    ).settings
    texts = load_texts(MODEL_PATH, lambda line: None)
    built = build_engine(settings, MODEL_PATH, texts, lambda line: None, Mailbox(), ListSink())
    built.engine.step()
    assert built.engine.metrics.figures(0.0)["journal_given_up"] == 1.0
    built.close()
