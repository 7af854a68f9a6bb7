"""The steps of every request before and after its endpoint, and error responses.

    Host and Origin   refuse web pages of other sites, and DNS rebinding
    caller            authenticate with a bearer token (or `x-api-key`), as over gRPC; health and version need
                      no token
    limits            apply the tenant's limits of calls, requests per second, received and unread bytes
    endpoint          answer, or raise a PensieveError
    owner             forward the request to the owner, if the endpoint raised OwnedElsewhere
    end               stop counting the call

The Host header is checked if callers need neither a token nor a client certificate. Without the check, a web
page could call the daemon under the page's own host name (DNS rebinding). These hosts are allowed: IP
addresses (rebinding needs a name), the machine's own names, and `hosts`. Requests with another site's Origin
are refused unless it is in `origins`. Only these origins get CORS headers.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from pensieve.api.forwarded import FORWARDED, ForwardedRequest, ForwardHttp
from pensieve.api.http import errors
from pensieve.api.http.exchange import Exchange, event
from pensieve.errors import OwnedElsewhere, PensieveError, PermissionDenied
from pensieve.guard.audit import AuditedCall
from pensieve.guard.callers import Caller
from pensieve.guard.guard import CallKind, Guard, GuardedCall

ENDPOINT = CallKind()
AUDITED_IDS = ("conversation_id", "prefix_id", "job_id")
Handler = Callable[[Exchange, Caller], Awaitable[Mapping[str, Any] | None]]
ErrorBody = Callable[[PensieveError], Mapping[str, Any]]
METHODS = "GET, POST, DELETE, OPTIONS"
HOST = re.compile(r"(\[[^][@]*\]|[^][:@]*)(?::[0-9]*)?")


@dataclass(frozen=True)
class Allowed:
    hosts: frozenset[str] = frozenset()  # host names; "*": any
    origins: frozenset[str] = frozenset()  # of other sites; "*": any
    is_local: bool = True  # only this machine can connect, and callers need no token


class Front:
    """What all endpoints share: checks of Host and Origin, bodies, callers."""

    def __init__(self, guard: Guard, allowed: Allowed, forward: ForwardHttp | None = None) -> None:
        """`forward`: None if no other daemon shares the history."""
        self.guard = guard
        self.allowed = allowed
        self.forward = forward

    # -- checks --

    def check_host_and_origin(self, exchange: Exchange) -> None:
        host = exchange.headers.get("host", "")
        allowed = self.allowed
        name = _host_name(host)
        if not (allowed.hosts & {name, "*"} or _is_ip_address(name)):
            raise PermissionDenied(
                f"the host name {name[:80]!r} is not allowed without tokens: use the daemon's IP "
                "address, or add the name with --http-hosts, or require tokens with --token-file"
            )
        origin = exchange.headers.get("origin")
        if origin is None or origin in allowed.origins or "*" in allowed.origins:
            self._allow_origin(exchange, origin)
        elif not host or _host_of(origin) != host:
            raise PermissionDenied(
                f"requests from pages of {origin[:80]!r} are refused; allow them with --http-origins"
            )

    def _allow_origin(self, exchange: Exchange, origin: str | None) -> None:
        if origin is None:
            return
        exchange.out |= {
            "access-control-allow-origin": origin,
            "access-control-expose-headers": "*",
            "vary": "Origin",
        }
        if exchange.method == "OPTIONS":
            wanted = exchange.headers.get("access-control-request-headers", "")
            exchange.out |= {
                "access-control-allow-methods": METHODS,
                "access-control-allow-headers": wanted or "*",
                "access-control-max-age": "600",
            }

    async def body(self, exchange: Exchange) -> bytes:
        """Return the body. Its bytes count towards the tenant's limit until the call ends."""
        assert exchange.call is not None
        if exchange.received is not None:
            return exchange.received
        raw = await exchange.call.body(in_pieces=True)
        if self.forward is not None:
            exchange.received = raw
        return raw


class Endpoint:
    """An ASGI application that runs an endpoint's handler."""

    def __init__(
        self,
        front: Front,
        handler: Handler,
        *,
        is_open: bool = False,
        is_deletion: bool = False,
        error_body: ErrorBody = errors.body_of,
        forward: ForwardHttp | None = None,
        kind: CallKind = ENDPOINT,
    ) -> None:
        """`is_open`: no token is needed, and no body is read.

        `is_deletion`: the call is audited, with the ids in `exchange.values`.

        `forward`: used instead of `front.forward`, for objects that are not conversations.
        """
        self._front, self._handler, self._is_open = front, handler, is_open
        self._is_deletion, self._error_body = is_deletion, error_body
        self._forward = forward or front.forward
        self._kind = kind

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        exchange = Exchange(scope, receive, send)
        task = asyncio.current_task()
        assert task is not None
        try:
            await self._answer(exchange)
        except asyncio.CancelledError:
            if task.cancelling() and not exchange.has_disconnected:
                raise  # the daemon stops
            while task.cancelling():  # the client has disconnected, or reads nothing
                task.uncancel()
        finally:
            await exchange.end()

    async def _answer(self, exchange: Exchange) -> None:
        front = self._front
        forwarded: ForwardedRequest | None = exchange.scope.get(FORWARDED)
        call = exchange.call = GuardedCall(
            *(front.guard, self._kind, _call_name(exchange), exchange),
            send_error=partial(self._send_error, exchange),
            audited=partial(_audited_call, exchange) if self._is_deletion else None,
        )
        async with call:
            exchange.check_framing()
            if forwarded is None:
                front.check_host_and_origin(exchange)
            if exchange.method == "OPTIONS":
                await exchange.answer_bytes(b"", "text/plain", 204)
                return
            by = Caller()
            if forwarded is not None:
                by = call.enter_forwarded(forwarded.caller)
                exchange.forwarding_key = forwarded.forwarding_key
            elif not self._is_open:
                by = await call.enter(_authorization(exchange))
            try:
                value = await self._handler(exchange, by)
            except OwnedElsewhere as owner:
                if forwarded is not None:
                    forwarded.owner = owner  # the forwarding daemon decides what to do
                    raise
                value = await self._forward_to_owner(exchange, by, owner)
            if value is not None:
                await exchange.answer(value)

    async def _forward_to_owner(
        self, exchange: Exchange, by: Caller, owner: OwnedElsewhere
    ) -> Mapping[str, Any] | None:
        """Let the owner answer. If this daemon has become the owner, answer here."""
        if self._forward is None or exchange.begun or exchange.was_read_in_chunks:
            raise owner
        await self._front.body(exchange)  # read the body, if the handler has not
        kept = {name: value for name, value in exchange.out.items() if _is_kept_header(name)}
        exchange.begin_anew(kept)
        if await self._forward(exchange, by, owner):
            return None
        exchange.begin_anew(kept)
        return await self._handler(exchange, by)

    async def _send_error(self, exchange: Exchange, error: PensieveError) -> None:
        body = self._error_body(error)
        exchange.call = None  # so that the error is sent even with too many unread bytes
        if exchange.begun:
            if exchange.is_stream:
                await exchange.write(event(body, "error" if "type" in body else ""))
                await exchange.end_events()
            return
        exchange.out = {
            name: value
            for name, value in exchange.out.items()
            if name == "request-id" or _is_kept_header(name)
        }
        exchange.out |= errors.retry_after(error)
        shape = errors.shape_of(error)
        if shape.status == 401:
            exchange.out["www-authenticate"] = "Bearer"
        await exchange.answer(body, shape.status)


def _is_kept_header(name: str) -> bool:
    """Return whether an error response keeps this header, which is about the origin or the connection."""
    return name in ("vary", "connection") or name.startswith("access-")


def _host_of(origin: str) -> str:
    """Return the host name and port of an Origin. Empty if the Origin is malformed."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _call_name(exchange: Exchange) -> str:
    """Return the call's name for logs."""
    return f"/http{ascii(exchange.path[:200])[1:-1]}"


def _authorization(exchange: Exchange) -> str | None:
    given = exchange.headers.get("authorization", "")
    if given[:7].lower() == "bearer ":
        return f"Bearer {given[7:].strip()}"
    if not given and (key := exchange.headers.get("x-api-key")):
        return f"Bearer {key}"
    return given or None


def _audited_call(exchange: Exchange) -> AuditedCall:
    ids = {name: exchange.values.get(name, "") for name in AUDITED_IDS}
    is_forwarded = FORWARDED in exchange.scope
    return AuditedCall("", is_deletion=True, is_forwarded=is_forwarded, **ids)


def _host_name(host: str) -> str:
    """Return the name in a Host header, without the port. A malformed header is returned unchanged."""
    found = HOST.fullmatch(host)
    return (host if found is None else found[1]).lower()


def own_names(bound: str) -> frozenset[str]:
    """Return the host names of this machine that browsers may use. `bound`: the listening host."""
    host_name = socket.gethostname().lower()
    label = host_name.partition(".")[0]
    mdns = f"{label}.local" if label else ""
    return frozenset({"localhost", host_name, label, mdns, bound.lower()}) - {""}


def _is_ip_address(name: str) -> bool:
    try:
        if name.startswith("[") and name.endswith("]"):
            ipaddress.IPv6Address(name[1:-1])
        else:
            ipaddress.IPv4Address(name)
    except ValueError:
        return False
    return True
