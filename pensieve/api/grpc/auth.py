"""Authentication of every call, the token file, and the status of a call that fails.

One interceptor stands before every method of every service.  With a token file, each method but the health
check needs a token, known by its SHA-256 and compared in constant time.  AdminService needs a token with
`admin`, or the UNIX socket in the data folder; ReplicaService needs such a token where there are tokens.  A
token names its tenant; conversations of another tenant do not exist.

The body of a request is received once its caller is known (calls.py), and parsed once its fields are known to
be small enough (sizes.py).

A call fails with our errors' codes and details; a request that cannot be parsed, with INVALID_ARGUMENT;
anything else, with INTERNAL and an id that the log explains.  A client that leaves is no failure.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
import secrets
import time
import tomllib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from pensieve.api.grpc import sizes, translate
from pensieve.core.turn import PRIORITY_MAX, PRIORITY_MIN
from pensieve.errors import (
    ConfigError,
    InvalidArgument,
    PensieveError,
    PermissionDenied,
    QueueFull,
    Unauthenticated,
    whole_line,
)
from pensieve.guard.audit import ADMIN_PREFIX, Audit, is_audited
from pensieve.guard.calls import Call, Held, Incoming
from pensieve.guard.limits import LIMIT_NAMES, NO_LIMITS, WHOLE, Allowances, Limits
from pensieve.store.records import ID_PATTERN

log = logging.getLogger("pensieve")
KEYS = {"sha256", "name", "tenant", "admin", "priority_max", *LIMIT_NAMES}
SHOWN_DIGITS = 12  # of a digest, where a token has no name
HEALTH_PREFIX = "/grpc.health.v1.Health/"
REPLICA_PREFIX = "/pensieve.v1.ReplicaService/"  # for daemons, which know no other's socket
WATCH_METHOD = HEALTH_PREFIX + "Watch"
LOCAL_PREFIX = "unix:"  # of a peer; with its colon, no tenant's name


@dataclass(frozen=True)
class Token:
    sha256: bytes
    tenant: str = ""
    admin: bool = False
    limits: Limits = NO_LIMITS
    priority_max: int = PRIORITY_MAX  # of its turns; a higher one is lowered to it
    name: str = ""  # in the audit log

    @property
    def shown(self) -> str:
        return self.name or self.sha256.hex()[:SHOWN_DIGITS]


@dataclass(frozen=True)
class Caller:
    tenant: str = ""
    admin: bool = False
    known: bool = True  # by a token, or because none is needed
    priority_max: int = PRIORITY_MAX
    token: str = field(default="", compare=False)  # as people know it


ANONYMOUS = Caller()
_caller: ContextVar[Caller] = ContextVar("caller", default=ANONYMOUS)


def caller() -> Caller:
    return _caller.get()


def set_caller(found: Caller) -> None:
    _caller.set(found)


def read_tokens(path: Path) -> tuple[Token, ...]:
    """The token file: TOML, a `[[token]]` for each with sha256, tenant and admin."""
    try:
        text = path.read_bytes()
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    tokens = tokens_of(path, text)
    check_mode(path, mode)
    return tokens


def check_mode(path: Path, mode: int) -> None:
    """Only its owner may write to it.  Reading it helps nobody: it holds digests of random tokens."""
    if mode & 0o022:
        raise ConfigError(f"others can write to {path}; chmod 644 it")


def tokens_of(path: Path, text: bytes) -> tuple[Token, ...]:
    """What a token file with this text says; `path` is named where it is wrong."""
    try:
        table = tomllib.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, a number too long, too deep
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    tokens = []
    entries = table.get("token", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{path}: `token` is a list of tables, written [[token]]")
    for number, entry in enumerate(entries, 1):
        if unknown := set(entry) - KEYS:
            raise ConfigError(f"{path}: token {number} has an unknown key {sorted(unknown)[0]!r}")
        digest = str(entry.get("sha256", ""))
        if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise ConfigError(f"{path}: the sha256 of token {number} is not 64 hexadecimal digits")
        tenant = str(entry.get("tenant", ""))
        name = str(entry.get("name", ""))
        for key, word in (("tenant", tenant), ("name", name)):
            if word and not ID_PATTERN.fullmatch(word):
                raise ConfigError(f"{path}: the {key} of token {number} is no id")
        limits = {key: entry[key] for key in LIMIT_NAMES if key in entry}
        for key, value in limits.items():
            kind: Any = int if key in WHOLE else int | float
            if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < math.inf:
                whole = "whole " if key in WHOLE else ""
                raise ConfigError(
                    f"{path}: {key} of token {number} is not a positive {whole}number"
                )
        priority = entry.get("priority_max", PRIORITY_MAX)
        if type(priority) is not int or not PRIORITY_MIN <= priority <= PRIORITY_MAX:
            raise ConfigError(
                f"{path}: priority_max of token {number} is not in {PRIORITY_MIN}..{PRIORITY_MAX}"
            )
        admin = bool(entry.get("admin"))
        tokens.append(Token(bytes.fromhex(digest), tenant, admin, Limits(**limits), priority, name))
    if not tokens:
        raise ConfigError(f"{path} names no token; `pensieve token` makes one")
    return tuple(tokens)


def limits_of(tokens: Sequence[Token]) -> dict[str, Limits]:
    """By tenant; all tokens of a tenant must say the same."""
    found: dict[str, Limits] = {}
    for token in tokens:
        if found.setdefault(token.tenant, token.limits) != token.limits:
            raise ConfigError(f"tenant {token.tenant!r} has two different limits")
    return found


class AuthInterceptor(grpc.aio.ServerInterceptor):
    def __init__(
        self,
        tokens: Sequence[Token] = (),
        allowances: Allowances | None = None,
        incoming: Incoming | None = None,
        audit: Audit | None = None,
        refusals: Counter[str] | None = None,
    ) -> None:
        """`refusals` counts the calls that end with an error, by its reason."""
        self._tokens = tuple(tokens)
        self._allowances = allowances or Allowances({}, 0.0)
        self.incoming = incoming or Incoming()
        self.audit = audit or Audit(None, time.monotonic)
        self._refusals = refusals if refusals is not None else Counter()

    def use(self, tokens: Sequence[Token]) -> None:
        """From the next call on; streams that have begun go on."""
        self._tokens = tuple(tokens)

    def is_operator(self, authorization: str) -> bool:
        found = self._known((("authorization", authorization),))
        return found is not None and found.admin

    def authenticate(self, method: str, metadata: Iterable[tuple[str, Any]], peer: str) -> Caller:
        """Who may call this method; our error for everybody else."""
        local = _is_local(peer)
        metadata = tuple(metadata)
        given = self._known(metadata)
        if method.startswith(HEALTH_PREFIX):
            known = given is not None or local or not self._tokens
            return Caller(given.tenant if given is not None else "", known=known)
        admin = local or (given is not None and given.admin)
        if method.startswith(ADMIN_PREFIX) and not admin:
            if given is None and self._tokens:
                raise _unauthenticated(metadata)
            raise PermissionDenied("an admin token is needed, or the socket in the data folder")
        if self._tokens and given is None and not local:
            raise _unauthenticated(metadata)
        if method.startswith(REPLICA_PREFIX) and self._tokens and not admin:
            raise PermissionDenied("an admin token is needed")
        if given is None:
            return Caller("", admin)
        return Caller(given.tenant, admin, priority_max=given.priority_max, token=given.shown)

    def admitted(self, method: str, metadata: Iterable[tuple[str, Any]], peer: str) -> Caller:
        """The same, for the audit log too."""
        try:
            found = self.authenticate(method, metadata, peer)
        except PensieveError as error:
            known = self._known(metadata)
            self.audit.refused(method, peer, error.reason, known.shown if known else "")
            raise
        self.audit.token_used(found.token, found.tenant, peer)
        return found

    def enter(self, context: Any, tenant: str) -> Call:
        return Call(context, self._allowances.of(tenant, asyncio.get_running_loop().time()))

    def count_refusal(self, error: PensieveError | None) -> None:
        """A call has ended with an error; None: with one that nobody foresaw."""
        limit = error.limit if isinstance(error, QueueFull) else ""
        reason = "INTERNAL" if error is None else error.reason
        self._refusals[f"{reason}.{limit}" if limit else reason] += 1

    async def _body(self, context: Any, by: Caller, method: str) -> tuple[bytes, Held | None]:
        peer = context.peer()
        if not by.known:
            is_watch = method == WATCH_METHOD
            return await self.incoming.strangers_body(context, peer, is_watch=is_watch), None
        return await self.incoming.body(context, group_of(by, peer))

    async def _messages(
        self, context: Any, by: Caller, parse: Callable[[bytes], Any]
    ) -> AsyncIterator[Any]:
        """Of a call that sends many; each is received once the one before was taken in."""
        async for raw in self.incoming.bodies(context, group_of(by, context.peer())):
            yield _parsed(parse, raw)

    def _known(self, metadata: Iterable[tuple[str, Any]]) -> Token | None:
        value = next((value for key, value in metadata if key == "authorization"), "")
        if not isinstance(value, str) or not value.startswith("Bearer "):
            return None
        digest = hashlib.sha256(value[7:].encode()).digest()
        found = None
        for token in self._tokens:  # all of them, whichever it is
            if hmac.compare_digest(token.sha256, digest):
                found = token
        return found

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        metadata = tuple(details.invocation_metadata or ())
        is_counted = not details.method.startswith((ADMIN_PREFIX, HEALTH_PREFIX))
        parse = handler.request_deserializer or bytes

        async def guarded(
            act: Callable[[Any, Any], Any], requests: Any, context: Any, takes: str
        ) -> Any:
            began, peer = asyncio.get_running_loop().time(), context.peer()
            found, outcome = ANONYMOUS, "CANCELLED"
            call: Call | None = None
            held: Held | None = None
            try:
                found = self.admitted(details.method, metadata, peer)
                set_caller(found)
                if is_counted:
                    call = context = self.enter(context, found.tenant)
                    await call.admit(details.method)
                if takes == "many":
                    requests = self._messages(context, found, parse)
                elif takes == "one":
                    raw, held = await self._body(context, found, details.method)
                    requests = _parsed(parse, raw)
                    del raw
                    if held is not None and call is not None:
                        call.received(held)
                    elif held is not None:
                        held.release()  # a watch may last for ever
                answer = await act(requests, context)
                if call is not None and answer is not None:
                    call.answers(answer)
                outcome = "OK"
                return answer
            except asyncio.CancelledError:
                raise
            except grpc.aio.AbortError as aborted:  # by a handler: its status has been sent
                _let_go(aborted)
            except grpc.aio.InternalError:  # of gRPC: the client left while it was written to
                await _abort(context, grpc.StatusCode.CANCELLED, "the client has left")
            except PensieveError as error:
                outcome = error.reason
                self.count_refusal(error)
                if translate.is_of_the_machine(error):
                    log.error("%s failed: %s", details.method, whole_line(error))
                if call is not None:
                    await call.refused(error)
                await abort_with(context, error)
            except Exception:
                outcome = "INTERNAL"
                self.count_refusal(None)
                incident = secrets.token_hex(8)
                log.exception("incident %s in %s", incident, details.method)
                await _abort(context, grpc.StatusCode.INTERNAL, f"internal error {incident}")
            finally:
                if held is not None:
                    held.release()
                if found is not ANONYMOUS and is_audited(details.method, requests):
                    self.audit.ended(details.method, requests, found, peer, outcome, began)

        for act, make, takes in (
            (handler.unary_unary, grpc.stream_unary_rpc_method_handler, "one"),
            (handler.unary_stream, grpc.stream_stream_rpc_method_handler, "one"),
            (handler.stream_unary, grpc.stream_unary_rpc_method_handler, "many"),
        ):
            if act is not None:
                guard = partial(guarded, act, takes=takes)
                return make(guard, response_serializer=handler.response_serializer)
        both = handler.stream_stream  # reflection, the only one that there is
        if both is None:
            return None

        async def talk(requests: Any, context: Any) -> None:
            async for response in both(requests, context):
                await context.write(response)

        return grpc.stream_stream_rpc_method_handler(
            partial(guarded, talk, takes="a stream"),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def _unauthenticated(metadata: Iterable[tuple[str, Any]]) -> Unauthenticated:
    if any(key == "authorization" for key, _ in metadata):
        return Unauthenticated("the token is not known to this daemon")
    return Unauthenticated("a token is needed")


def group_of(by: Caller, peer: str) -> str:
    """With whom a caller shares what may be on its way."""
    return LOCAL_PREFIX if _is_local(peer) else by.tenant


def _is_local(peer: str) -> bool:
    """Whether it comes by the socket in the data folder; check_exposure refuses any other UNIX socket."""
    return peer.startswith(LOCAL_PREFIX)


def _parsed(parse: Callable[[bytes], Any], raw: bytes) -> Any:
    kind = getattr(parse, "__self__", None)
    if kind is not None:  # of a class of messages
        sizes.check(kind, raw)
    try:
        return parse(raw)
    except (DecodeError, UnicodeDecodeError, ValueError):
        raise InvalidArgument("request", "is not a message of this method") from None


async def abort_with(context: Any, error: PensieveError) -> None:
    context.set_trailing_metadata(
        ((translate.DETAILS_KEY, translate.status(error).SerializeToString()),)
    )
    await _abort(context, translate.status_code(error), translate.text_of(error))


async def _abort(context: Any, code: grpc.StatusCode, text: str) -> None:
    """Send the status, and return: the handler has to return too.

    A status that is set and left to gRPC goes with an empty message. A client that reads nothing holds up the
    message, and so the call.
    """
    try:
        await context.abort(code, text)
    except grpc.aio.AbortError as aborted:  # which gRPC raises again when the handler has returned
        _let_go(aborted)
    except grpc.aio.InternalError:  # the client has left
        raise asyncio.CancelledError from None


def _let_go(aborted: grpc.aio.AbortError) -> None:
    """Free the frames that the error holds, and so the request: gRPC keeps the error with the call."""
    aborted.__traceback__ = aborted.__context__ = None


def new_token(tenant: str, admin: bool, name: str = "", **limits: float | None) -> tuple[str, str]:
    """A token for a client, and the entry for the token file; limits are named as in it."""
    assert limits.keys() <= KEYS, limits
    token = secrets.token_urlsafe(32)
    lines: Mapping[str, str] = {
        "sha256": f'"{hashlib.sha256(token.encode()).hexdigest()}"',
        **({"name": f'"{name}"'} if name else {}),
        "tenant": f'"{tenant}"',
        "admin": str(admin).lower(),
        **{name: str(value) for name, value in limits.items() if value is not None},
    }
    entry = "\n".join(["[[token]]", *(f"{name} = {value}" for name, value in lines.items())])
    return token, entry + "\n"
