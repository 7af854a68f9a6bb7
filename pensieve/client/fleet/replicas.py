"""A replica, and the parser of its notation `name=address`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pensieve.errors import InvalidArgument

NAME = re.compile(r"[A-Za-z0-9._~-]{1,128}")


@dataclass(frozen=True)
class Replica:
    """One daemon of several.

    Attributes:
        name: the replica's name in rows and labels; its address if it has no name.
        address: HOST:PORT or unix:PATH of its gRPC services.
        metrics_address: HOST:PORT where it serves GET /metrics; "" if unknown.
        state: such as "alive" or "draining", according to the daemon that listed the replica; "" if unknown.
    """

    name: str
    address: str
    metrics_address: str = ""
    state: str = ""

    @property
    def is_named(self) -> bool:
        return self.name != self.address


def replicas_of(text: str, field: str = "replicas") -> tuple[Replica, ...]:
    """Parse `name=address,…`; names are optional. Errors name the argument `field`."""
    found: dict[str, Replica] = {}
    for each in filter(None, (part.strip() for part in text.split(","))):
        name, is_named, address = each.partition("=")
        if "/" in name or ":" in name:  # not a name: the `=` belongs to the address
            name, is_named, address = "", "", each
        address = address.strip() if is_named else each
        name = name.strip() if is_named else address
        if is_named and not NAME.fullmatch(name):
            raise InvalidArgument(field, f"invalid name {name!r}: use A-Z a-z 0-9 . _ ~ -")
        if not address:
            raise InvalidArgument(field, f"{name} has no address")
        if name in found:
            raise InvalidArgument(field, f"names {name} twice")
        found[name] = Replica(name, address)
    if not found:
        raise InvalidArgument(field, "names no replica: use NAME=HOST:PORT,…")
    return tuple(found.values())
