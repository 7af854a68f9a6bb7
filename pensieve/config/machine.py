"""Find the memory and the processors that this process may use.

Control groups (cgroups) may allow less than the machine has, for example in a container. Versions 1 and 2 are
supported. All groups from the process's own group up to the root are read, because each limits the groups
below it."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
CPU_INFO = Path("/proc/cpuinfo")


def available_memory_bytes() -> int:
    """Return the bytes of memory that can be used without swapping, within the control groups' limits."""
    try:
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except (OSError, ValueError):
        available = 4 * 2**30
    for folder in _control_groups("memory"):
        for limit_file, usage_file in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limits, usages = _numbers(folder / limit_file), _numbers(folder / usage_file)
            if limits and usages:
                taken = max(usages[0] - _cached_bytes(folder), 0)
                available = min(available, max(limits[0] - taken, 0))
    return available


def processor_name() -> str:
    try:
        lines = CPU_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def num_cores() -> int:
    """Return the number of processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_quota() -> float | None:
    """Return the control groups' CPU quota as a number of processors. None: no limit."""
    quotas: list[float] = []
    for folder in _control_groups("cpu"):
        both = _numbers(folder / "cpu.max")
        if len(both) != 2:
            both = [*_numbers(folder / "cpu.cfs_quota_us"), *_numbers(folder / "cpu.cfs_period_us")]
        if len(both) == 2 and both[0] > 0 and both[1] > 0:
            quotas.append(both[0] / both[1])
    return min(quotas, default=None)


def _control_groups(controller: str) -> Iterator[Path]:
    """Yield the folders of the control groups of this process that have this controller."""
    try:
        lines = OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":  # version 2
            mounts = [GROUPS, GROUPS / "unified"]
        elif controller in controllers.split(","):
            mounts = [GROUPS / controller, GROUPS / controllers]
        else:
            continue
        inside = Path(path.lstrip("/"))  # in a container, this may be a path of the host
        for mount in mounts:
            yield from (mount / each for each in (inside, *inside.parents))


def _cached_bytes(folder: Path) -> int:
    """Return the size of a group's inactive file cache, which the kernel frees before it refuses memory."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
        figures = dict(line.split() for line in lines if line.count(" ") == 1)
        own = figures.get("inactive_file", "0")  # in version 1, this leaves out the groups below
        return int(figures.get("total_inactive_file", own))
    except (OSError, ValueError):
        return 0


def _numbers(path: Path) -> list[int]:
    """Return the numbers in a file; an empty list if the file is missing or contains "max"."""
    try:
        return [int(each) for each in path.read_text().split()]
    except (OSError, ValueError):
        return []
