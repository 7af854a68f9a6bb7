"""Asks the history service who owns a conversation.

Where that service listens, replicas say in their routing statistics, which Ray brings to every router.  The
owner's name is the one that its daemon has, and that is the id of its replica in Ray (settings.py).  What is
asked for is a conversation without a tenant: a router does not know whose a call is, and the history finds
conversations by a digest of tenant and id together.  A tenant's conversation goes where this router has sent
it before, or by its hash; a call that comes to another replica than the owner's is passed on.

The files of the secret and of the authority are those that the daemons read; this process may be on a node
that lacks them.  They are read again while the service does not take them, for they may be new.  Whatever
keeps it from asking is logged once, until it works again: calls go by hash then.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from pensieve.cluster.homes import LOCATE_TIMEOUT, Locate
from pensieve.config import read_secret
from pensieve.errors import ConfigError, Unavailable
from pensieve.v1 import history_pb2 as pb
from pensieve.v1 import history_pb2_grpc

log = logging.getLogger("ray.serve")
READ_AGAIN_SECONDS = 5.0
OPTIONS = (("grpc.max_reconnect_backoff_ms", 1000), ("grpc.enable_retries", 0))
# What another secret or another authority may mend: a handshake that fails is UNAVAILABLE, like an absence.
BY_FILES = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE)


class Service(NamedTuple):
    """Where the history service is, and what is needed to ask it."""

    address: str
    secret: str = ""  # files
    ca: str = ""


_locators: dict[Service, Locate] = {}  # of a router's process


def locate_from(replicas: Sequence[Any]) -> Locate | None:
    """None while no replica has said where the history service is."""
    for each in replicas:
        stats = each.routing_stats or {}
        if stats.get("history"):
            service = Service(stats["history"], stats.get("secret", ""), stats.get("ca", ""))
            if service not in _locators:
                _locators[service] = Locator(service)
            return _locators[service]
    return None


def channel_to(
    address: str, credentials: Callable[[], grpc.ChannelCredentials]
) -> grpc.aio.Channel:
    """`address` is as --store takes it; `credentials` are those for TLS."""
    scheme, _, target = address.partition("://")
    if scheme == "historys":
        return grpc.aio.secure_channel(target, credentials(), OPTIONS)
    return grpc.aio.insecure_channel(target, OPTIONS)


def trusting(ca: str) -> grpc.ChannelCredentials:
    """The authority in this file, or the machine's; OSError if it cannot be read."""
    return grpc.ssl_channel_credentials(Path(ca).read_bytes() if ca else None)


class Locator:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._is_failing = False
        self._open()

    def _open(self) -> None:
        """With the files as they are now."""
        self._opened_at = time.monotonic()
        self._is_stale = False
        channel = channel_to(self._service.address, self._credentials)
        self._stub = history_pb2_grpc.HistoryServiceStub(channel)
        secret = self._secret()
        self._metadata = (("authorization", f"Bearer {secret}"),) if secret else ()

    async def __call__(self, key: str) -> str | None:
        if self._is_stale and time.monotonic() - self._opened_at > READ_AGAIN_SECONDS:
            self._open()
        request = pb.LocateRequest(conversation_id=key)
        try:
            # A bit less than routers wait, so that its end is known here.
            call: Any = self._stub.Locate(
                request, metadata=self._metadata, timeout=0.9 * LOCATE_TIMEOUT
            )
            found: pb.LocateResponse = await call
        except grpc.aio.AioRpcError as error:
            if error.code() in BY_FILES:
                self._is_stale = True
            self._fails(error.details() or error.code().name)
            raise Unavailable(f"the history service: {error.details()}") from error
        self._is_failing = False
        return found.replica or None

    def _credentials(self) -> grpc.ChannelCredentials:
        try:
            return trusting(self._service.ca)
        except OSError as error:
            self._is_stale = True
            self._fails(f"cannot read {error.filename}: {error.strerror}")
            return grpc.ssl_channel_credentials()

    def _secret(self) -> str:
        file = self._service.secret
        try:
            return read_secret(Path(file)) if file else ""
        except ConfigError as error:
            self._is_stale = True
            self._fails(str(error))
            return ""

    def _fails(self, why: str) -> None:
        if not self._is_failing:
            log.warning(
                "the router cannot ask %s who owns a conversation, and goes by hash: %s",
                self._service.address,
                why,
            )
        self._is_failing = True
