"""What both clients share: the channel's options, and every request that takes one message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import json_format, struct_pb2

from pensieve.client.turns import check_id, check_text, new_id
from pensieve.errors import ConfigError, InvalidArgument
from pensieve.v1 import conversation_pb2 as pb

DEFAULT_ADDRESS = "127.0.0.1:50051"
PAGE_SIZE = 500
LOOK_SECONDS = 30.0
OPTIONS = (
    ("grpc.enable_retries", 0),  # ours know what may be sent twice
    ("grpc.max_receive_message_length", 8 << 20),
    ("grpc.max_send_message_length", 8 << 20),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
)
Tls = bool | str | Path | grpc.ChannelCredentials


def target_of(address: str) -> str:
    """HOST:PORT or unix:PATH; also as `pensieve serve` prints it, with grpc:// before it."""
    return address.removeprefix("grpc://")


def credentials_of(tls: Tls) -> grpc.ChannelCredentials | None:
    """True: the system's authorities; a path: that authority's certificate; or credentials."""
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


def metadata_of(token: str | None) -> tuple[tuple[str, str], ...]:
    """The header that says who calls; the space around a token, as in a file, is none of it."""
    token = (token or "").strip()
    if not all("!" <= character <= "~" for character in token):
        raise InvalidArgument("token", "holds a character that no token has")  # which stays secret
    return (("authorization", f"Bearer {token}"),) if token else ()


def create_request(
    conversation_id: str,
    system_prompt: str,
    tools: Sequence[Mapping[str, Any]],
    template_options: Mapping[str, Any] | None,
    metadata: Mapping[str, Any] | None,
    prefix_id: str,
) -> pb.CreateConversationRequest:
    check_text("system_prompt", system_prompt)
    return pb.CreateConversationRequest(
        conversation_id=conversation_id,
        system_prompt=system_prompt,
        tools=[struct("tools", tool) for tool in tools],
        template_options=struct("template_options", template_options or {}),
        metadata=struct("metadata", metadata or {}),
        prefix_id=check_text("prefix_id", prefix_id),
    )


def fork_request(
    conversation_id: str,
    at_revision: int | None,
    target_id: str | None,
    metadata: Mapping[str, Any] | None,
) -> pb.ForkConversationRequest:
    request = pb.ForkConversationRequest(
        conversation_id=conversation_id,
        new_conversation_id=new_id() if target_id is None else check_id(target_id),
        metadata=struct("metadata", metadata or {}),
    )
    if at_revision is not None:
        request.at_revision = at_revision
    return request


def struct(name: str, value: Mapping[str, Any]) -> struct_pb2.Struct:
    given = struct_pb2.Struct()
    try:
        json_format.ParseDict(dict(value), given)
    except (json_format.ParseError, ValueError, TypeError) as error:
        raise InvalidArgument(name, f"is not JSON: {error}") from None
    return given
