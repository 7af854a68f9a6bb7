"""Pensieve's gRPC services inside Ray Serve's gRPC proxy: what comes in and what goes out, as raw bytes.

`grpc_options.grpc_servicer_functions` names `add_services`.  Ray replaces the behaviour of each method by
its own, which routes the call to a replica; around that we put what Ray does not do:

* **No message is parsed** on its way: requests and responses stay bytes.  The exception is the key: a call
  whose metadata has no `session_id` gets its conversation's id from the request, and one that creates a
  conversation the prefix that it begins with (homes.py).
* **The deadline** travels as metadata, so that the daemon knows it (Ray passes on a cancellation only).
* **An error keeps its details.**  Ray carries a status and trailing metadata with a message, and drops both
  with an exception.  So a replica ends a failed call with an empty message whose context has the error
  (grpc_forward.py); here that message is taken out again.
* **A replica that died** is UNAVAILABLE, which clients send again, and not Ray's INTERNAL.  An error that
  a message brought came from a daemon and stays as it is.  (The trailing metadata alone do not tell: each
  message of a stream brings them, so they are there when a replica dies in the middle of one.)

Nothing is kept between calls.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, NamedTuple

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message

from pensieve.cluster.homes import BEHIND
from pensieve.v1 import admin_pb2, conversation_pb2, jobs_pb2, status_pb2

KEY = "session_id"  # Ray's name for it in the metadata
TIMEOUT = "pensieve-timeout"
REPLICA = "pensieve-replica"
CONVERSATION = "conversation_id"
PREFIX = "prefix_id"
CREATE = "CreateConversation"
WATCHING = ("WatchJob", "WatchStats", "Watch")  # streams that end when their client wants it
HEALTH = "grpc.health.v1.Health"
SERVICES = (
    conversation_pb2.DESCRIPTOR.services_by_name["ConversationService"],
    jobs_pb2.DESCRIPTOR.services_by_name["JobService"],
    admin_pb2.DESCRIPTOR.services_by_name["AdminService"],
)


Handler = Any  # grpc.RpcMethodHandler, which is generic for type checkers alone


class Method(NamedTuple):
    path: str
    takes_stream: bool
    gives_stream: bool
    request: Descriptor

    @property
    def name(self) -> str:
        """As Ray calls it: the last part of the path."""
        return self.path.rsplit("/", 1)[1]

    @property
    def watches(self) -> bool:
        return self.name in WATCHING


def methods() -> Iterator[Method]:
    for service in SERVICES:
        yield from _methods_of(service)
    check = status_pb2.HealthCheckRequest.DESCRIPTOR
    yield Method(f"/{HEALTH}/Check", False, False, check)
    yield Method(f"/{HEALTH}/Watch", False, True, check)


def add_services(_: Any, server: grpc.aio.Server) -> None:
    """For `grpc_options.grpc_servicer_functions`."""
    server.add_generic_rpc_handlers((Services(),))


class Services(grpc.GenericRpcHandler):
    def __init__(self) -> None:
        # Ray reads this table, and puts one with its own behaviours in its place.
        self._method_handlers = {each.path: _handler(each) for each in methods()}
        self._methods = {each.path: each for each in methods()}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        path = handler_call_details.method
        handler = self._method_handlers.get(path)
        return None if handler is None else _around(self._methods[path], handler)


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

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


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


def _methods_of(service: ServiceDescriptor) -> Iterator[Method]:
    for each in service.methods:
        yield Method(
            f"/{service.full_name}/{each.name}",
            each.client_streaming,
            each.server_streaming,
            each.input_type,
        )


def _handler(method: Method) -> Handler:
    make: Any = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[method.takes_stream, method.gives_stream]
    return make(None)  # without serializers: bytes


def _around(method: Method, handler: Any) -> Handler:
    """Ray's handler with ours around it."""
    if method.takes_stream:
        if method.gives_stream:
            return handler._replace(stream_stream=_stream(method, handler.stream_stream))
        return handler._replace(stream_unary=_unary(method, handler.stream_unary))
    if method.gives_stream:
        return handler._replace(unary_stream=_stream(method, handler.unary_stream))
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
    method: Method, behaviour: Callable[[Any, Any], AsyncIterator[bytes]]
) -> Callable[[Any, Any], AsyncIterator[bytes]]:
    async def call(request: Any, context: Any) -> AsyncIterator[bytes]:
        has_failed = False
        async for response in behaviour(request, _call(method, request, context)):
            has_failed = bool(context.code())  # this empty message has brought it, and is the last
            if not has_failed:
                yield response
        if not has_failed:
            _correct(context)

    return call


def _correct(context: Any) -> None:
    """Where Ray itself has ended the call: what it calls INTERNAL is a replica that is gone."""
    if context.code() not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.INTERNAL.value[0]):
        return
    context.set_code(grpc.StatusCode.UNAVAILABLE)
    context.set_details(
        "the replica that had this call is gone; another one takes the conversation"
    )
