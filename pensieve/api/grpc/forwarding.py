"""Forward calls about conversations and batch jobs that another daemon owns.

    served here ──OwnedElsewhere──> forwarded to the owner ──> answered
                                       └──its lease expired──> claimed, and served here

A conversation stays with its owner, the daemon that has its KV. A client may call any daemon, but a forwarded
call takes longer. The forwarder passes bytes and errors on unchanged, for gRPC and HTTP (http_forwarding.py).
A forwarded call is never forwarded again, because two daemons that disagree about the owner would forward it
forever. The answer's initial metadata name the owner, so that a client or router can call the owner directly.

Until the answer begins, the owner is watched (peers.py). If the owner cannot be reached, the call is retried
until the owner's lease expires, and for at least PATIENCE_SECONDS. The client gets an error if an answer
breaks off. It also gets an error if the owner may have executed a call that must not be repeated.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, Protocol

import grpc

from pensieve.api.grpc.conversation import ConversationService
from pensieve.api.grpc.interceptor import FORWARDED
from pensieve.api.grpc.peers import LOOK_SECONDS, Metadata, OwnerWatch, Peers, Wait
from pensieve.api.grpc.translate import DETAILS_KEY, TYPE_PREFIX
from pensieve.conversations.daemon import Daemon
from pensieve.errors import NotFound, OwnedElsewhere, Unavailable
from pensieve.guard.callers import caller
from pensieve.v1 import conversation_pb2 as pb
from pensieve.v1 import status_pb2

HOME = "pensieve-home"  # response metadata: the address of the conversation's owner
NO_CONNECTION = "failed to connect to all addresses"  # gRPC's message if nothing was sent
PATIENCE_SECONDS = 12.0  # minimum time to retry an unreachable owner
PAST_LEASE_SECONDS = 2.0  # time for one more claim after the lease has expired
OWNERS_MAX = 3  # number of owners to which a call is forwarded, one after the other
Handler = Callable[[Any, Any], Awaitable[Any]]


class OwnerLookup(Protocol):
    """Looks up the owner of a conversation or job, by id and tenant."""

    @property
    def address(self) -> str:
        """The address at which other daemons reach this one."""

    @property
    def lease_seconds(self) -> float: ...

    async def claim(self, conversation_id: str, tenant: str, /) -> OwnedElsewhere | None:
        """Return the owner if it is another daemon with a valid lease. None: this daemon must answer."""

    async def take(self, conversation_id: str, tenant: str, /) -> OwnedElsewhere | None:
        """Like `claim`, for an owner that cannot be reached.

        A conversation is taken even while the owner's lease is valid, unless the owner runs one of its turns.
        """


class GrpcMethod(NamedTuple):
    """A gRPC method whose calls are forwarded."""

    service: str
    name: str
    response: Any  # class of the answer's messages
    is_stream: bool = False
    may_repeat: bool = False  # the call is idempotent


CONVERSATIONS = "pensieve.v1.ConversationService"
FORWARDED_METHODS = (
    GrpcMethod(CONVERSATIONS, "SendMessage", pb.SendMessageResponse, True, True),
    GrpcMethod(CONVERSATIONS, "CancelTurn", pb.CancelTurnResponse, may_repeat=True),
    GrpcMethod(CONVERSATIONS, "WarmConversation", pb.WarmConversationResponse, may_repeat=True),
    GrpcMethod(CONVERSATIONS, "DeleteConversation", pb.DeleteConversationResponse),
    GrpcMethod(CONVERSATIONS, "RewindConversation", pb.RewindConversationResponse),
)


class ForwardedCall(Protocol):
    """A call that can be sent to the owner of its conversation."""

    may_repeat: bool  # the call is idempotent

    def begin(self, address: str, channel: grpc.aio.Channel) -> Any:
        """Start the call to the owner, and return gRPC's call object."""

    def answer(self, call: Any) -> AsyncIterator[Any]:
        """Yield the messages of the answer."""

    async def pass_on(self, message: Any) -> None:
        """Pass a message of the answer on to the client."""


class Unreachable(Exception):
    """The owner cannot be reached. Another daemon may safely execute the call."""


class NotOwner(Exception):
    """The conversation has a different owner now."""

    def __init__(self, next_owner: OwnedElsewhere | None) -> None:
        """`next_owner`: None if this daemon owns the conversation."""
        super().__init__()
        self.next_owner = next_owner


class Forwarder:
    """Forwards calls to the owners of conversations. Runs on the event loop."""

    def __init__(self, claims: OwnerLookup, peers: Peers) -> None:
        self.peers = peers
        self.num_forwarded = 0
        self.num_taken = 0
        self.num_running = 0
        self.patience_seconds = max(PATIENCE_SECONDS, claims.lease_seconds + PAST_LEASE_SECONDS)
        self._claims = claims
        self._watch = OwnerWatch(claims.claim)

    async def forward(self, owner: OwnedElsewhere, tenant: str, call: ForwardedCall) -> bool:
        """Let the owner answer. Return False if this daemon has become the owner and must answer itself.

        Raises OwnedElsewhere if the owner is unreachable but its lease is valid. Raises gRPC's error if the
        owner answered with an error, or if its answer broke off.
        """
        self.num_forwarded += 1
        self.num_running += 1
        try:
            return await self._forward(owner, tenant, call)
        finally:
            self.num_running -= 1

    async def _forward(self, owner: OwnedElsewhere, tenant: str, call: ForwardedCall) -> bool:
        give_up_at: float | None = None
        num_owners = 1
        next_owner: OwnedElsewhere | None = None
        while True:
            if not owner.address:
                raise owner
            # An owner with our own address was an earlier daemon at this address. It no longer runs.
            is_unreachable = owner.address == self._claims.address
            if not is_unreachable:
                try:
                    await self._send(owner, tenant, call)
                    return True
                except NotOwner as found:
                    next_owner = found.next_owner
                    # The answer may come from a newer daemon at the owner's address: the owner is gone.
                    is_unreachable = next_owner is not None and next_owner.address == owner.address
                except Unreachable:
                    is_unreachable = True
            if is_unreachable:
                now = asyncio.get_running_loop().time()
                if give_up_at is None:
                    give_up_at = now + self.patience_seconds
                elif now >= give_up_at:
                    raise owner from None
                else:
                    await asyncio.sleep(LOOK_SECONDS)
                next_owner = await _await_claim(self._claims.take(owner.conversation_id, tenant))
                if next_owner is not None and next_owner.address == owner.address:
                    continue
            if next_owner is None:
                self.num_taken += 1
                return False
            num_owners += 1
            if num_owners > OWNERS_MAX:
                raise next_owner
            owner = next_owner

    async def close(self) -> None:
        await self._watch.close()
        await self.peers.close()

    async def _send(self, owner: OwnedElsewhere, tenant: str, forwarded: ForwardedCall) -> None:
        """Send a call to the owner, and pass the answer on."""
        async with self.peers.channel(owner.address) as channel:
            await self._send_over(channel, owner, tenant, forwarded)

    async def _send_over(
        self,
        channel: grpc.aio.Channel,
        owner: OwnedElsewhere,
        tenant: str,
        forwarded: ForwardedCall,
    ) -> None:
        call = forwarded.begin(owner.address, channel)
        wait = self._watch.begin(owner, tenant, call.cancel)
        has_begun = False
        try:
            async for message in forwarded.answer(call):
                if not has_begun:
                    has_begun = True
                    self._watch.end(wait)
                await forwarded.pass_on(message)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            if not wait.is_over or task.cancelling():
                raise
            if has_begun or not forwarded.may_repeat:
                raise Unavailable(
                    f"{owner.replica} at {owner.address} has not answered within its lease; "
                    "the call may have been executed"
                ) from None
            raise NotOwner(wait.next_owner) from None
        except grpc.aio.AioRpcError as error:
            if not has_begun:
                await self._raise_if_retryable(error, wait, forwarded.may_repeat)
            raise
        finally:
            self._watch.end(wait)
            call.cancel()

    async def _raise_if_retryable(
        self, error: grpc.aio.AioRpcError, wait: Wait, may_repeat: bool
    ) -> None:
        """Raise NotOwner or Unreachable if the call can be tried again. Return if the client gets `error`."""
        details = details_of(error)
        if details is not None and reason_of(details) == OwnedElsewhere.reason:
            claim = self._claims.claim(wait.owner.conversation_id, wait.tenant)
            raise NotOwner(await _await_claim(claim)) from error
        was_not_sent = (error.details() or "").startswith(NO_CONNECTION)
        is_unreachable = error.code() is grpc.StatusCode.UNAVAILABLE and details is None
        if is_unreachable and (may_repeat or was_not_sent):
            raise Unreachable from error


async def _await_claim(claim: Awaitable[OwnedElsewhere | None]) -> OwnedElsewhere | None:
    """Await a claim. Return the owner, or None if this daemon must answer.

    A deleted conversation has no owner. Any daemon can answer, or create the conversation again.
    """
    try:
        return await claim
    except NotFound:
        return None


class GrpcCall:
    """A gRPC call of a client."""

    def __init__(self, method: GrpcMethod, request: Any, context: Any, metadata: Metadata) -> None:
        self.may_repeat = method.may_repeat
        self.response: Any = None  # answer of a unary method
        self._method = method
        self._request, self._context, self._metadata = request, context, metadata
        self._home = (HOME, "")
        self._has_begun = False

    def begin(self, address: str, channel: grpc.aio.Channel) -> Any:
        self._home = (HOME, address)
        kind: Any = channel.unary_stream if self._method.is_stream else channel.unary_unary
        return kind(f"/{self._method.service}/{self._method.name}")(
            self._request.SerializeToString(),
            timeout=self._context.time_remaining(),
            metadata=self._metadata,
        )

    async def answer(self, call: Any) -> AsyncIterator[bytes]:
        if self._method.is_stream:
            async for message in call:
                yield message
        else:
            yield await call

    async def pass_on(self, message: bytes) -> None:
        if not self._has_begun:
            self._has_begun = True
            await self._context.send_initial_metadata((self._home,))
        parsed = self._method.response.FromString(message)
        if self._method.is_stream:
            await self._context.write(parsed)
        else:
            self.response = parsed


class ForwardingMethods:
    """Forwards the calls for which a method of the service raises OwnedElsewhere."""

    def __init__(self, forwarder: Forwarder, methods: Iterable[GrpcMethod]) -> None:
        """Replace the methods of this service object."""
        self._forwarder = forwarder
        for method in methods:
            handler = getattr(self, method.name)
            setattr(self, method.name, partial(self._serve, handler, method))

    async def _serve(self, handler: Handler, method: GrpcMethod, request: Any, context: Any) -> Any:
        """Return the answer of this daemon or of the owner."""
        try:
            return await handler(request, context)
        except OwnedElsewhere as error:
            if is_forwarded(context):
                raise
            owner = error
        if isinstance(request, pb.SendMessageRequest) and not request.request_id:
            request.request_id = f"{secrets.randbits(128):032x}"  # the same for each attempt
        metadata = self._forwarder.peers.metadata(context.invocation_metadata() or ())
        call = GrpcCall(method, request, context, metadata)
        tenant = getattr(request, "tenant", "") or caller().tenant
        try:
            if await self._forwarder.forward(owner, tenant, call):
                return call.response
        except grpc.aio.AioRpcError as error:
            details = details_of(error)
            context.set_trailing_metadata(() if details is None else ((DETAILS_KEY, details),))
            await context.abort(error.code(), error.details() or "")
        return await handler(request, context)


class SharedConversationService(ConversationService):
    """The ConversationService of a daemon that shares its history with others."""

    async def CancelTurn(
        self, request: pb.CancelTurnRequest, context: Any
    ) -> pb.CancelTurnResponse:
        daemon, tenant, name = self.daemon, caller().tenant, request.conversation_id
        await daemon.threads.in_store(tenant, daemon.store.claim, name, tenant=tenant, lane=name)
        return await super().CancelTurn(request, context)


class ForwardingService(ForwardingMethods, SharedConversationService):
    """Forwards calls over gRPC."""

    def __init__(self, daemon: Daemon, forwarder: Forwarder) -> None:
        SharedConversationService.__init__(self, daemon)
        ForwardingMethods.__init__(self, forwarder, FORWARDED_METHODS)


def is_forwarded(context: Any) -> bool:
    return any(key == FORWARDED for key, _ in context.invocation_metadata() or ())


def details_of(error: grpc.aio.AioRpcError) -> bytes | None:
    """Return the status details that another daemon sent with an error. None: the error is gRPC's own."""
    trailing: Any = error.trailing_metadata() or ()
    found: bytes | None = next((value for key, value in trailing if key == DETAILS_KEY), None)
    return found


def reason_of(details: bytes) -> str:
    info = status_pb2.ErrorInfo()
    for each in status_pb2.Status.FromString(details).details:
        if each.type_url == f"{TYPE_PREFIX}ErrorInfo":
            info.ParseFromString(each.value)
    return info.reason
