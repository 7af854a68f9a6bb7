"""The command lines that start our own processes; each takes the number of a socket."""

from __future__ import annotations

import sys

from pensieve.config import Resolved
from pensieve.errors import InvalidArgument


def _program(module: str) -> tuple[str, ...]:
    return (sys.executable, "-m", f"pensieve.launch.{module}")


ENGINE = _program("engine_process")
ECHO_ENGINE = _program("echo_engine")  # arithmetic instead of a model, to measure the service
SEPARATE_ENGINE = _program("separate_engine")  # prompts in passes of their own, to compare
RANK = _program("rank_process")


def engine_program(resolved: Resolved) -> tuple[str, ...]:
    """The command line of the engine."""
    engine, _, seconds = resolved.settings.engine.partition(":")
    if engine == "echo" and resolved.settings.journal is not None:
        raise InvalidArgument(
            "journal", "the echo engine keeps none: it records what a model's took"
        )
    command = {
        "model": ENGINE,
        "echo": (*ECHO_ENGINE, f"--seconds={seconds or 0}"),
        "separate": SEPARATE_ENGINE,
    }
    return command[engine]
