"""Jobs survive kills of their daemon or engine: each line gets one answer, which never changes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from pensieve.client import Client, Job
from pensieve.errors import PensieveError
from tests.conversations.rig_daemon import PATIENCE_SECONDS, ServeProcess
from tests.jobs.test_batch_jobs import file_of, line
from tests.scale import SCALE, SEED

LINES, KILLS = 100 * SCALE, 3 * SCALE


def job_of(client: Client, job_id: str) -> Job | None:
    """Return the job, or None while no daemon answers."""
    with contextlib.suppress(PensieveError):
        return client.jobs.get(job_id, timeout=2.0)
    return None


def wait_until_answered(client: Client, job_id: str, num_done: int) -> Job:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (job := job_of(client, job_id)) is None or job.num_answered < num_done:
        assert time.monotonic() < deadline, job
        time.sleep(0.02)
    return job


def answers(client: Client, job_id: str) -> dict[str, Any]:
    found = [json.loads(each) for each in client.jobs.results(job_id)]
    assert len({each["custom_id"] for each in found}) == len(found)
    assert all(each["error"] is None for each in found), found
    return {
        each["custom_id"]: each["response"]["body"]["choices"][0]["message"]["content"]
        for each in found
    }


def test_daemon_and_engine_are_killed_and_each_line_is_answered_once(tmp_path: Path) -> None:
    model = "echo (arithmetic instead of a model)"
    file = file_of(line(number, body={"model": model}) for number in range(LINES))
    choose = random.Random(SEED)
    alone = ServeProcess(tmp_path / "alone", engine="echo:0.001")
    with Client(alone.start()) as client:
        client.jobs.create(file, job_id="j")
        wait_until_answered(client, "j", LINES)
        right = answers(client, "j")
    assert alone.stop() == 0
    daemon = ServeProcess(tmp_path / "data", "--turns-max", "6", engine="echo:0.01")
    address = daemon.start()
    with Client(address) as client:
        client.jobs.create(file, job_id="j")
    for number in range(KILLS):
        least = (number + 1) * LINES // (KILLS + 2) - choose.randint(0, 5)
        with Client(address) as client:
            wait_until_answered(client, "j", least)
        if number % 3 == 1:
            engine = daemon.engine_pid()
            if engine is not None:
                os.kill(engine, signal.SIGKILL)
            continue
        daemon.kill()
        address = daemon.start()
    with Client(address) as client:
        ended = wait_until_answered(client, "j", LINES)
        assert (ended.num_answered, ended.num_refused) == (LINES, 0)
        assert answers(client, "j") == right
    assert daemon.stop() == 0
