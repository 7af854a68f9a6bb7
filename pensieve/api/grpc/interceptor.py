"""Run the guard before every gRPC method, as an interceptor.

First the caller is authenticated. Then the request is received (guard/request_bodies.py), the sizes of its
fields are checked (sizes.py), and it is parsed. A request that cannot be parsed fails with INVALID_ARGUMENT.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from inspect import isawaitable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from pensieve.api.grpc import sizes, translate
from pensieve.errors import InvalidArgument, PensieveError, ServerFault
from pensieve.guard.audit import AuditedCall
from pensieve.guard.callers import Access, group_of
from pensieve.guard.client_errors import client_text
from pensieve.guard.guard import CallKind, Guard, GuardedCall

ADMIN_PREFIX = "/pensieve.v1.AdminService/"
CONVERSATION_PREFIX = "/pensieve.v1.ConversationService/"
CALLER_KEY = "pensieve-caller"  # metadata key of a forwarded call: the caller
FORWARDED = "pensieve-forwarded"  # metadata key of a forwarded call: the forwarding daemon
HEALTH_PREFIX = "/grpc.health.v1.Health/"
JOB_PREFIX = "/pensieve.v1.JobService/"
REPLICA_PREFIX = "/pensieve.v1.ReplicaService/"
KINDS = {
    f"{CONVERSATION_PREFIX}SendMessage": CallKind(is_repeated=True),
    f"{CONVERSATION_PREFIX}CancelTurn": CallKind(is_repeated=True),
    f"{HEALTH_PREFIX}Watch": CallKind(Access.ANYBODY, is_counted=False, is_watch=True),
    f"{REPLICA_PREFIX}ForwardHttp": CallKind(Access.PEER),
}
KINDS_OF_SERVICES = {
    ADMIN_PREFIX: CallKind(Access.OPERATOR, is_counted=False),
    HEALTH_PREFIX: CallKind(Access.ANYBODY, is_counted=False),
    REPLICA_PREFIX: CallKind(Access.REPLICA),
}
ANY_METHOD = CallKind()
DELETIONS = (
    f"{CONVERSATION_PREFIX}DeleteConversation",
    f"{CONVERSATION_PREFIX}DeletePrefix",
    f"{JOB_PREFIX}DeleteJob",
)


def kind_of(method: str) -> CallKind:
    service = method[: method.rfind("/") + 1]
    return KINDS.get(method) or KINDS_OF_SERVICES.get(service, ANY_METHOD)


class GuardInterceptor(grpc.aio.ServerInterceptor):
    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        method, kind = details.method, kind_of(details.method)
        authorization = authorization_of(details.invocation_metadata or ())
        parse = handler.request_deserializer or bytes
        is_audited = method.startswith((ADMIN_PREFIX, JOB_PREFIX)) or method in DELETIONS

        async def guarded(
            behaviour: Callable[[Any, Any], Any], requests: Any, context: Any, takes: str
        ) -> Any:
            request, answer = None, None
            call = GuardedCall(
                *(self._guard, kind, method, context),
                send_error=partial(abort_with, context),
                audited=(lambda: _audited_call(method, request, details)) if is_audited else None,
            )
            async with call:
                try:
                    await call.enter(authorization, lambda: _forwarded_caller(details))
                    counted = CountedContext(context, call) if kind.is_counted else context
                    if takes == "message":
                        request = requests = _parse(parse, await call.body())
                    elif takes == "messages":
                        requests = self._messages(call, context, parse)
                    answer = await behaviour(requests, counted)
                    if answer is not None and kind.is_counted:
                        call.count_answer(answer.ByteSize())
                except grpc.aio.AbortError as aborted:  # the handler has already sent the status
                    _drop_traceback(aborted)
                    call.ended_early = True
                except grpc.aio.InternalError:  # the client disconnected during a write
                    call.ended_early = True
                    await _abort(context, grpc.StatusCode.CANCELLED, "the client has disconnected")
                else:
                    return answer
            return None

        for behaviour, make, takes in (
            (handler.unary_unary, grpc.stream_unary_rpc_method_handler, "message"),
            (handler.unary_stream, grpc.stream_stream_rpc_method_handler, "message"),
            (handler.stream_unary, grpc.stream_unary_rpc_method_handler, "messages"),
        ):
            if behaviour is not None:
                guard = partial(guarded, behaviour, takes=takes)
                return make(guard, response_serializer=handler.response_serializer)
        stream_stream = handler.stream_stream
        if stream_stream is None:
            return None

        async def talk(requests: Any, context: Any) -> None:
            answers = stream_stream(_parse_each(parse, requests), context)
            if isawaitable(answers):  # the handler writes its messages itself
                await answers
                return
            async for response in answers:
                await context.write(response)

        return grpc.stream_stream_rpc_method_handler(
            partial(guarded, talk, takes="raw messages"),
            response_serializer=handler.response_serializer,
        )

    async def _messages(
        self, call: GuardedCall, context: Any, parse: Callable[[bytes], Any]
    ) -> AsyncIterator[Any]:
        """Yield the messages of a client stream. Receive each after the previous one was consumed."""
        assert call.caller is not None
        group = group_of(call.caller, context.peer())
        async for raw in self._guard.incoming.bodies(context, group):
            yield _parse(parse, raw)


class CountedContext:
    """The context that a handler gets. Written bytes count as unread until the client has read them."""

    def __init__(self, context: Any, call: GuardedCall) -> None:
        self._context, self._call = context, call

    async def write(self, message: Any) -> None:
        await self._call.send(message.ByteSize(), self._context.write, message)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def authorization_of(metadata: Any) -> str | None:
    """Return the `authorization` metadata; None if absent."""
    found = next((value for key, value in metadata if key == "authorization"), None)
    return found if found is None or isinstance(found, str) else ""


def _forwarded_caller(details: grpc.HandlerCallDetails) -> str | None:
    """Return the caller that a forwarding daemon named; None if absent."""
    metadata = details.invocation_metadata or ()
    return next((str(value) for key, value in metadata if key == CALLER_KEY), None)


def _audited_call(
    method: str, request: Any, details: grpc.HandlerCallDetails
) -> AuditedCall | None:
    tenant = getattr(request, "tenant", "")
    if method.startswith(JOB_PREFIX) and method not in DELETIONS and not tenant:
        return None
    return AuditedCall(
        method.rpartition("/")[2],
        is_deletion=method in DELETIONS,
        conversation_id=getattr(request, "conversation_id", ""),
        prefix_id=getattr(request, "prefix_id", ""),
        job_id=getattr(request, "job_id", ""),
        of_tenant=tenant,
        is_forwarded=any(key == FORWARDED for key, _ in details.invocation_metadata or ()),
    )


def _parse(parse: Callable[[bytes], Any], raw: bytes) -> Any:
    kind = getattr(parse, "__self__", None)
    if kind is not None:  # the parser returns messages of a known class
        sizes.check(kind, raw)
    try:
        return parse(raw)
    except (DecodeError, UnicodeDecodeError, ValueError):
        raise InvalidArgument(
            "request", "cannot be parsed as this method's request message"
        ) from None


async def _parse_each(parse: Callable[[bytes], Any], messages: Any) -> AsyncIterator[Any]:
    async for raw in messages:
        yield _parse(parse, raw)


async def abort_with(context: Any, error: PensieveError) -> None:
    """End the call with an error as its status."""
    if not isinstance(error, ServerFault):
        details = translate.status(error).SerializeToString()
        context.set_trailing_metadata(((translate.DETAILS_KEY, details),))
    await _abort(context, translate.status_code(error), client_text(error))


async def _abort(context: Any, code: grpc.StatusCode, text: str) -> None:
    """Send the status, and return. The handler must then return, too.

    If the status were only set, gRPC would send an empty message before the status. A client that reads
    nothing would block this message, and so the call.
    """
    try:
        await context.abort(code, text)
    except grpc.aio.AbortError as aborted:  # gRPC raises this again after the handler has returned
        _drop_traceback(aborted)
    except grpc.aio.InternalError:  # the client disconnected
        raise asyncio.CancelledError from None


def _drop_traceback(aborted: grpc.aio.AbortError) -> None:
    """Drop the traceback. gRPC keeps the error, and the frames of the traceback keep the request alive."""
    aborted.__traceback__ = aborted.__context__ = None
