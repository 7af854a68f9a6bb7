"""What systemd is told of the service that it started, in datagrams of sd_notify's protocol.

    READY=1       turns may come           WATCHDOG=1    it is healthy: twice in each period of WatchdogSec
    STOPPING=1    it drains, and ends

Nothing happens where systemd did not start us: it says so in NOTIFY_SOCKET, and in WATCHDOG_USEC the period
after which it kills a service that it has not heard of.
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
    """The period of the watchdog, if there is one for this process."""
    period = os.environ.get("WATCHDOG_USEC", "")
    of_process = os.environ.get("WATCHDOG_PID", "")
    if not period.isdigit() or not int(period) or of_process not in ("", str(os.getpid())):
        return None
    return int(period) / 1e6


async def keep_watchdog(answers: Callable[[], Awaitable[None]]) -> None:
    """In the loop that serves: as long as it goes round and `answers` returns, systemd hears of it."""
    period = watchdog_seconds()
    if period is None:
        return
    while True:
        await answers()
        notify("WATCHDOG=1")
        await asyncio.sleep(period / 2)
