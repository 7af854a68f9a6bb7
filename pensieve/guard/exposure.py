"""The settings of a daemon's sockets, and checks that other machines cannot reach the daemon by accident."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pensieve.errors import ConfigError
from pensieve.guard.callers import Token

# schemes of gRPC addresses
NOT_HOST_NAMES = ("unix", "unix-abstract", "vsock")
METRICS_ON_HTTP = "http"  # value of `metrics`: serve them on the port of the HTTP APIs
HOST_PATTERN = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")


@dataclass(frozen=True)
class Listening:
    address: str = "127.0.0.1:50051"  # "": listen only on the socket
    socket: Path | None = None  # for the operator on this machine
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    tokens: Sequence[Token] = ()
    token_file: Path | None = None  # source of `tokens`, reloaded when it changes
    audit_log: Path | None = None
    insecure: bool = False
    hand_over: bool = False  # offer KV to other daemons of a cluster
    keepalive_seconds: float = 30.0  # between pings of an idle connection
    ping_timeout_seconds: float = 10.0  # a connection that does not answer a ping in time is closed
    connections_max: int = 512  # on `address`; the socket has its own limit
    http: str = ""  # HOST:PORT of the HTTP APIs; "": no HTTP
    http_hosts: frozenset[str] = frozenset()  # further allowed Host names; "*": any
    http_origins: frozenset[str] = frozenset()  # allowed origins of other sites; "*": any
    metrics: str = ""  # HOST:PORT where metrics are served, or METRICS_ON_HTTP; "": not served
    peer_tokens: Sequence[Token] = ()  # of other daemons, if clients need tokens
    peers: Any = None  # credentials for calls to other daemons; None: no TLS
    peer_secret: str = field(default="", repr=False)  # shared by the daemons of a cluster


def check_exposure(listening: Listening) -> None:
    """Raise ConfigError for malformed addresses, incomplete TLS, or a daemon that is open by accident."""
    given = {"--tls-key": listening.tls_key, "--tls-client-ca": listening.tls_client_ca}
    for flag, path in given.items():
        if path is not None and listening.tls_cert is None:
            raise ConfigError(f"{flag} needs --tls-cert: without it, connections are not encrypted")
    if listening.tls_cert is not None and listening.tls_key is None:
        raise ConfigError("--tls-cert needs --tls-key")
    if listening.metrics == METRICS_ON_HTTP:
        if not listening.http:
            raise ConfigError("--metrics http needs --http, whose port it uses")
    elif listening.metrics:
        host = _host_of("--metrics", listening.metrics)
        if not is_loopback(host) and not listening.insecure:
            raise ConfigError(
                f"--metrics {listening.metrics} is reachable from other machines without TLS: listen on "
                "127.0.0.1, or add --insecure"
            )
    for flag, address in (("--address", listening.address), ("--http", listening.http)):
        if address:
            _check_address(flag, address, listening)


def _check_address(flag: str, address: str, listening: Listening) -> None:
    host = _host_of(flag, address)
    if is_loopback(host) or listening.insecure:
        return
    if listening.tls_cert is None or not (listening.tokens or listening.tls_client_ca):
        raise ConfigError(
            f"{flag} {address} is reachable from other machines: add --tls-cert, --tls-key and "
            "--token-file (or --tls-client-ca), or --insecure"
        )


def _host_of(flag: str, address: str) -> str:
    host, _, port = address.rpartition(":")
    if not _is_host(host) or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65_535:
        raise ConfigError(f"{flag} {address!r} is not HOST:PORT, with a port in 0..65535")
    return host


def _is_host(host: str) -> bool:
    """Return whether this is a host name or an IP address. An IPv6 address must be in brackets.

    gRPC would also accept UNIX sockets. But a peer on a UNIX socket counts as the operator, so the socket in
    the data folder must be the only one.
    """
    if host.startswith("["):
        return host.endswith("]") and _ip_address(host) is not None
    return HOST_PATTERN.fullmatch(host) is not None and host.lower() not in NOT_HOST_NAMES


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the host. False for every name other than localhost."""
    found = _ip_address(host)
    return found.is_loopback if found is not None else host.lower() == "localhost"


def _ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None
