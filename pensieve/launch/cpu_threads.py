"""How long threads that compute spin at a barrier before they sleep.

Kernels and torch run on OpenMP's threads, which spin at a barrier before they sleep.  Spinning is
quickest while every thread has a core.  Beside any other busy process it is ruinous: the last thread
waits for a core that a spinning one holds, and each barrier costs a time slice of the operating system.
By default GNU OpenMP spins for seconds; here it spins for some microseconds.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

SPIN_COUNT = 5000  # 1,000 to 5,000 do beside busy processes; fewer cost more when it is quiet
SET_BY_OPERATOR = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def spin_briefly(environ: MutableMapping[str, str] = os.environ) -> None:
    """Must be called before torch is imported: the library reads this once, when it is loaded."""
    if not any(name in environ for name in SET_BY_OPERATOR):
        environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
