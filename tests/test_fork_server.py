"""A process that the fork server forks behaves like an executed process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import fork_server

ROOT = Path(__file__).parents[1]
PROBE = (sys.executable, "-m", "tests.fork_probe")
SLEEPER = (sys.executable, "-m", "tests.fork_sleeper")


def probed(way: contextlib.AbstractContextManager[None], folder: Path, **given: Any) -> Any:
    options = {**given}
    variables = options.pop("env", {})
    with way, (folder / "passed").open("w") as passed:
        done = subprocess.run(
            [*PROBE, str(os.getpid()), "7", "two words"],
            input="given",
            capture_output=True,
            text=True,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PROBE": "ä", **variables},
            pass_fds=[passed.fileno()],
            check=False,
            **options,
        )
    assert done.returncode == 7, done.stderr
    assert done.stderr == "to standard error\n"
    found = json.loads(done.stdout)
    assert passed.name
    return found


@pytest.mark.parametrize(
    "options", [{}, {"start_new_session": True}, {"env": {"PYTHONUNBUFFERED": "1"}}]
)
def test_a_forked_process_starts_in_the_same_state_as_an_executed_one(
    options: dict[str, Any], tmp_path: Path
) -> None:
    forked = probed(contextlib.nullcontext(), tmp_path, **options)
    assert forked == probed(fork_server.executed(), tmp_path, **options)
    assert forked["given"] == "given"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_signals_end_a_forked_process(number: int) -> None:
    process = subprocess.Popen([*SLEEPER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert process.poll() is None
        assert process.pid in fork_server.children_of(os.getpid())
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.send_signal(number)
        assert process.wait() == -number
        assert process.stdout.read() == b""  # no other process has the pipe open
    assert process.pid not in fork_server.children_of(os.getpid())


def test_a_missing_working_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        subprocess.Popen(PROBE, cwd=tmp_path / "none")
