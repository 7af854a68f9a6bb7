"""Makes OpenMP's threads spin only briefly at a barrier before they sleep.

Kernels and torch run on OpenMP's threads, which spin at a barrier before they sleep.  Spinning is the
fastest way to wait while every thread has a core.  Beside another busy process it is very slow: the last
thread waits for a core that a spinning one holds, and each barrier costs a time slice of the operating
system.  By default GNU OpenMP spins for seconds; here it spins for some microseconds.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

SPIN_COUNT = (
    5000  # 1,000 to 5,000 suffice beside busy processes; fewer are slower on an idle machine
)
SET_BY_OPERATOR = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def spin_briefly(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the variable that OpenMP reads when it is loaded; to be called before torch is imported."""
    if not any(name in environ for name in SET_BY_OPERATOR):
        environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
