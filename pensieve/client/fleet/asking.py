"""Call several daemons at once. A daemon that does not answer yields an error, not an exception.

Runs on one event loop. Each call has its own deadline, so a daemon that is down, hangs or refuses the call
does not affect the other answers. A connection stays open until its replica is no longer listed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import grpc

from pensieve.client.channel import OPTIONS, Tls, credentials_of, metadata_of, target_of
from pensieve.client.fleet.replicas import Replica
from pensieve.client.grpc_errors import error_of_call
from pensieve.client.retry import Deadline
from pensieve.errors import DeadlineExceeded, PensieveError, whole_line
from pensieve.v1 import admin_pb2_grpc

if TYPE_CHECKING:  # the generated stubs define this name only for type checkers
    from pensieve.v1.admin_pb2_grpc import AdminServiceAsyncStub

T = TypeVar("T")
LATE_SECONDS = 1.0  # a call is abandoned this long after its deadline


@dataclass(frozen=True)
class ReplicaAnswer(Generic[T]):
    """The answer of one replica: a value, or an error."""

    replica: Replica
    value: T | None = None
    error: PensieveError | None = None

    @property
    def reason(self) -> str:
        """Why there is no value, in one line; "" if there is a value."""
        return whole_line(self.error) if self.error is not None else ""


class Connections:
    """A channel to each replica that was called."""

    def __init__(self, token: str | None, tls: Tls) -> None:
        self.metadata = metadata_of(token)
        self._credentials = credentials_of(tls)
        self._channels: dict[str, grpc.aio.Channel] = {}  # by target

    def stub(self, replica: Replica) -> AdminServiceAsyncStub:
        target = target_of(replica.address)
        if (channel := self._channels.get(target)) is None:
            if self._credentials is None or target.startswith("unix:"):
                channel = grpc.aio.insecure_channel(target, options=OPTIONS)
            else:
                channel = grpc.aio.secure_channel(target, self._credentials, options=OPTIONS)
            self._channels[target] = channel
        return admin_pb2_grpc.AdminServiceStub(channel)

    async def keep_only(self, replicas: Collection[Replica]) -> None:
        kept = {target_of(each.address) for each in replicas}
        for target in self._channels.keys() - kept:
            await self._channels.pop(target).close()

    async def close(self) -> None:
        await self.keep_only(())


async def ask_each(
    replicas: Sequence[Replica],
    call: Callable[[Replica, float], Awaitable[T]],
    seconds: float,
) -> list[ReplicaAnswer[T]]:
    """Return the answer of each replica, in order, after at most `seconds` plus LATE_SECONDS.

    `seconds` is also passed to `call`.
    """
    return await asyncio.gather(*(_ask(each, call, seconds) for each in replicas))


async def _ask(
    replica: Replica, call: Callable[[Replica, float], Awaitable[T]], seconds: float
) -> ReplicaAnswer[T]:
    try:
        async with asyncio.timeout(seconds + LATE_SECONDS):
            return ReplicaAnswer(replica, await call(replica, seconds))
    except TimeoutError:
        return ReplicaAnswer(replica, error=_late(seconds))
    except grpc.aio.AioRpcError as failure:
        return ReplicaAnswer(replica, error=call_error(failure, seconds))
    except PensieveError as error:
        return ReplicaAnswer(replica, error=error)


def call_error(failure: grpc.aio.AioRpcError, seconds: float) -> PensieveError:
    """Return the error for a call that had `seconds` to finish."""
    error = error_of_call(failure, Deadline(seconds))
    is_deadline = failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    return _late(seconds) if is_deadline else error


def _late(seconds: float) -> PensieveError:
    return DeadlineExceeded(f"no answer in {seconds:g} s")
