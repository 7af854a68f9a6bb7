"""What a gRPC channel to a daemon is opened with: address, TLS, token and channel options."""

from __future__ import annotations

from pathlib import Path

import grpc

from pensieve.errors import ConfigError, InvalidArgument

DEFAULT_ADDRESS = "127.0.0.1:50051"
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
Tls = bool | str | Path | grpc.ChannelCredentials
Metadata = tuple[tuple[str, str], ...]


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
