"""A network link to a daemon, for tests that block in their own thread."""

from __future__ import annotations

from tests.cluster.links import Link
from tests.loop_thread import LoopThread


class Proxy:
    """Clients connect to `address`."""

    def __init__(self, target: str) -> None:
        self._loop, self._link = LoopThread(), Link(target)
        self._loop.run(self._link.open())
        self.address = self._link.address

    def freeze(self) -> None:
        """Deliver no more data. Neither side gets an error."""
        self._loop.do(self._link.hold)

    def reset(self) -> None:
        """End every connection with RST. New connections work."""
        self._loop.do(self._link.reset)

    def close(self) -> None:
        self._loop.run(self._link.close())
        self._loop.close()
