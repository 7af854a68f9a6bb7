"""Runs a program that ends when the process which started it ends (Linux).

    python -m pensieve.cluster.tied PARENT_PID PROGRAM [ARGUMENT ...]

A replica of Ray may be killed with SIGKILL, or with its node.  Its daemon would live on then, hold the GPU
and write to a history that others go on with.  So the kernel is told to kill the program with its parent.
What the kernel watches is the *thread* that started this process: child_process.py keeps that thread until
the child ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def main(words: Sequence[str]) -> None:
    parent, program = int(words[0]), list(words[1:])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel knew
        sys.exit(1)
    os.execv(program[0], program)


if __name__ == "__main__":
    main(sys.argv[1:])
