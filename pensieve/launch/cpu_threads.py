"""Set the number of compute threads, and how long torch's threads spin at a barrier.

torch computes on OpenMP threads. By default they spin for a long time before they sleep. Beside another busy
process this is very slow: the last thread waits for a core that a spinning thread holds, so each barrier
costs a time slice. Here they spin for microseconds. The compiled kernels have threads of their own
(csrc/cpu/threads.cpp), which do not spin like this.

OpenMP's number of threads applies to both: one per core that the process may use, but no more than the CPU
quota of the control group allows at once. More threads would only use up the quota sooner.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from pensieve.config import machine

# Measured beside one busy process: loading a model takes 1.2 times as long as on a quiet machine with 1,000,
# 1.5 times with 5,000 and 3 times with 100,000. On a quiet machine there is no difference.
SPIN_COUNT = 1000
WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
THREADS = "OMP_NUM_THREADS"


def prepare_threads(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set OpenMP's variables, unless the operator has; call this before torch is imported."""
    if not any(name in environ for name in WAITING):
        environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    quota = machine.cpu_quota()
    if THREADS not in environ and quota is not None:
        allowed = max(int(quota + 0.5), 1)
        if allowed < machine.num_cores():
            environ[THREADS] = str(allowed)
