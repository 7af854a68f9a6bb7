"""Connect a daemon to the other daemons that share its history."""

from __future__ import annotations

import hashlib
import logging
import re
import socket
from dataclasses import dataclass
from pathlib import Path

import grpc

from pensieve.api.grpc.replica import KvFetcher
from pensieve.api.grpc.server import Server
from pensieve.config import Settings, read_secret
from pensieve.conversations.hand_over import KvReceiver
from pensieve.errors import ConfigError, InvalidArgument, PensieveError
from pensieve.guard.callers import Token
from pensieve.store.conversation_store import ConversationStore
from pensieve.store.owners import LEASE_SECONDS
from pensieve.store.records import ID_PATTERN

log = logging.getLogger("pensieve")
DATABASES = ("sqlite://", "postgresql://", "postgres://")


@dataclass(frozen=True)
class Sharing:
    """How a daemon takes part in a cluster."""

    replica: str = ""  # name of this daemon; empty: made from host and folder
    secret: str = ""
    certificates: bytes | None = None  # of the CA; None: the system's certificates
    announced: str = ""  # HOST:PORT for the other daemons; empty: the address that it listens on
    lease_seconds: float = LEASE_SECONDS

    def tokens(self) -> tuple[Token, ...]:
        """Return the token by which daemons with this secret call each other, if clients need tokens."""
        if not self.secret:
            return ()
        digest = hashlib.sha256(self.secret.encode()).digest()
        return (Token(digest, admin=True, name="replicas", is_peer=True),)

    def credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.certificates)


def sharing_of(settings: Settings) -> Sharing:
    """Read the settings of `pensieve serve` that concern sharing."""
    replica, ca = settings.replica or "", settings.cluster_ca
    announced = settings.announce or ""
    host, _, port = announced.rpartition(":")
    if announced and not (host and port.isdigit()):
        raise InvalidArgument("announce", f"{announced!r} is not HOST:PORT")
    if replica and not ID_PATTERN.fullmatch(replica):
        raise InvalidArgument("replica", "must be 1 to 128 characters of A-Z a-z 0-9 . _ ~ -")
    try:
        certificates = None if ca is None else ca.read_bytes()
    except OSError as error:
        raise ConfigError(f"--cluster-ca {ca}: {error.strerror}") from error
    return Sharing(
        *(replica, read_secret(settings.cluster_secret), certificates, announced), settings.lease
    )


def is_shared(url: str | None) -> bool:
    """Return whether several daemons may share the history at this URL."""
    return (url or "").startswith(DATABASES)


def is_server(url: str | None) -> bool:
    """Return whether the history is in a database server."""
    return is_shared(url) and not (url or "").startswith("sqlite://")


def open_store(data: Path, holder: str, url: str, sharing: Sharing) -> ConversationStore:
    """Open the history that `--store` names, or the one in the data folder."""
    replica = sharing.replica or (replica_name(data) if is_shared(url) else "")
    return ConversationStore.open(
        data, holder, url=url, replica=replica, lease_seconds=sharing.lease_seconds
    )


async def announce(server: Server, announced: str = "") -> None:
    """Tell the other daemons this daemon's addresses. Call this once the server listens."""
    store = server.daemon.store
    if store.is_shared:
        http = next((each.url.partition("://")[2] for each in server.beside), "")
        addresses = (announced or server.address, http, server.metrics_address)
        host = announced.rpartition(":")[0]
        places = [_at(host, each) for each in addresses]
        await server.daemon.threads.in_store("", store.announce, *places)


def _at(host: str, address: str) -> str:
    """Replace the host of the address, unless `host` or the address is empty."""
    return f"{host}:{address.rpartition(':')[2]}" if host and address else address


def fetch_kv(server: Server, sharing: Sharing) -> None:
    """Fetch the KV of conversations that other daemons had. Call this once the engine is ready."""
    daemon = server.daemon
    if daemon.store.is_shared:
        fetcher = KvFetcher(sharing.secret, server.listening.peers)
        daemon.events.begun.subscribe(KvReceiver(daemon, fetcher.fetch).turn_begun)


async def drain(server: Server) -> None:
    """Release the conversations to the other daemons, one by one as their turns end."""
    store = server.daemon.store
    if store.is_shared:
        try:
            await server.daemon.threads.in_store("", store.drain)
        except (
            PensieveError
        ) as error:  # the other daemons take them over when this process has ended
            log.warning("cannot tell the other daemons that this daemon stops: %s", error)


def replica_name(data: Path) -> str:
    """Name a daemon by host and data folder: stable across restarts, different for each folder."""
    host = re.sub(r"[^A-Za-z0-9._~-]", "-", socket.gethostname())[:80] or "host"
    return f"{host}-{hashlib.sha256(str(data.absolute()).encode()).hexdigest()[:6]}"
