"""The log tells how an engine ended: the signal that killed it, or its exit code."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.conversations.rig_daemon import DaemonRig, send_signal, wait_for

EXITS = "import os, sys; os._exit(int(sys.argv[1]))"


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGKILL, "the engine process was killed by SIGKILL, perhaps out of memory"),
        (signal.SIGSEGV, "the engine process was killed by SIGSEGV"),
    ],
)
def test_the_log_names_the_signal_that_killed_the_engine(
    number: int, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with DaemonRig(tmp_path / "data") as rig:
        before = rig.daemon.engine.pid
        send_signal(before, number)
        wait_for(lambda: rig.daemon.engine.pid not in (None, before))
        assert said in caplog.text


def test_the_error_names_the_exit_code_of_the_engine(tmp_path: Path) -> None:
    program = (sys.executable, "-c", EXITS, "7")
    with (
        pytest.raises(Exception, match="ended with exit code 7 while it was starting"),
        DaemonRig(tmp_path / "data", program=program),
    ):
        pass
