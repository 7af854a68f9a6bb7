"""The command lines of engines and ranks. The last argument is the file descriptor of a socket."""

from __future__ import annotations

import sys

from pensieve.config import Resolved
from pensieve.errors import InvalidArgument


def _program(module: str) -> tuple[str, ...]:
    return (sys.executable, "-m", f"pensieve.launch.{module}")


ENGINE = _program("engine_process")
ECHO_ENGINE = _program("echo_engine")  # arithmetic instead of a model, to test the service
SEPARATE_ENGINE = _program(
    "separate_engine"
)  # prompts and decodes in separate passes, for comparison
RANK = _program("rank_process")


def engine_program(resolved: Resolved) -> tuple[str, ...]:
    """Return the command line of the engine that the settings choose."""
    engine, _, seconds = resolved.settings.engine.partition(":")
    if engine == "echo" and resolved.settings.journal is not None:
        raise InvalidArgument(
            "journal",
            "the echo engine writes no journal, because it runs no model whose times could be recorded",
        )
    command = {
        "model": ENGINE,
        "echo": (*ECHO_ENGINE, f"--seconds={seconds or 0}"),
        "separate": SEPARATE_ENGINE,
    }
    return command[engine]
