"""ReplicaService: daemons of a cluster fetch KV from each other and forward HTTP requests.

A part of the KV may be too large for one gRPC message, so its bytes are sent in pieces. The sender ends the
call if the receiver reads nothing for `stall_seconds`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import aclosing
from typing import Any

import grpc

from pensieve.api.grpc.http_forwarding import HttpAnswers
from pensieve.conversations.daemon import Daemon
from pensieve.conversations.hand_over import KvHeader, KvPart, KvSource, Parts
from pensieve.errors import InvalidArgument, Unavailable
from pensieve.guard.limits import write_within
from pensieve.store.records import ID_PATTERN
from pensieve.v1 import replica_pb2 as pb
from pensieve.v1 import replica_pb2_grpc

NAME = "pensieve.v1.ReplicaService"
PIECE_BYTES = 512 << 10
PART_BYTES_MAX = 64 << 20
CHANNEL_OPTIONS = (
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.use_local_subchannel_pool", 1),
)


class ReplicaService(replica_pb2_grpc.ReplicaServiceServicer):
    def __init__(self, daemon: Daemon, http: HttpAnswers) -> None:
        self.source = KvSource(daemon)
        self._http = http
        self._stall_seconds = daemon.config.stall_seconds

    async def FetchKv(  # type: ignore[override]  # the base class is synchronous
        self, request: pb.FetchKvRequest, context: Any
    ) -> None:
        for name, value in (
            ("conversation_id", request.conversation_id),
            ("tenant", request.tenant),
        ):
            if not ID_PATTERN.fullmatch(value) and (value or name != "tenant"):
                raise InvalidArgument(name, "is not a valid id")
        if request.num_tokens < 1:
            raise InvalidArgument("num_tokens", "must be at least 1")
        parts = self.source.parts(request.tenant, request.conversation_id, request.num_tokens)
        async with aclosing(parts):
            async for each in parts:
                for message in _messages(each):
                    await write_within(self._stall_seconds, context.write(message))

    async def ForwardHttp(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        await self._http.answer(requests, context)


def _messages(each: KvHeader | KvPart) -> Iterator[pb.FetchKvResponse]:
    if isinstance(each, KvHeader):
        yield pb.FetchKvResponse(header=pb.KvHeader(identity=each.identity))
        return
    part = pb.KvPart(
        first_chunk=each.first_chunk,
        slots=each.slots,
        crcs=each.crcs,
        num_tokens=each.num_tokens,
        digest=each.digest,
        num_bytes=len(each.body),
    )
    yield pb.FetchKvResponse(part=part)
    for start in range(0, len(each.body), PIECE_BYTES):
        yield pb.FetchKvResponse(data=each.body[start : start + PIECE_BYTES])


class KvFetcher:
    """Fetches KV from other daemons, by their addresses."""

    def __init__(self, token: str = "", credentials: grpc.ChannelCredentials | None = None) -> None:
        """`token`: an admin token, if the daemons require tokens. `credentials`: None without TLS."""
        self._metadata: Sequence[tuple[str, str]] = ()
        if token:
            self._metadata = (("authorization", f"Bearer {token}"),)
        self._credentials = credentials

    async def fetch(
        self, address: str, tenant: str, conversation_id: str, num_tokens: int
    ) -> Parts:
        """Yield the parts of the KV that a daemon has. Every failure raises Unavailable."""
        request = pb.FetchKvRequest(
            tenant=tenant, conversation_id=conversation_id, num_tokens=num_tokens
        )
        async with self._channel(address) as channel:
            stub = replica_pb2_grpc.ReplicaServiceStub(channel)
            call: Any = stub.FetchKv(request, metadata=self._metadata)
            try:
                async for each in _assemble(call):
                    yield each
            except grpc.aio.AioRpcError as error:
                code = error.code().name
                raise Unavailable(
                    f"cannot fetch KV from {address}: {code} {error.details()}"
                ) from error
            finally:
                call.cancel()

    def _channel(self, address: str) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        return grpc.aio.secure_channel(address, self._credentials, options=CHANNEL_OPTIONS)


async def _assemble(responses: Any) -> Parts:
    """Yield parts with all their bytes. Raises Unavailable if a part is incomplete."""
    part: pb.KvPart | None = None
    pieces: list[bytes] = []
    missing = 0
    async for response in responses:
        kind = response.WhichOneof("kind")
        if kind == "header":
            yield KvHeader(dict(response.header.identity))
        elif kind == "part" and not missing:
            part, pieces, missing = response.part, [], response.part.num_bytes
            if not 0 < missing <= PART_BYTES_MAX:
                raise Unavailable(f"a part has a wrong size: {missing:,} bytes")
        elif kind == "data" and part is not None and len(response.data) <= missing:
            pieces.append(response.data)
            missing -= len(response.data)
            if not missing:
                yield KvPart(
                    part.first_chunk,
                    tuple(part.slots),
                    tuple(part.crcs),
                    part.num_tokens,
                    part.digest,
                    b"".join(pieces),
                )
        else:
            raise Unavailable("the answer is not KV")
    if missing:
        raise Unavailable("a part is incomplete")
