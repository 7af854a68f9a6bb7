"""How much memory this process may take."""

from __future__ import annotations

import os
from pathlib import Path


def available_memory_bytes() -> int:
    """Memory that can be taken without swapping, within the control group's limit."""
    try:
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except (OSError, ValueError):
        available = 4 * 2**30
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text().strip()
        if limit.isdigit():
            available = min(available, max(int(limit) - int(used), 0))
    except (OSError, ValueError):
        return available
    return available
