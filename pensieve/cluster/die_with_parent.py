"""Run a program that is killed when the process that started it ends (Linux).

    python -m pensieve.cluster.die_with_parent PARENT_PID PROGRAM [ARGUMENT ...]

A Ray replica may be killed with SIGKILL. Its daemon would survive: it would keep the GPU, and write to a
history that other daemons continue. So this program asks the kernel for a SIGKILL when its parent ends. The
kernel watches the *thread* that started this process, and child_process.py keeps this thread until the child
ends.
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
    if os.getppid() != parent:  # the parent ended before prctl
        sys.exit(1)
    os.execv(program[0], program)


if __name__ == "__main__":
    main(sys.argv[1:])
