"""Set the number of compute threads, and how long torch's threads spin at a barrier.

torch computes on OpenMP threads. By default, these threads spin for a long time at a barrier before they
sleep. If another process is busy, this is very slow: the last thread waits for a core that a spinning thread
occupies, so each barrier costs a time slice. With SPIN_COUNT, the threads spin only for microseconds. The
compiled kernels have separate threads (csrc/cpu/threads.cpp), which do not spin for long.

OpenMP's number of threads applies to torch and to the compiled kernels. It is one thread per core that the
process may use, but not more than the CPU quota of the control group. More threads would only use up the
quota sooner.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from pensieve.config import machine

# Time to load a model while another process is busy, compared with an otherwise idle machine: 1.2 times with
# a spin count of 1,000, 1.5 times with 5,000, 3 times with 100,000. On the idle machine, the spin count makes
# no difference.
SPIN_COUNT = 1000
SPIN_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
THREADS_VARIABLE = "OMP_NUM_THREADS"


def prepare_threads(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set OpenMP's variables, unless the operator has set them. Call this before torch is imported."""
    if not any(name in environ for name in SPIN_VARIABLES):
        environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    quota = machine.cpu_quota()
    if THREADS_VARIABLE not in environ and quota is not None:
        allowed = max(int(quota + 0.5), 1)
        if allowed < machine.num_cores():
            environ[THREADS_VARIABLE] = str(allowed)
