"""Which replicas there are: from a list, or from whoever knows (`Discovery`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pensieve.errors import InvalidArgument

NAME = re.compile(r"[A-Za-z0-9._~-]{1,128}")


@dataclass(frozen=True)
class Replica:
    """One daemon of several.

    Attributes:
        name: what it is called in rows and labels; its address where it has no name.
        address: of its gRPC services, HOST:PORT or unix:PATH.
        metrics_address: where it serves GET /metrics; "" where nobody has said.
        state: as whoever lists it says, such as "alive" or "draining"; "" where nobody does.
    """

    name: str
    address: str
    metrics_address: str = ""
    state: str = ""

    @property
    def is_named(self) -> bool:
        return self.name != self.address


class Discovery(Protocol):
    """Whoever knows the replicas."""

    async def list_replicas(self) -> Sequence[Replica]:
        """Those that there are now, in the order in which they are shown."""
        ...


class FixedReplicas:
    """Those of a list."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = tuple(replicas)

    async def list_replicas(self) -> Sequence[Replica]:
        return self._replicas


def replicas_of(text: str, field: str = "replicas") -> tuple[Replica, ...]:
    """From `name=address,…`, where a name may be left out; InvalidArgument names the `field` it came from."""
    found: dict[str, Replica] = {}
    for each in filter(None, (part.strip() for part in text.split(","))):
        name, is_named, address = each.partition("=")
        if "/" in name or ":" in name:  # an address whose path has an =
            name, is_named, address = "", "", each
        address = address.strip() if is_named else each
        name = name.strip() if is_named else address
        if is_named and not NAME.fullmatch(name):
            raise InvalidArgument(field, f"{name!r} is no name: A-Z a-z 0-9 . _ ~ - make one")
        if not address:
            raise InvalidArgument(field, f"{name} has no address")
        if name in found:
            raise InvalidArgument(field, f"{name} is there twice")
        found[name] = Replica(name, address)
    if not found:
        raise InvalidArgument(field, "names no replica: it is NAME=HOST:PORT,…")
    return tuple(found.values())
