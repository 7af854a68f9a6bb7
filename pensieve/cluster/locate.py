"""Asks the history service who owns a conversation.

Where that service listens, replicas say in their routing statistics, which Ray brings to every router.  The
owner's name is the one that its daemon has, and that is the id of its replica in Ray (settings.py).  What is
asked for is a conversation without a tenant: a router does not know whose a call is, and a tenant's
conversation goes where it was sent before, or by its hash.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from pensieve.cluster.homes import Locate
from pensieve.config.shared_secret import read_secret
from pensieve.errors import ConfigError, Unavailable
from pensieve.v1 import history_pb2 as pb
from pensieve.v1 import history_pb2_grpc

_locators: dict[
    tuple[str, str], Locate
] = {}  # of a router's process, by address and file of the secret


def locate_from(replicas: Sequence[Any]) -> Locate | None:
    """None while no replica has said where the history service is."""
    for each in replicas:
        stats = each.routing_stats or {}
        address, secret = stats.get("history", ""), stats.get("secret", "")
        if address:
            if (address, secret) not in _locators:
                _locators[address, secret] = _locator(address, secret)
            return _locators[address, secret]
    return None


def _locator(address: str, secret_file: str) -> Locate:
    scheme, _, target = address.partition("://")
    options = (("grpc.max_reconnect_backoff_ms", 1000), ("grpc.enable_retries", 0))
    channel = (
        grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(), options)
        if scheme == "historys"
        else grpc.aio.insecure_channel(target, options)
    )
    stub = history_pb2_grpc.HistoryServiceStub(channel)
    try:
        secret = read_secret(Path(secret_file)) if secret_file else ""
    except ConfigError:  # it is on the replicas' nodes alone
        secret = ""
    metadata = (("authorization", f"Bearer {secret}"),) if secret else ()

    async def locate(key: str) -> str | None:
        request = pb.LocateRequest(conversation_id=key)
        try:
            call: Any = stub.Locate(request, metadata=metadata)
            found: pb.LocateResponse = await call
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"the history service: {error.details()}") from error
        return found.replica or None

    return locate
