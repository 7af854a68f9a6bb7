"""A replica as its operator names it: `name=address`."""

from __future__ import annotations

import re
from dataclasses import dataclass

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
