"""Forward calls about conversations that another daemon owns.

    served here ──OwnedElsewhere──> forwarded to the owner ──> answered
                                       └──the owner is unreachable──> taken over, and served here

A conversation stays where its KV is, so a call that reaches the wrong daemon only takes longer. The forwarder
passes bytes and errors on unchanged. A forwarded call is not forwarded again: two daemons that disagree would
do so for ever. The answer's initial metadata name the owner, so that a client or a router can go there.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import grpc

from pensieve.api.grpc.conversation import ConversationService
from pensieve.api.grpc.translate import DETAILS_KEY
from pensieve.conversations.daemon import Daemon
from pensieve.conversations.ownership import SharedThreads
from pensieve.errors import OwnedElsewhere
from pensieve.guard.callers import caller
from pensieve.v1 import conversation_pb2 as pb

FORWARDED = "pensieve-forwarded"  # by whom
HOME = "pensieve-home"  # where the conversation is served
NOT_PASSED_ON = ("user-agent", "te", "content-type", FORWARDED)
PREFIX = "/pensieve.v1.ConversationService/"
BYTES_MAX = 64 << 20
OPTIONS = (
    ("grpc.max_receive_message_length", BYTES_MAX),
    ("grpc.max_send_message_length", BYTES_MAX),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2000),  # how long an attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_retries", 0),
    ("grpc.keepalive_time_ms", 2000),  # a daemon that stands still is not waited for
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),
)
CHANNELS_MAX = 256
PASSED_ON = (
    *("SendMessage", "CancelTurn", "DeleteConversation"),
    *("RewindConversation", "WarmConversation"),
)
REPEATABLE = ("SendMessage", "CancelTurn", "WarmConversation")  # done twice, they are done once
NO_CONNECTION = "failed to connect to all addresses"  # gRPC's words before it has sent anything
Handler = Callable[[Any, Any], Awaitable[Any]]


class Unreachable(Exception):
    """The owner cannot be reached, and the call may be carried out here."""


class Forwarder:
    """Forwards calls to the owners of conversations. Runs on the event loop."""

    def __init__(
        self, daemon: Daemon, name: str, credentials: grpc.ChannelCredentials | None = None
    ) -> None:
        """`name` of this daemon; `credentials` where the daemons have TLS among them."""
        self.daemon = daemon
        assert isinstance(daemon.threads, SharedThreads)
        self._threads = daemon.threads
        self.num_forwarded = 0
        self.num_taken = 0
        self._name = name
        self._credentials = credentials
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def served(self, handler: Handler, method: str, request: Any, context: Any) -> Any:
        """Return the answer of this daemon, or of the owner of the conversation."""
        try:
            return await handler(request, context)
        except OwnedElsewhere as elsewhere:
            if _is_forwarded(context) or not elsewhere.address:
                raise
            owner = elsewhere
        if isinstance(request, pb.SendMessageRequest) and not request.request_id:
            request.request_id = f"{secrets.randbits(128):032x}"  # of two tries
        try:
            self.num_forwarded += 1
            return await self._forwarded(owner.address, method, request, context)
        except Unreachable:
            self.num_taken += 1
            await self._threads.take(owner.conversation_id, caller().tenant)
            return await handler(request, context)

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    async def _forwarded(self, address: str, method: str, request: Any, context: Any) -> Any:
        channel = self._channel(address)
        is_stream = method == "SendMessage"
        kind: Any = channel.unary_stream if is_stream else channel.unary_unary
        call = kind(PREFIX + method)(
            request.SerializeToString(),
            timeout=context.time_remaining(),
            metadata=self._metadata(context),
        )
        has_begun = False
        try:
            if not is_stream:
                answer = await call
                await _say_home(context, address)
                return getattr(pb, f"{method}Response").FromString(answer)
            async for piece in call:
                if not has_begun:
                    await _say_home(context, address)
                has_begun = True
                await context.write(pb.SendMessageResponse.FromString(piece))
            return None
        except grpc.aio.AioRpcError as error:
            trailing = tuple(error.trailing_metadata() or ())
            is_ours = any(key == DETAILS_KEY for key, _ in trailing)
            was_not_sent = (error.details() or "").startswith(NO_CONNECTION)
            may_repeat = method in REPEATABLE or was_not_sent
            is_away = error.code() is grpc.StatusCode.UNAVAILABLE and not is_ours
            if is_away and not has_begun and may_repeat:
                raise Unreachable from error
            context.set_trailing_metadata(
                tuple((key, value) for key, value in trailing if key == DETAILS_KEY)
            )
            await context.abort(error.code(), error.details() or "")
        finally:
            call.cancel()

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            if len(self._channels) >= CHANNELS_MAX:  # daemons come and go
                self._channels.pop(next(iter(self._channels)))
            self._channels[address] = (
                grpc.aio.insecure_channel(address, OPTIONS)
                if self._credentials is None
                else grpc.aio.secure_channel(address, self._credentials, OPTIONS)
            )
        return self._channels[address]

    def _metadata(self, context: Any) -> tuple[tuple[str, Any], ...]:
        given = context.invocation_metadata() or ()
        kept = [
            (key, value)
            for key, value in given
            if key not in NOT_PASSED_ON and not key.startswith((":", "grpc-"))
        ]
        return (*kept, (FORWARDED, self._name))


class ForwardingService(ConversationService):
    """The ConversationService of a daemon that shares its history with others."""

    def __init__(self, forwarder: Forwarder) -> None:
        super().__init__(forwarder.daemon)
        for name in PASSED_ON:
            handler = getattr(self, name)
            setattr(self, name, partial(forwarder.served, handler, name))

    async def CancelTurn(
        self, request: pb.CancelTurnRequest, context: Any
    ) -> pb.CancelTurnResponse:
        daemon, tenant = self.daemon, caller().tenant
        lane = request.conversation_id
        await daemon.threads.in_store(tenant, daemon.store.claim, lane, tenant=tenant, lane=lane)
        return await super().CancelTurn(request, context)


def _is_forwarded(context: Any) -> bool:
    return any(key == FORWARDED for key, _ in context.invocation_metadata() or ())


async def _say_home(context: Any, address: str) -> None:
    await context.send_initial_metadata(((HOME, address),))
