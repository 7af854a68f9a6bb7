"""The kernels' own threads (csrc/cpu/threads.cpp): results are right, and no call waits for a late thread."""

from __future__ import annotations

import ctypes
import os
import select
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from pensieve.kernels import cpu_library
from pensieve.kernels.layer.cpu import argmax

STOPS = 200  # when helpers and callers shared a lock, one of the first hundred stops hung
HANGS_AFTER_SECONDS = 60.0
PTRACE_ATTACH, PTRACE_DETACH, WAIT_FOR_THREADS = 16, 17, 0x40000000

pytestmark = pytest.mark.skipif(
    cpu_library.compiled_library() is None, reason="the kernels were not compiled"
)


def test_concurrent_callers_get_correct_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """One caller gets the helpers, the others work alone. Each call returns when its own rows are done."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    wrong: list[int] = []

    def call(seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        for num_rows in range(1, 200):
            rows = torch.rand(num_rows, 37, generator=draw)
            if not torch.equal(argmax(rows), rows.argmax(-1)):
                wrong.append(seed)

    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


WORK = """
import sys, threading, os
import torch
from pensieve.kernels.layer.cpu import argmax
torch.set_num_threads(3)
rows = torch.rand(512, 64, generator=torch.Generator().manual_seed(0))
right = rows.argmax(-1)
before = {int(each) for each in os.listdir('/proc/self/task')}
def work(times):
    for _ in range(times):
        assert torch.equal(argmax(rows), right)
work(10)
helpers = sorted({int(each) for each in os.listdir('/proc/self/task')} - before)
"""


def test_a_forked_child_starts_its_own_helpers() -> None:
    program = WORK + (
        "import time\n"
        "child = os.fork()\n"
        "work(1000)\n"
        "if not child:\n"
        "    os._exit(0 if len(os.listdir('/proc/self/task')) == 3 else 1)\n"
        "print(len(helpers), os.waitpid(child, 0)[1])\n"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (told.stdout, told.returncode) == ("2 0\n", 0), told.stderr


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are stopped with ptrace")
def test_a_call_does_not_wait_for_a_stopped_helper() -> None:
    """All helpers are stopped many times, as the operating system may do with any thread.

    The stops come while helpers wait for the next operation, fall asleep, or sleep.
    """
    program = WORK + (
        "print(*helpers, flush=True)\n"
        "for line in sys.stdin:\n"
        "    work(20)\n"
        "    print('done', flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        stdin, stdout = process.stdin, process.stdout

        def work() -> None:
            print("go", file=stdin, flush=True)
            ready, _, _ = select.select([stdout], [], [], HANGS_AFTER_SECONDS)
            assert ready, "the call waits for a stopped helper"
            assert stdout.readline() == "done\n"

        stopped: list[int] = []
        try:
            helpers = [int(each) for each in process.stdout.readline().split()]
            assert len(helpers) == 2
            trace = ctypes.CDLL(None, use_errno=True).ptrace
            for _ in range(STOPS):
                work()
                for helper in helpers:
                    if trace(PTRACE_ATTACH, helper, None, None):
                        pytest.skip(f"ptrace is not allowed: {os.strerror(ctypes.get_errno())}")
                    os.waitpid(helper, WAIT_FOR_THREADS)
                    stopped.append(helper)
                work()
                while stopped:
                    trace(PTRACE_DETACH, stopped.pop(), None, None)
            work()
            process.stdin.close()
            assert process.wait() == 0
        finally:
            process.kill()
            for helper in stopped:  # a traced thread must be reaped before its process can be
                os.waitpid(helper, WAIT_FOR_THREADS)
