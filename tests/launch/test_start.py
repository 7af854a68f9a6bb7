"""A start of the engine imports only what it needs, and begins before the service is ready."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pensieve.client import Client
from pensieve.conversations.engine_child import EarlyEngine, EngineChild
from pensieve.errors import StoreLocked
from pensieve.launch import programs
from pensieve.launch.embedded_daemon import EmbeddedDaemon
from pensieve.store import ConversationStore
from tests.launch.test_embedded_daemon import settings_in

LOADING = """
import sys
from pathlib import Path
from pensieve.builtin import MODEL_PATH
from pensieve.config import resolve
from pensieve.engine.mailbox import Mailbox, Outbox
from pensieve.launch.engine_process import build_with_model, import_torch
lines = []
import_torch(lines.append)
settings = resolve({"data": "unused"}, {}).settings
build_with_model(settings, MODEL_PATH, lines.append, Mailbox(10), Outbox()).close()
assert lines[0] == "importing torch", lines
"""


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_compiler_and_training_of_torch_are_not_imported_to_load_a_model() -> None:
    names = "('torch._dynamo.convert_frame', 'torch.distributed.tensor', 'torch.distributed.fsdp')"
    assert run(f"{LOADING}print([name for name in {names} if name in sys.modules])") == "[]\n"


@pytest.mark.parametrize(
    "use",
    [
        "torch.compile(lambda x: x + 1, backend='eager')(torch.ones(1)).item()",
        "float(__import__('torch._dynamo.config').__name__ == 'torch') + 1",
        "float(torch._dynamo.is_compiling()) + 2",
    ],
)
def test_torchs_compiler_works_when_something_uses_it(use: str) -> None:
    assert run(f"{LOADING}import torch\nprint({use})\nimport torch._dynamo.utils") == "2.0\n"


def test_a_process_that_was_started_early_becomes_the_engine(tmp_path: Path) -> None:
    with EarlyEngine(programs.ECHO_ENGINE) as early:
        child = early.take()
        assert child is not None
        daemon = EmbeddedDaemon(
            settings_in(tmp_path),
            "a test",
            lambda line: None,
            programs.ECHO_ENGINE,
            take_prestarted_engine=iter([child, None]).__next__,
        )
        with daemon, Client(daemon.address) as client:
            assert daemon.server is not None
            assert daemon.server.daemon.engine.pid == child.process.pid
            os.kill(child.process.pid, signal.SIGKILL)
            talk = client.conversation("c")
            assert talk.ask(
                "hello", max_tokens=5, ignore_eos=True
            ).text  # a new process has replaced it
            assert daemon.server.daemon.engine.pid != child.process.pid
    assert child.process.returncode is not None


def test_a_start_that_fails_ends_the_process_that_was_started_early(tmp_path: Path) -> None:
    def start() -> None:
        with EarlyEngine(programs.ECHO_ENGINE) as early:
            child = early.take()
            assert child is not None
            children.append(child)
            early._child = child
            with EmbeddedDaemon(
                settings_in(tmp_path), "a test", print, take_prestarted_engine=early.take
            ):
                raise AssertionError("it has started")

    children: list[EngineChild] = []
    with ConversationStore.open(tmp_path, "the first"), pytest.raises(StoreLocked):
        start()
    assert children[0].process.returncode == -signal.SIGKILL


def test_a_start_reports_the_time_of_each_stage(tmp_path: Path) -> None:
    lines: list[str] = []
    with EmbeddedDaemon(settings_in(tmp_path), "a test", lines.append):
        pass
    (summary,) = (line for line in lines if line.startswith("the engine started in"))
    total, *stages = (float(each) for each in re.findall(r"(\d+\.\d) s\b", summary))
    assert lines.index("importing torch") < lines.index("importing transformers")
    assert len(stages) >= 2
    assert sum(stages) <= total + 0.05 * (len(stages) + 1)
