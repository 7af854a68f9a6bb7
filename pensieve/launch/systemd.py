"""Notify systemd of the daemon's state, with the protocol of sd_notify.

    READY=1       the daemon accepts turns
    STOPPING=1    the daemon drains
    WATCHDOG=1    the daemon is healthy; sent twice per period of WatchdogSec

Does nothing unless systemd has started the daemon and set NOTIFY_SOCKET. systemd kills a service that sends
no WATCHDOG=1 for WATCHDOG_USEC.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable

log = logging.getLogger("pensieve")


def notify(state: str) -> None:
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        try:
            sock.sendto(state.encode(), "\0" + address[1:] if address[0] == "@" else address)
        except OSError as error:
            log.warning("systemd was not notified: %s", error)


def watchdog_seconds() -> float | None:
    """Return the watchdog's period, or None if this process has no watchdog."""
    period = os.environ.get("WATCHDOG_USEC", "")
    of_process = os.environ.get("WATCHDOG_PID", "")
    if not period.isdigit() or not int(period) or of_process not in ("", str(os.getpid())):
        return None
    return int(period) / 1e6


async def keep_watchdog(wait_for_store: Callable[[], Awaitable[None]]) -> None:
    """Notify systemd as long as the event loop runs and `wait_for_store` returns.

    Runs in the serving loop.
    """
    period = watchdog_seconds()
    if period is None:
        return
    while True:
        await wait_for_store()
        notify("WATCHDOG=1")
        await asyncio.sleep(period / 2)
