"""The daemon's log on standard error: a reader that does not read blocks nothing."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pensieve.client import Client
from pensieve.launch import log_lines
from tests.conversations.rig_daemon import wait_for

PIPE_BYTES = 4096


@pytest.fixture(autouse=True)
def _restored() -> object:
    """Restore the loggers that a test changes."""
    root, turns = logging.getLogger("pensieve"), logging.getLogger("pensieve.turns")
    before = root.level, root.propagate, turns.level
    yield
    root.level, root.propagate, turns.level = before


def test_an_unread_log_blocks_neither_turns_nor_the_end_of_the_daemon(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    theirs, ours = os.pipe()
    fcntl.fcntl(ours, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    daemon = subprocess.Popen(
        [
            *(sys.executable, "-m", "pensieve", "serve", "--data", str(tmp_path / "data")),
            *("--address", "127.0.0.1:0", "--ready-file", str(ready)),
        ],
        stderr=ours,
        env={**os.environ, "PENSIEVE_ENGINE": "echo"},
    )
    os.close(ours)
    try:
        wait_for(lambda: ready.exists() or daemon.poll() is not None)
        with Client(ready.read_text().strip(), timeout=60) as client:
            for number in range(40):  # lines of about 300 bytes
                client.conversation(f"c{number}").ask("hello", max_tokens=1)
        daemon.terminate()
        assert daemon.wait(60) == 0
    finally:
        daemon.kill()
        daemon.wait()
        with open(theirs, "rb") as file:
            written = file.read()
    assert b"turn ended" in written
    assert len(written) <= PIPE_BYTES


def test_dropped_log_lines_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = os.pipe()
    fcntl.fcntl(ours, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    os.write(ours, b"x" * PIPE_BYTES)
    log = logging.getLogger("pensieve")
    monkeypatch.setattr(log_lines, "LINES_MAX", 3)
    with os.fdopen(ours, "w") as stderr, os.fdopen(theirs, "rb", buffering=0) as reader:
        monkeypatch.setattr(sys, "stderr", stderr)
        with log_lines.log_to_stderr("text", turns=True):
            handler = log.handlers[-1]
            assert isinstance(handler, log_lines._ThreadedHandler)
            lines = handler._lines
            log.info("first")
            wait_for(lambda: not lines.qsize())  # the thread has taken the line, and is blocked
            for number in range(8):
                log.info("line %d", number)
            assert lines.qsize() == 3
            written = reader.read(PIPE_BYTES)
            wait_for(lambda: not lines.qsize())
            log.info("last")
        stderr.close()
        while more := reader.read(PIPE_BYTES):
            written += more
    said = [line.split(" ", 3)[3] for line in written[PIPE_BYTES:].decode().splitlines()]
    assert said == [
        *("first", "line 0", "line 1", "line 2"),
        *("5 log lines were dropped, because standard error was not read", "last"),
    ]


def test_log_lines_of_turns_can_be_switched_off(capfd: pytest.CaptureFixture[str]) -> None:
    for turns in (True, False):
        with log_lines.log_to_stderr("json", turns=turns):
            logging.getLogger("pensieve.turns").info("turn ended", extra={"figures": {"a": 1}})
            logging.getLogger("pensieve").info("else")
        err = capfd.readouterr().err
        assert ('"message": "turn ended", "a": 1' in err) == turns
        assert "else" in err


def test_a_log_line_that_cannot_be_formatted_is_reported_and_blocks_no_other_line(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logging.getLogger("pensieve")
    monkeypatch.setattr(log, "handlers", [])  # pytest's handlers, if a test left them, raise
    with log_lines.log_to_stderr("json", turns=True):
        log.info("%d turns", "no number")
        log.info("turn ended", extra={"figures": {"a": object()}})
        log.info("next")
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [line["level"] for line in lines] == ["warning", "warning", "info"]
    assert all("test_log_lines.py" in line["message"] for line in lines[:2])
    assert lines[2]["message"] == "next"


def test_no_log_line_is_lost_on_a_non_blocking_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = os.pipe()
    fcntl.fcntl(ours, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    os.set_blocking(ours, False)  # another process with this pipe may have done so
    os.write(ours, b"x" * PIPE_BYTES)
    log, num_lines, written = logging.getLogger("pensieve"), 500, b""
    with os.fdopen(ours, "w") as stderr, os.fdopen(theirs, "rb", buffering=0) as reader:
        monkeypatch.setattr(sys, "stderr", stderr)
        with log_lines.log_to_stderr("text", turns=True):
            handler = log.handlers[-1]
            assert isinstance(handler, log_lines._ThreadedHandler)
            lines = handler._lines
            for number in range(num_lines):
                log.info("line %d", number)
            time.sleep(0.2)  # so that the thread finds the pipe full
            while lines.qsize():
                written += reader.read(PIPE_BYTES)
        stderr.close()
        while more := reader.read(PIPE_BYTES):
            written += more
    said = [line.split(" ", 3)[3] for line in written[PIPE_BYTES:].decode().splitlines()]
    assert said == [f"line {number}" for number in range(num_lines)]
