"""Kills a child that runs and answers nobody: a process that is stopped, or whose loop stands still.

    answers ──CHECKS_MAX checks in a row without any answer──> killed; its actor ends, and Ray starts another

Any answer of gRPC's counts, a refusal too: whether the child *serves* is not asked here.  Checks are
counted and not seconds, so that a machine that slept, and with it this process, finds nothing overdue; and
only once one was answered, for where none ever is, the fault may be here (a certificate).  A child that is
killed loses nothing (that is what its store is for), so killing one that would have come back costs a
restart; told to end in order, one that hangs would keep its port and its lock until Ray's patience is over.
"""

from __future__ import annotations

import logging

import grpc

from pensieve.cluster.child_process import ChildProcess
from pensieve.cluster.grpc_methods import health

log = logging.getLogger("ray.serve")
CHECKS_MAX = 6
CHECK_SECONDS = 3.0
NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class Watchdog:
    def __init__(self, child: ChildProcess, channel: grpc.aio.Channel) -> None:
        self._child = child
        self._channel = channel
        self._num_missed = 0  # in a row
        self.has_answered = False

    async def look(self, seconds: float = CHECK_SECONDS) -> None:
        """One check, which has so long."""
        if await self._answers(seconds):
            self._num_missed, self.has_answered = 0, True
            return
        self._num_missed += 1
        if self._num_missed == CHECKS_MAX and self.has_answered:
            log.error("it has not answered %d checks in a row, and is killed", CHECKS_MAX)
            self._child.kill()

    async def _answers(self, seconds: float) -> bool:
        try:
            await health(self._channel, seconds)
        except grpc.aio.AioRpcError as error:
            return error.code() not in NO_ANSWER
        return True
