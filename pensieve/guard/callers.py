"""Authenticate callers: the token file, and the rights of tokens.

With a token file, a call needs a token unless its method is open to anybody. The file has SHA-256 digests of
the tokens, which are compared in constant time. A token belongs to a tenant and gives access only to that
tenant's conversations. A caller on the UNIX socket in the data folder is the operator.

The other daemons of the cluster have their own tokens (`is_peer`). A daemon that forwards a call tells the
owner who the caller is, and the rights of this caller apply. The owner accepts the named caller only if the
call has a peer's token.

Peers are written in gRPC's notation: `ipv4:HOST:PORT`, `ipv6:[HOST]:PORT`, or `unix:` for the socket.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import secrets
import tomllib
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any

from pensieve.core.turn import PRIORITY_MAX, PRIORITY_MIN
from pensieve.errors import ConfigError, InvalidArgument, PermissionDenied, Unauthenticated
from pensieve.guard.limits import INTEGER_LIMITS, LIMIT_NAMES, NO_LIMITS, Limits
from pensieve.store.records import ID_PATTERN

KEYS = {"sha256", "name", "tenant", "admin", "priority_max", *LIMIT_NAMES}
CALLER_FIELDS = {"tenant": str, "admin": bool, "known": bool, "priority_max": int, "token": str}
LOG_NAME_DIGITS = 12  # digits of the digest that identify a token without a name in the audit log
LOCAL_PREFIX = "unix:"  # prefix of peers on the socket; no tenant's name contains a colon


class Access(Enum):
    """Who may make a call."""

    ANYBODY = auto()
    CALLER = auto()  # with any token, if the daemon uses tokens
    REPLICA = auto()  # daemons and scrapers: with an admin token, if the daemon uses tokens
    PEER = auto()  # with the token of another daemon; if there are none, like CALLER
    OPERATOR = auto()  # with an admin token, or on the local socket


@dataclass(frozen=True)
class Token:
    sha256: bytes
    tenant: str = ""
    admin: bool = False
    limits: Limits = NO_LIMITS
    priority_max: int = PRIORITY_MAX  # of its turns; higher priorities are lowered to this value
    name: str = ""  # in the token file and the audit log
    is_peer: bool = False  # belongs to the other daemons of a cluster

    @property
    def log_name(self) -> str:
        """The token's name in the audit log."""
        return self.name or self.sha256.hex()[:LOG_NAME_DIGITS]


@dataclass(frozen=True)
class Caller:
    tenant: str = ""
    admin: bool = False
    known: bool = True  # the caller has a valid token, or the daemon needs no tokens
    priority_max: int = PRIORITY_MAX
    token: str = field(default="", compare=False)  # name or digits of the digest, for the audit log
    is_peer: bool = False  # the call came from another daemon of the cluster


ANONYMOUS = Caller()
_caller: ContextVar[Caller] = ContextVar("caller", default=ANONYMOUS)


def caller() -> Caller:
    return _caller.get()


def set_caller(found: Caller) -> None:
    _caller.set(found)


def read_tokens(path: Path) -> tuple[Token, ...]:
    """Read the token file: TOML with a `[[token]]` table for each token."""
    try:
        text = path.read_bytes()
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(
            f"--token-file: cannot read {path}: {error.strerror} (`pensieve token --file {path}` makes one)"
        ) from error
    tokens = tokens_of(path, text)
    check_mode(path, mode)
    return tokens


def check_mode(path: Path, mode: int) -> None:
    """Refuse a file that others can write. Others may read it, because it has only digests of tokens."""
    if mode & 0o022:
        raise ConfigError(f"others can write to {path}; chmod 644 it")


def tokens_of(path: Path, text: bytes) -> tuple[Token, ...]:
    """Parse a token file; errors name `path`."""
    try:
        table = tomllib.loads(text.decode("utf-8"))
    except (
        ValueError,
        RecursionError,
    ) as error:  # not TOML, not UTF-8, nested too deeply, or a number with too many digits
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    tokens = []
    entries = table.get("token", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{path}: `token` must be a list of tables, written [[token]]")
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
                raise ConfigError(f"{path}: the {key} of token {number} is not a valid id")
        limits = {key: entry[key] for key in LIMIT_NAMES if key in entry}
        for key, value in limits.items():
            kind: Any = int if key in INTEGER_LIMITS else int | float
            if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < math.inf:
                whole = "whole " if key in INTEGER_LIMITS else ""
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
        raise ConfigError(f"{path} has no token; create one with `pensieve token`")
    return tuple(tokens)


def limits_of(tokens: Sequence[Token]) -> dict[str, Limits]:
    """Return the limits of each tenant. Raises ConfigError if a tenant's tokens have different limits."""
    found: dict[str, Limits] = {}
    for token in tokens:
        if found.setdefault(token.tenant, token.limits) != token.limits:
            raise ConfigError(f"the tokens of tenant {token.tenant!r} have different limits")
    return found


class KnownTokens:
    """The tokens that are in force."""

    def __init__(self, tokens: Sequence[Token] = ()) -> None:
        self._tokens = tuple(tokens)

    def find(self, authorization: str | None) -> Token | None:
        """Return the token of an `authorization` header."""
        if not self._tokens or not authorization or not authorization.startswith("Bearer "):
            return None
        digest = hashlib.sha256(authorization[7:].encode()).digest()
        found = None
        for token in self._tokens:  # compare with all tokens, so that the time reveals nothing
            if hmac.compare_digest(token.sha256, digest):
                found = token
        return found

    def authenticate(self, access: Access, authorization: str | None, peer: str) -> Caller:
        """Return the caller. Raises Unauthenticated or PermissionDenied."""
        is_local, token = is_local_peer(peer), self.find(authorization)
        if access is Access.ANYBODY:
            known = token is not None or is_local or not self._tokens
            return Caller("" if token is None else token.tenant, known=known)
        admin = is_local or (token is not None and token.admin)
        if self._tokens and token is None and not is_local:
            is_given = authorization is not None
            problem = "the token is not known to this daemon" if is_given else "a token is needed"
            raise Unauthenticated(problem)
        if access is Access.OPERATOR and not admin:
            raise PermissionDenied("an admin token is needed, or the socket in the data folder")
        if access is Access.REPLICA and self._tokens and not admin:
            raise PermissionDenied("an admin token is needed")
        has_peers = any(each.is_peer for each in self._tokens)
        if access is Access.PEER and has_peers and not (token is not None and token.is_peer):
            raise PermissionDenied("only the other daemons of the cluster may call this")
        if token is None:
            return Caller("", admin)
        return Caller(
            token.tenant,
            admin,
            priority_max=token.priority_max,
            token=token.log_name,
            is_peer=token.is_peer,
        )


def encode_caller(by: Caller) -> str:
    """Encode a caller for another daemon: one line of ASCII."""
    fields = {name: getattr(by, name) for name in CALLER_FIELDS}
    return json.dumps(fields, separators=(",", ":"))


def decode_caller(text: str) -> Caller:
    """Decode a caller from another daemon; raises InvalidArgument."""
    try:
        fields = json.loads(text)
        if {name: type(value) for name, value in fields.items()} != CALLER_FIELDS:
            raise ValueError(text)
    except (ValueError, AttributeError):
        raise InvalidArgument("caller", "is not in the format that daemons use") from None
    return Caller(**fields, is_peer=True)


def is_local_peer(peer: str) -> bool:
    """Return whether the peer uses the socket in the data folder.

    That is the only UNIX socket, because `check_exposure` refuses others.
    """
    return peer.startswith(LOCAL_PREFIX)


def group_of(by: Caller, peer: str) -> str:
    """Return the group of callers that share limits for request bodies."""
    return LOCAL_PREFIX if is_local_peer(peer) else by.tenant


def new_token(tenant: str, admin: bool, name: str = "", **limits: float | None) -> tuple[str, str]:
    """Return a new token and its entry for the token file. Limits have the same names as in the file."""
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
