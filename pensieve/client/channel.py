"""What the gRPC channels of both clients share: addresses, TLS, token, options, and the turns being read."""

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
ADDRESS_VARIABLE = "PENSIEVE_DAEMON"  # as the commands that talk to a daemon have it
OPTIONS = (
    ("grpc.enable_retries", 0),  # retry.py knows which requests may be sent twice; gRPC does not
    ("grpc.max_receive_message_length", 8 << 20),
    ("grpc.max_send_message_length", 8 << 20),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
)
# Where there is another daemon to go to, one that swallows packets is noticed sooner.
SEVERAL_OPTIONS = (
    *(each for each in OPTIONS if not each[0].startswith("grpc.keepalive")),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.min_reconnect_backoff_ms", 3_000),  # as long as a connection may take to be made
)
SESSION_KEY = "session_id"  # Ray Serve's name on gRPC; another one scatters calls without an error
HOME_KEY = "pensieve-home"  # a daemon that has forwarded a call says where the conversation is
CHECK_SECONDS = 2.0  # that an address which failed has to say that it serves
HEALTH_METHOD = "/grpc.health.v1.Health/Check"
NOT_SERVING = "it does not serve at present"
Address = str | Sequence[str]
Tls = bool | str | Path | grpc.ChannelCredentials
Metadata = tuple[tuple[str, str], ...]
AnyStream = TypeVar("AnyStream")
AnyEnding = TypeVar("AnyEnding")


def names_of(address: Address | None) -> tuple[str, ...]:
    """The addresses that a client was given: a text with commas, or a list; None takes the default."""
    if address is None:
        address = os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS
    given = address.split(",") if isinstance(address, str) else list(address)
    names = [target_of(each.strip()) for each in given]
    if not names or not all(names) or any("\n" in name for name in names):
        raise InvalidArgument(
            "address", "is HOST:PORT or unix:PATH, or several with commas between"
        )
    if len({*names}) < len(names):
        raise InvalidArgument("address", "names one daemon twice")
    return tuple(names)


def target_of(address: str) -> str:
    """The gRPC target of HOST:PORT or unix:PATH, with or without the grpc:// of `pensieve serve`."""
    return address.removeprefix("grpc://")


def credentials_of(tls: Tls) -> grpc.ChannelCredentials | None:
    """The credentials for a `tls` argument; None is a connection without TLS.

    True trusts the system's certificate authorities, and a path the authority whose certificate it
    holds; credentials are used as they are.
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
    """The header that carries the token.  Space around the token, as in a file, is removed."""
    token = (token or "").strip()
    if not all("!" <= character <= "~" for character in token):
        # The message does not repeat the token, which is a secret.
        raise InvalidArgument("token", "holds a character that no token has")
    return (("authorization", f"Bearer {token}"),) if token else ()


def key_of(request: object) -> str:
    """What a request is about, by which it is routed: a conversation's id, or a job's; else nothing."""
    for name in ("conversation_id", "job_id"):
        if key := getattr(request, name, ""):
            return str(key)
    return ""


def routed(metadata: Metadata, key: str) -> Metadata:
    """The metadata of a call about this key; an id that no conversation can have is left out."""
    return (*metadata, (SESSION_KEY, key)) if ID_PATTERN.fullmatch(key) else metadata


def home_in(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Where a daemon says that the conversation is; empty if it says nothing."""
    return next((str(value) for name, value in metadata or () if name == HOME_KEY), "")


class BaseConnection(Generic[AnyStream, AnyEnding]):
    """What the connections of both clients have: addresses, a token, and the turns that are being read."""

    def __init__(self, addresses: Addresses, token: str | None, tls: Tls) -> None:
        self.addresses = addresses
        self._metadata = metadata_of(token)
        self._closed = False
        self._credentials = credentials_of(tls)
        self._options = SEVERAL_OPTIONS if addresses.are_several else OPTIONS
        self._endings: set[AnyEnding] = set()  # of turns that were left
        self._reading: dict[TurnCourse, AnyStream] = {}  # turns
        self._attached: dict[str, TurnCourse] = {}  # of these, the last of each conversation

    def route(self, key: str, *, is_of_one: bool = False) -> Route:
        """The way of a request about this conversation or job; while its turn is read, to where that is."""
        course = self._attached.get(key)
        at = course.route.at if course is not None else ""
        return Route(self.addresses, key, at, is_of_one=is_of_one)

    def begin_reading(self, course: TurnCourse, stream: AnyStream) -> None:
        """The turn is attached: what else is about its conversation goes where it is."""
        self._reading[course] = stream
        self._attached[course.request.conversation_id] = course

    def end_reading(self, course: TurnCourse) -> None:
        """It no longer is.  A finalizer may call it."""
        self._reading.pop(course, None)
        if self._attached.get(course.request.conversation_id) is course:
            self._attached.pop(course.request.conversation_id, None)

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidArgument("client", "is closed")
