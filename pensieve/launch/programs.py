"""The command lines that start our own processes; each takes the number of a socket."""

from __future__ import annotations

import sys


def _program(module: str) -> tuple[str, ...]:
    return (sys.executable, "-m", f"pensieve.launch.{module}")


ENGINE = _program("engine_process")
ECHO_ENGINE = _program("echo_engine")  # arithmetic instead of a model, to measure the service
SEPARATE_ENGINE = _program("separate_engine")  # prompts in passes of their own, to compare
RANK = _program("rank_process")
