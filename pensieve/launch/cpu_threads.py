"""How many threads compute, and how torch's wait for one another.

The compiled kernels have threads of their own (csrc/cpu/threads.cpp), which wait for nobody that has no
core.  What is left to torch runs on OpenMP's threads, which spin at a barrier before they sleep: by default
for seconds.  Beside another busy process that is very slow, since the last thread waits for a core that a
spinning one holds, and each barrier costs a time slice of the operating system.  Here they spin for some
microseconds.

Both have as many threads as OpenMP says: one for each core that the process may run on, but about as many as
the control group's quota lets run at once, since threads beyond it only use the quota up sooner.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from pensieve.config import machine

# Measured beside one busy process: loading a model takes 1.2 x of the quiet machine's time with 1,000, 1.5 x
# with 5,000 and 3 x with 100,000; a quiet machine sees no difference.
SPIN_COUNT = 1000
WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
THREADS = "OMP_NUM_THREADS"


def prepare_threads(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set what OpenMP reads when it is loaded and the operator has not set; torch is not imported yet."""
    if not any(name in environ for name in WAITING):
        environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    quota = machine.cpu_quota()
    if THREADS not in environ and quota is not None:
        allowed = max(int(quota + 0.5), 1)
        if allowed < machine.num_cores():
            environ[THREADS] = str(allowed)
