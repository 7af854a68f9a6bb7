"""What the connections of both clients share: addresses, TLS, token, gRPC options, turns being read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import grpc

from pensieve.client.addresses import Addresses, Route
from pensieve.client.requests import ID_PATTERN
from pensieve.client.turn_progress import TurnCourse
from pensieve.errors import ConfigError, InvalidArgument

DEFAULT_ADDRESS = "127.0.0.1:50051"
ADDRESS_VARIABLE = "PENSIEVE_DAEMON"  # shared with the CLI
OPTIONS = (
    # retry.py retries, because gRPC does not know which requests may be sent twice.
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", 8 << 20),
    ("grpc.max_send_message_length", 8 << 20),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
)
# With several addresses, a host that does not respond must be detected sooner.
SEVERAL_OPTIONS = (
    *(each for each in OPTIONS if not each[0].startswith("grpc.keepalive")),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.min_reconnect_backoff_ms", 3_000),  # also the limit for one connection attempt
)
# Ray Serve's metadata key for session affinity. With another key, Ray sends calls to arbitrary replicas.
SESSION_KEY = "session_id"
HOME_KEY = "pensieve-home"  # response metadata of a forwarded call: the address of the conversation's owner
CHECK_SECONDS = 2.0  # timeout of a health check
HEALTH_METHOD = "/grpc.health.v1.Health/Check"
NOT_SERVING = "the daemon is not serving at present"
Address = str | Sequence[str]
Tls = bool | str | Path | grpc.ChannelCredentials
Metadata = tuple[tuple[str, str], ...]
AnyStream = TypeVar("AnyStream")
AnyEnding = TypeVar("AnyEnding")


def names_of(address: Address | None) -> tuple[str, ...]:
    """Return a client's addresses from comma-separated text or a list. None: the default address."""
    if address is None:
        address = os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS
    given = address.split(",") if isinstance(address, str) else list(address)
    names = [target_of(each.strip()) for each in given]
    if not names or not all(names) or any("\n" in name for name in names):
        raise InvalidArgument(
            "address", "must be HOST:PORT or unix:PATH, or several separated by commas"
        )
    if len({*names}) < len(names):
        raise InvalidArgument("address", "must not name a daemon twice")
    return tuple(names)


def target_of(address: str) -> str:
    """Return the gRPC target for an address, which may begin with grpc:// (as `pensieve serve` prints it)."""
    return address.removeprefix("grpc://")


def credentials_of(tls: Tls) -> grpc.ChannelCredentials | None:
    """Return the credentials for a `tls` argument. None: a connection without TLS.

    `tls`: False (no TLS), True (trust the system's certificate authorities), the path of a CA certificate to
    trust, or gRPC credentials.
    """
    if tls is False:
        return None
    if tls is True:
        return grpc.ssl_channel_credentials()
    if isinstance(tls, str | Path):
        try:
            return grpc.ssl_channel_credentials(Path(tls).read_bytes())
        except OSError as error:
            raise ConfigError(f"cannot read the certificate {tls}: {error.strerror}") from error
    return tls


def metadata_of(token: str | None) -> Metadata:
    """Return the header that carries the token, with surrounding whitespace removed."""
    token = (token or "").strip()
    if not all("!" <= character <= "~" for character in token):
        # The message must not contain the token, which is a secret.
        raise InvalidArgument("token", "must be printable ASCII without spaces")
    return (("authorization", f"Bearer {token}"),) if token else ()


def key_of(request: object) -> str:
    """Return the id of a request's conversation or job; empty if the request has none.

    The id decides to which address the request is sent.
    """
    for name in ("conversation_id", "job_id"):
        if key := getattr(request, name, ""):
            return str(key)
    return ""


def with_routing_key(metadata: Metadata, key: str) -> Metadata:
    """Add the routing key to a call's metadata, if the key is a valid id."""
    return (*metadata, (SESSION_KEY, key)) if ID_PATTERN.fullmatch(key) else metadata


def home_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Return the address of the conversation's owner from response metadata; empty if there is none."""
    return next((str(value) for name, value in metadata or () if name == HOME_KEY), "")


class BaseConnection(Generic[AnyStream, AnyEnding]):
    """Base class of both clients' connections: addresses, token, and the turns that are being read."""

    def __init__(self, addresses: Addresses, token: str | None, tls: Tls) -> None:
        self.addresses = addresses
        self._metadata = metadata_of(token)
        self._closed = False
        self._credentials = credentials_of(tls)
        self._options = SEVERAL_OPTIONS if addresses.are_several else OPTIONS
        self._endings: set[AnyEnding] = set()  # turns that the server is being asked to stop
        self._reading: dict[TurnCourse, AnyStream] = {}  # turns that are being read
        self._attached: dict[str, TurnCourse] = {}  # by conversation: its latest turn in `_reading`

    def route(self, key: str) -> Route:
        """Return the route for a conversation or job. If a turn is being read, its address comes first."""
        course = self._attached.get(key)
        at = course.route.at if course is not None else ""
        return Route(self.addresses, key, at)

    def begin_reading(self, course: TurnCourse, stream: AnyStream) -> None:
        """Note that a turn is being read. Other calls of its conversation then go to the turn's address."""
        self._reading[course] = stream
        self._attached[course.request.conversation_id] = course

    def end_reading(self, course: TurnCourse) -> None:
        """Note that a turn is no longer being read. A finalizer may call this."""
        self._reading.pop(course, None)
        if self._attached.get(course.request.conversation_id) is course:
            self._attached.pop(course.request.conversation_id, None)

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidArgument("client", "is closed")
