"""The command lines of our own processes, which take the number of one socket."""

from __future__ import annotations

import sys


def _program(module: str) -> tuple[str, ...]:
    return (sys.executable, "-m", f"pensieve.launch.{module}")


ENGINE = _program("engine_process")
ECHO_ENGINE = _program("echo_engine")  # arithmetic in the model's place, to measure the service
RANK = _program("rank_process")
