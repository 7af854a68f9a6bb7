"""Guard every call over gRPC and HTTP: authenticate, apply limits, report errors, audit.

    enter     authenticate, count and admit the caller; audit the first use of a token
    body      receive the request, after authentication (request_bodies.py)
    send      count an answer, or a piece of a stream, as unread until the client has received it
    end       count an error, log it if the operator needs it, send it to the client; audit the call

A call counts from authentication until its client has received the end of the answer, or has disconnected. A
call above the tenant's limit `calls_max` is refused before its request is received. For methods that clients
retry after a disconnect, the limit is twice as high. If a tenant has used more than its rates allow, its
calls and errors are delayed (limits.py).

The daemon that forwards a call authenticates, counts, admits and audits it. The owner of the conversation
applies only the limits of request bodies. If the daemons share no secret, the owner audits the call, too.

An answer is refused if its tenant would then have more than `unread_bytes` of unread answers. A piece of a
stream waits instead. A stream whose client reads too slowly is cancelled (conversations/followers.py).

A PensieveError is sent to the client unchanged. Any other exception becomes a ServerFault with an incident
id. The log has this id and the traceback. A disconnect is not an error.

Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from pensieve.errors import PensieveError, QueueFull, ServerFault, whole_line
from pensieve.guard.audit import Audit, AuditedCall
from pensieve.guard.callers import (
    Access,
    Caller,
    KnownTokens,
    Token,
    decode_caller,
    group_of,
    set_caller,
)
from pensieve.guard.client_errors import is_for_the_log
from pensieve.guard.limits import Allowance, Allowances
from pensieve.guard.request_bodies import IncomingBodies, ReceivedBytes, Transport

T = TypeVar("T")
log = logging.getLogger("pensieve")
POLL_SECONDS = 0.05


class CallKind(NamedTuple):
    """The properties of a method or endpoint that decide how the guard treats its calls."""

    access: Access = Access.CALLER
    is_counted: bool = True  # counts towards the tenant's limits
    is_repeated: bool = False  # clients retry it after a disconnect
    is_watch: bool = False  # a call may stay open without limit


class Guard:
    def __init__(
        self,
        tokens: Sequence[Token] = (),
        allowances: Allowances | None = None,
        incoming: IncomingBodies | None = None,
        audit: Audit | None = None,
        refusals: Counter[str] | None = None,
    ) -> None:
        """`refusals` counts calls that end with an error, by reason."""
        self._tokens = KnownTokens(tokens)
        self._allowances = allowances or Allowances({}, 0.0)
        self.incoming = incoming or IncomingBodies()
        self.audit = audit or Audit(None, time.monotonic)
        self._refusals = refusals if refusals is not None else Counter()

    def use(self, tokens: Sequence[Token]) -> None:
        """Use these tokens from the next call on; running streams continue."""
        self._tokens = KnownTokens(tokens)

    def is_operator(self, authorization: str) -> bool:
        token = self._tokens.find(authorization)
        return token is not None and token.admin

    def authenticate(
        self, name: str, access: Access, authorization: str | None, peer: str
    ) -> Caller:
        """Return the caller, and audit the use of its token. `name`: the method's name."""
        try:
            caller = self._tokens.authenticate(access, authorization, peer)
        except PensieveError as error:
            token = self._tokens.find(authorization)
            self.audit.refused(name, peer, error.reason, "" if token is None else token.log_name)
            raise
        if caller.token:
            self.audit.token_used(caller.token, caller.tenant, peer)
        return caller

    def allowance(self, tenant: str) -> Allowance:
        return self._allowances.of(tenant, _now())

    def count_refusal(self, error: PensieveError) -> None:
        reason, limit = error.reason, error.limit if isinstance(error, QueueFull) else ""
        self._refusals[f"{reason}.{limit}" if limit else reason] += 1


class GuardedCall:
    """A call, as a context manager. An exception inside the block is sent to the client and suppressed."""

    def __init__(
        self,
        guard: Guard,
        kind: CallKind,
        name: str,
        transport: Transport,
        send_error: Callable[[PensieveError], Awaitable[None]],
        audited: Callable[[], AuditedCall | None] | None = None,
    ) -> None:
        """`name`: method or path, for logs. `send_error` sends an error to the client.

        `audited` returns the entry for the audit log. It is called when a call with a known caller ends.
        """
        self.name = name
        self.caller: Caller | None = None  # set by `enter`
        self.ended_early = False  # the client has disconnected, or the handler has sent an error
        self._guard, self._kind, self._transport = guard, kind, transport
        self._send_error, self._make_audit_entry = send_error, audited
        self._began = _now() if audited is not None else 0.0
        self._allowance: Allowance | None = None  # set if the call is counted
        self._num_unread_bytes = 0  # bytes of an unstreamed answer, until the call ends
        self._received: ReceivedBytes | None = None
        self._counts_until_call_ends = False

    async def enter(
        self,
        authorization: str | None,
        forwarded: Callable[[], str | None] = lambda: None,
    ) -> Caller:
        """Return the caller. Raises if there are too many calls, or if the caller lacks permission.

        `forwarded` returns the caller that a forwarding daemon named. It is ignored for calls that are not
        from another daemon.
        """
        guard, kind, transport = self._guard, self._kind, self._transport
        self.caller = caller = guard.authenticate(
            self.name, kind.access, authorization, transport.peer()
        )
        is_forwarded = caller.is_peer and kind.access in (Access.CALLER, Access.PEER)
        if is_forwarded and (by := forwarded()) is not None:
            return self.enter_forwarded(decode_caller(by))
        set_caller(caller)
        if kind.is_counted:
            self._allowance = allowance = guard.allowance(caller.tenant)
            allowance.num_calls += 1
            transport.add_done_callback(self._on_transport_end)
            allowed = 2 if kind.is_repeated else 1
            exceeded = allowance.calls_exceeded(allowed) or allowance.count_request(_now())
            if exceeded is not None:
                raise exceeded
            await self._pause(allowance.seconds_to_begin(_now()))
        return caller

    def enter_forwarded(self, by: Caller) -> Caller:
        """Admit the caller of a forwarded call. The forwarding daemon has authenticated and counted the call.

        If the daemons share a secret, the forwarding daemon audits the call. Otherwise it is audited here.
        """
        self.caller = by
        if by.is_peer:
            self._make_audit_entry = None
        set_caller(by)
        return by

    async def body(self, *, in_pieces: bool = False) -> bytes:
        """Receive the message of a gRPC request, or the body of an HTTP request (`in_pieces`).

        The bytes of an HTTP body count as held until the call ends, because such a body may be large. The
        bytes of a gRPC message count only until the first piece of a streamed answer is sent.
        """
        assert self.caller is not None
        incoming, transport = self._guard.incoming, self._transport
        peer = transport.peer()
        if not self.caller.known:
            return await incoming.unknown_callers_body(
                transport, peer, is_watch=self._kind.is_watch
            )
        receive = incoming.http_body if in_pieces else incoming.body
        raw, received = await receive(transport, group_of(self.caller, peer))
        if self._kind.is_counted:
            self._received, self._counts_until_call_ends = received, in_pieces
        else:
            received.release()  # a watch may stay open without limit
        return raw

    def count_answer(self, num_bytes: int) -> None:
        """Count an unstreamed answer. Raises QueueFull if the tenant would have too many unread bytes."""
        if self._allowance is None:
            return
        if (exceeded := self._allowance.unread_exceeded(num_bytes)) is not None:
            raise exceeded
        self._allowance.num_unread_bytes += num_bytes
        self._num_unread_bytes = num_bytes

    async def send(self, num_bytes: int, write: Callable[[T], Awaitable[None]], piece: T) -> None:
        """Write a piece of a stream, after the tenant's clients have read enough of their answers."""
        if self._received is not None and not self._counts_until_call_ends:
            self._received.release()
        allowance = self._allowance
        if allowance is None:
            await write(piece)
            return
        while allowance.num_unread_bytes and allowance.unread_exceeded(num_bytes) is not None:
            await asyncio.sleep(POLL_SECONDS)
        allowance.num_unread_bytes += num_bytes
        try:
            await write(piece)
        finally:
            allowance.num_unread_bytes -= num_bytes

    async def __aenter__(self) -> GuardedCall:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        outcome = "CANCELLED"
        try:
            if error is None:
                outcome = outcome if self.ended_early else "OK"
            elif isinstance(error, PensieveError):
                outcome = error.reason
                await self._report(error)
            elif isinstance(error, Exception):
                outcome, incident = "INTERNAL", secrets.token_hex(8)
                log.error("incident %s in %s", incident, self.name, exc_info=error)
                fault = ServerFault(f"internal error {incident}")
                self._guard.count_refusal(fault)
                await self._send_error(fault)
            else:
                return False
            return True
        finally:
            if self._received is not None:
                self._received.release()
            if self._make_audit_entry is not None and self.caller is not None:
                self._audit(outcome, self._make_audit_entry())

    async def _report(self, error: PensieveError) -> None:
        self._guard.count_refusal(error)
        if is_for_the_log(error):
            log.error("%s failed: %s", self.name, whole_line(error))
        if self._allowance is not None:
            await self._pause(self._allowance.seconds_to_refuse(error, _now()))
        await self._send_error(error)

    def _audit(self, outcome: str, audited: AuditedCall | None) -> None:
        assert self.caller is not None
        if audited is not None:
            seconds = _now() - self._began
            peer = self._transport.peer()
            self._guard.audit.ended(audited, self.caller, peer, outcome, seconds)

    async def _pause(self, seconds: float) -> None:
        """Sleep, but at most half of the caller's remaining time."""
        if seconds:
            left = self._transport.time_remaining()
            await asyncio.sleep(seconds if left is None else min(seconds, left / 2))

    def _on_transport_end(self, _: Any) -> None:
        assert self._allowance is not None
        self._allowance.num_calls -= 1
        self._allowance.num_unread_bytes -= self._num_unread_bytes


def _now() -> float:
    return asyncio.get_running_loop().time()
