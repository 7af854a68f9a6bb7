"""The guard before every call of every door: who is calling, what they may take, and how the call ends.

    enter     the caller is authenticated, counted, and admitted; a token's first use is audited
    body      the request is received, once the caller is known (request_bodies.py)
    send      an answer, or a piece of a stream, is counted until its client has taken it
    end       an error is counted, logged if the operator needs it, and told by the door; the call is audited

A call counts from the moment its caller is known until its client has taken the end or the connection is
gone. A tenant with more than `calls_max` calls is refused before the request is received. Methods that a
client repeats after its connection broke have twice as many. A tenant in debt has its calls begun, and its
errors told, at a pace (limits.py).

A call that another daemon forwards is authenticated, counted, admitted and audited there. Here it has its
caller, and the limits of bodies. Where daemons do not know each other, it is audited here, too.

An answer that would be too much beside what its tenant has not read yet (`unread_bytes`) is refused. A piece
of a stream waits; its reader is cancelled when it has waited too long (conversations/followers.py).

An error of our tree reaches the client as it is. Any other becomes a ServerFault with an incident id, which
is in the log with the traceback. A client that leaves is no failure.

All of it runs on the event loop.
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
    group_of,
    read_caller,
    set_caller,
)
from pensieve.guard.client_errors import is_of_the_machine
from pensieve.guard.limits import Allowance, Allowances
from pensieve.guard.request_bodies import IncomingBodies, ReceivedBytes, Transport

T = TypeVar("T")
log = logging.getLogger("pensieve")
LOOK_SECONDS = 0.05


class CallKind(NamedTuple):
    """What the guard has to know of a method or an endpoint."""

    access: Access = Access.CALLER
    is_counted: bool = True  # against its tenant's limits
    is_repeated: bool = False  # by a client whose connection broke
    is_watch: bool = False  # it may last for ever


class Guard:
    def __init__(
        self,
        tokens: Sequence[Token] = (),
        allowances: Allowances | None = None,
        incoming: IncomingBodies | None = None,
        audit: Audit | None = None,
        refusals: Counter[str] | None = None,
    ) -> None:
        """`refusals` counts the calls that end with an error, by its reason."""
        self._tokens = KnownTokens(tokens)
        self._allowances = allowances or Allowances({}, 0.0)
        self.incoming = incoming or IncomingBodies()
        self.audit = audit or Audit(None, time.monotonic)
        self._refusals = refusals if refusals is not None else Counter()

    def use(self, tokens: Sequence[Token]) -> None:
        """Use these tokens from the next call on; streams that have begun go on."""
        self._tokens = KnownTokens(tokens)

    def is_operator(self, authorization: str) -> bool:
        token = self._tokens.find(authorization)
        return token is not None and token.admin

    def authenticate(
        self, name: str, access: Access, authorization: str | None, peer: str
    ) -> Caller:
        """Return the caller of the method of this name, and audit it."""
        try:
            found = self._tokens.authenticate(access, authorization, peer)
        except PensieveError as error:
            token = self._tokens.find(authorization)
            self.audit.refused(name, peer, error.reason, "" if token is None else token.shown)
            raise
        if found.token:
            self.audit.token_used(found.token, found.tenant, peer)
        return found

    def allowance(self, tenant: str) -> Allowance:
        return self._allowances.of(tenant, _now())

    def count_refusal(self, error: PensieveError) -> None:
        reason, limit = error.reason, error.limit if isinstance(error, QueueFull) else ""
        self._refusals[f"{reason}.{limit}" if limit else reason] += 1


class GuardedCall:
    """One call, as a context manager: what goes wrong within is told to the client and ends here."""

    def __init__(
        self,
        guard: Guard,
        kind: CallKind,
        name: str,
        transport: Transport,
        tell: Callable[[PensieveError], Awaitable[None]],
        audited: Callable[[], AuditedCall | None] | None = None,
    ) -> None:
        """`name` is the method's or the path's, for logs. `tell` sends an error to the client.

        `audited` is asked at the end of a call whose caller was known: what the audit log has of it.
        """
        self.name = name
        self.caller: Caller | None = None  # once known
        self.has_left = (
            False  # set by the door when the client left, or was told of an error by the handler
        )
        self._guard, self._kind, self._transport = guard, kind, transport
        self._tell, self._audited = tell, audited
        self._began = _now() if audited is not None else 0.0
        self._allowance: Allowance | None = None  # of a call that is counted
        self._num_unread_bytes = 0  # of a whole answer, until the call has ended
        self._received: ReceivedBytes | None = None
        self._is_held_to_the_end = False

    async def enter(
        self,
        authorization: str | None,
        forwarded: Callable[[], str | None] = lambda: None,
    ) -> Caller:
        """Return the caller; an error if there are too many calls, or this caller may not make this one.

        `forwarded` returns whose call it is, as another daemon has written it. It is asked only if the call
        comes from another daemon.
        """
        guard, kind, transport = self._guard, self._kind, self._transport
        self.caller = found = guard.authenticate(
            self.name, kind.access, authorization, transport.peer()
        )
        is_forwarded = found.is_peer and kind.access in (Access.CALLER, Access.PEER)
        if is_forwarded and (by := forwarded()) is not None:
            return self.enter_forwarded(read_caller(by))
        set_caller(found)
        if kind.is_counted:
            self._allowance = allowance = guard.allowance(found.tenant)
            allowance.num_calls += 1
            transport.add_done_callback(self._ended)
            allowed = 2 if kind.is_repeated else 1
            exceeded = allowance.calls_exceeded(allowed) or allowance.request(_now())
            if exceeded is not None:
                raise exceeded
            await self._pause(allowance.seconds_to_begin(_now()))
        return found

    def enter_forwarded(self, by: Caller) -> Caller:
        """Let the caller of a forwarded call in, who was authenticated and counted before.

        What comes from a peer is audited there. Anybody else may have sent the call.
        """
        self.caller = by
        if by.is_peer:
            self._audited = None
        set_caller(by)
        return by

    async def body(self, *, in_pieces: bool = False) -> bytes:
        """Receive the only message of a request, or a body that comes in pieces.

        The bytes of a message count until the first piece of a stream is sent, or the call ends. Those of a
        body that comes in pieces, which may be large, count until the call ends.
        """
        assert self.caller is not None
        incoming, transport = self._guard.incoming, self._transport
        peer = transport.peer()
        if not self.caller.known:
            return await incoming.strangers_body(transport, peer, is_watch=self._kind.is_watch)
        receive = incoming.piecewise if in_pieces else incoming.body
        raw, received = await receive(transport, group_of(self.caller, peer))
        if self._kind.is_counted:
            self._received, self._is_held_to_the_end = received, in_pieces
        else:
            received.release()  # a watch may last for ever
        return raw

    def answers(self, num_bytes: int) -> None:
        """The only answer, of so many bytes, is about to be sent; QueueFull if it must not be."""
        if self._allowance is None:
            return
        if (exceeded := self._allowance.unread_exceeded(num_bytes)) is not None:
            raise exceeded
        self._allowance.num_unread_bytes += num_bytes
        self._num_unread_bytes = num_bytes

    async def send(self, num_bytes: int, write: Callable[[T], Awaitable[None]], piece: T) -> None:
        """Write a piece of a stream once its tenant's clients have read enough of what came before."""
        if self._received is not None and not self._is_held_to_the_end:
            self._received.release()
        allowance = self._allowance
        if allowance is None:
            await write(piece)
            return
        while allowance.num_unread_bytes and allowance.unread_exceeded(num_bytes) is not None:
            await asyncio.sleep(LOOK_SECONDS)
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
                outcome = outcome if self.has_left else "OK"
            elif isinstance(error, PensieveError):
                outcome = error.reason
                await self._failed(error)
            elif isinstance(error, Exception):
                outcome, incident = "INTERNAL", secrets.token_hex(8)
                log.error("incident %s in %s", incident, self.name, exc_info=error)
                fault = ServerFault(f"internal error {incident}")
                self._guard.count_refusal(fault)
                await self._tell(fault)
            else:
                return False
            return True
        finally:
            if self._received is not None:
                self._received.release()
            if self._audited is not None and self.caller is not None:
                self._audit(outcome, self._audited())

    async def _failed(self, error: PensieveError) -> None:
        self._guard.count_refusal(error)
        if is_of_the_machine(error):
            log.error("%s failed: %s", self.name, whole_line(error))
        if self._allowance is not None:
            await self._pause(self._allowance.seconds_to_refuse(error, _now()))
        await self._tell(error)

    def _audit(self, outcome: str, audited: AuditedCall | None) -> None:
        assert self.caller is not None
        if audited is not None:
            seconds = _now() - self._began
            peer = self._transport.peer()
            self._guard.audit.ended(audited, self.caller, peer, outcome, seconds)

    async def _pause(self, seconds: float) -> None:
        """Sleep, but not beyond half of the time that the caller waits."""
        if seconds:
            left = self._transport.time_remaining()
            await asyncio.sleep(seconds if left is None else min(seconds, left / 2))

    def _ended(self, _: Any) -> None:
        assert self._allowance is not None
        self._allowance.num_calls -= 1
        self._allowance.num_unread_bytes -= self._num_unread_bytes


def _now() -> float:
    return asyncio.get_running_loop().time()
