"""What a daemon looks at every second: how late its loop is, readers that take nothing, pending erasures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from pensieve import gc_pause
from pensieve.service.erasing import Erasing
from pensieve.service.readers import Readers

log = logging.getLogger("pensieve")
SWEEP_SECONDS = 1.0
LATE_SECONDS = 1.0  # of the loop, that are worth a warning


async def sweep(num_turns: Callable[[], int], readers: Readers, erasing: Erasing) -> None:
    """For as long as the daemon serves."""
    loop = asyncio.get_running_loop()
    has_collected, before = False, loop.time()
    while True:
        await asyncio.sleep(SWEEP_SECONDS)
        late = loop.time() - before - SWEEP_SECONDS
        if late > LATE_SECONDS:
            log.warning("the service stood still for %.1f s: every stream waited", late)
        before = loop.time()
        is_idle = not num_turns()
        if is_idle and not has_collected:
            gc_pause.collect()
        has_collected = is_idle
        readers.cancel_stalled()
        erasing.sweep()
