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
    """The settings of a daemon that shares its history with others."""

    replica: str = ""  # name of this daemon; empty: derived from host and folder
    secret: str = ""
    certificates: bytes | None = None  # CA certificates; None: the system's certificates
    announced: str = ""  # HOST:PORT for the other daemons; empty: the address of the listener
    lease_seconds: float = LEASE_SECONDS

    def tokens(self) -> tuple[Token, ...]:
        """Return the token that daemons with this secret use to call each other.

        Without a secret, return an empty tuple.
        """
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
    """Open the history at `url` (`--store`), or the history in the data folder."""
    replica = sharing.replica or (replica_name(data) if is_shared(url) else "")
    return ConversationStore.open(
        data, holder, url=url, replica=replica, lease_seconds=sharing.lease_seconds
    )


async def announce(server: Server, announced: str = "") -> None:
    """Tell the other daemons this daemon's addresses. Call this when the server is listening."""
    store = server.daemon.store
    if store.is_shared:
        http = next((each.url.partition("://")[2] for each in server.other_listeners), "")
        addresses = (announced or server.address, http, server.metrics_address)
        host = announced.rpartition(":")[0]
        full_addresses = [_with_host(host, each) for each in addresses]
        await server.daemon.threads.in_store("", store.announce, *full_addresses)


def _with_host(host: str, address: str) -> str:
    """Replace the host of the address, unless `host` or the address is empty."""
    return f"{host}:{address.rpartition(':')[2]}" if host and address else address


def fetch_kv(server: Server, sharing: Sharing) -> None:
    """Fetch KV of claimed conversations from their previous owners. Call this when the engine is ready."""
    daemon = server.daemon
    if daemon.store.is_shared:
        fetcher = KvFetcher(sharing.secret, server.listening.peers)
        daemon.events.begun.subscribe(KvReceiver(daemon, fetcher.fetch).turn_begun)


async def drain(server: Server) -> None:
    """Release the conversations to the other daemons, each when its turn ends."""
    store = server.daemon.store
    if store.is_shared:
        try:
            await server.daemon.threads.in_store("", store.drain)
        except (
            PensieveError
        ) as error:  # the other daemons can claim the conversations after this process has ended
            log.warning("cannot tell the other daemons that this daemon stops: %s", error)


def replica_name(data: Path) -> str:
    """Return a name made from host and data folder. It survives restarts and differs for each folder."""
    host = re.sub(r"[^A-Za-z0-9._~-]", "-", socket.gethostname())[:80] or "host"
    return f"{host}-{hashlib.sha256(str(data.absolute()).encode()).hexdigest()[:6]}"
