"""Pensieve's gRPC services inside Ray Serve's gRPC proxy: what comes in and what goes out, as raw bytes.

`grpc_options.grpc_servicer_functions` names `add_services`.  Ray replaces the behaviour of each method by
its own, which routes the call to a replica; around that we put what Ray does not do:

* **No message is parsed** on its way: requests and responses stay bytes.  The exception is the key: a call
  whose metadata has no `session_id` gets its conversation's id from the request, and one that creates a
  conversation the prefix that it begins with (homes.py).
* **A stream goes past Ray** once Ray has found its replica (direct.py): a message costs Ray more than a small
  model's token.
* **The deadline** travels as metadata, so that the daemon knows it (Ray passes on a cancellation only).
* **An error keeps its details.**  Ray carries a status and trailing metadata with a message, and drops both
  with an exception.  So a replica ends a failed call with an empty message whose context has the error
  (grpc_forward.py); here that message is taken out again.
* **A replica that died** is UNAVAILABLE, which clients send again, and not Ray's INTERNAL; so is a cluster
  that ends, which Ray knows no more (NOT_FOUND).  An error that a message brought came from a daemon and
  stays as it is.

Nothing is kept between calls but channels to the daemons.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.message import DecodeError, Message

from pensieve.cluster.direct import Way, held, way_of
from pensieve.cluster.grpc_forward import GONE, Forward
from pensieve.cluster.grpc_methods import (
    CONVERSATION,
    CREATE,
    KEY,
    PREFIX,
    REPLICA,
    TIMEOUT,
    Method,
    methods,
)
from pensieve.cluster.homes import BEHIND

ABSENT = (grpc.StatusCode.INTERNAL, grpc.StatusCode.NOT_FOUND)
RAYS_OWN = frozenset({*ABSENT, *(each.value[0] for each in ABSENT)})  # Ray writes either
CHANNELS_MAX = 1000  # to daemons
Handler = Any  # grpc.RpcMethodHandler, which is generic for type checkers alone


def add_services(_: Any, server: grpc.aio.Server) -> None:
    """For `grpc_options.grpc_servicer_functions`."""
    server.add_generic_rpc_handlers((Services(),))


class Services(grpc.GenericRpcHandler):
    def __init__(self) -> None:
        # Ray reads this table, and puts one with its own behaviours in its place.
        self._method_handlers = {each.path: _handler(each) for each in methods()}
        self._methods = {each.path: each for each in methods()}
        self._direct = DirectStreams()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        path = handler_call_details.method
        handler = self._method_handlers.get(path)
        return None if handler is None else _around(self._methods[path], handler, self._direct)


class Call:
    """The context of a call as Ray sees it: the real one, with metadata of ours."""

    def __init__(self, context: Any, key: str) -> None:
        self._context = context
        more = [(KEY, key)] if key else []  # Ray takes the last one
        left = context.time_remaining()
        if left is not None:
            more.append((TIMEOUT, f"{left:.3f}"))
        self._metadata = (*(context.invocation_metadata() or ()), *more)

    def invocation_metadata(self) -> Any:
        return self._metadata

    def leave_rays(self) -> Any:
        """The real context, which Ray sees no more: its call ends behind the real one."""
        real, self._context = self._context, RaysOwn(self._context.peer())
        return real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


class RaysOwn:
    """In the place of a context of gRPC's: Ray asks for the peer, and whether it may say how the call ended.

    A context that has ended must not be asked: it is freed, and the process ends.
    """

    def __init__(self, peer: str) -> None:
        self._peer = peer

    def peer(self) -> str:
        return self._peer

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.OK

    def details(self) -> str:
        return "past Ray"

    def set_trailing_metadata(self, metadata: Any) -> None:
        """They are the daemon's."""

    set_code = set_details = set_compression = set_trailing_metadata


class DirectStreams:
    """Streams from daemons, for calls that Ray has brought to their replicas."""

    def __init__(self) -> None:
        self._forwards: OrderedDict[tuple[str, str], Forward] = OrderedDict()  # by address and name
        self._ending: set[asyncio.Task[None]] = set()

    async def messages(
        self, method: Method, way: Way, request: bytes, call: Call, rays: AsyncIterator[bytes]
    ) -> AsyncIterator[bytes]:
        """`rays` is what Ray still has of the call: it ends when the hold is let go."""
        context = call.leave_rays()
        ending = asyncio.create_task(_exhausted(rays))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        forward = self._forward(way)
        try:
            async with held(way) as gone:
                messages = forward.direct(method, request, call, context, gone)
                async for message in messages:
                    yield message
        except OSError:
            forward.gone(context)

    def _forward(self, way: Way) -> Forward:
        daemon = way.daemon, way.replica  # another replica may get the port of one that has ended
        forward = self._forwards.pop(daemon, None) or Forward(*daemon)
        self._forwards[daemon] = forward
        if len(self._forwards) > CHANNELS_MAX:  # replicas come and go
            self._forwards.popitem(last=False)
        return forward


async def _exhausted(messages: AsyncIterator[bytes]) -> None:
    async for _ in messages:
        pass


def key_of(method: Method, metadata: Any, request: bytes | None) -> str:
    """What the request adds to its metadata: the key, if they have none, and the prefix; "" for nothing."""
    given = next((str(value) for name, value in metadata or () if name == KEY), "")
    if given and method.name != CREATE:
        return ""
    if request is None or CONVERSATION not in method.request.fields_by_name:
        return ""
    parsed: Message = message_factory.GetMessageClass(method.request)()
    try:
        parsed.ParseFromString(request)
    except DecodeError:
        return ""  # the daemon says what is wrong with it
    key = given or str(getattr(parsed, CONVERSATION))
    prefix = str(getattr(parsed, PREFIX)) if method.name == CREATE else ""
    return key + BEHIND + prefix if prefix else key


def _handler(method: Method) -> Handler:
    make: Any = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[method.takes_stream, method.gives_stream]
    return make(None)  # without serializers: bytes


def _around(method: Method, handler: Any, direct: DirectStreams) -> Handler:
    """Ray's handler with ours around it."""
    if method.takes_stream:
        if method.gives_stream:
            return handler._replace(stream_stream=_stream(method, handler.stream_stream, direct))
        return handler._replace(stream_unary=_unary(method, handler.stream_unary))
    if method.gives_stream:
        return handler._replace(unary_stream=_stream(method, handler.unary_stream, direct))
    return handler._replace(unary_unary=_unary(method, handler.unary_unary))


def _call(method: Method, request: Any, context: Any) -> Call:
    whole = None if method.takes_stream else request
    return Call(context, key_of(method, context.invocation_metadata(), whole))


def _unary(
    method: Method, behaviour: Callable[[Any, Any], Awaitable[bytes]]
) -> Callable[[Any, Any], Awaitable[bytes]]:
    async def call(request: Any, context: Any) -> bytes:
        response = await behaviour(request, _call(method, request, context))
        if not any(name == REPLICA for name, _ in context.trailing_metadata() or ()):
            _correct(context)  # there was no message, in whose context they are
        return response

    return call


def _stream(
    method: Method, behaviour: Callable[[Any, Any], AsyncIterator[bytes]], direct: DirectStreams
) -> Callable[[Any, Any], AsyncIterator[bytes]]:
    async def call(request: Any, context: Any) -> AsyncIterator[bytes]:
        has_failed = False
        seen = _call(method, request, context)
        rays = aiter(behaviour(request, seen))
        async for _ in rays:
            has_failed = bool(context.code())  # this empty message has brought it, and is the last
            if not has_failed:
                way = way_of(context.trailing_metadata())
                async for message in direct.messages(method, way, request, seen, rays):
                    yield message
                return
        if not has_failed:
            _correct(context)

    return call


def _correct(context: Any) -> None:
    """What Ray says itself when a replica is gone (INTERNAL), or all are (NOT_FOUND): UNAVAILABLE."""
    if context.code() not in RAYS_OWN:
        return
    context.set_code(grpc.StatusCode.UNAVAILABLE)
    context.set_details(GONE)
