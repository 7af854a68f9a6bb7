"""Derive ids from the `Idempotency-Key`, so that a retry over HTTP finds the first request.

    chat completions, messages    the request_id of the turn; the binder looks for it in all conversations of
                                  the tenant (column `idempotency_key` of `turns`)
    responses                     the id of the response, running or stored

docs/structure.md ("How a retry is recognised") explains how a request_id finds the turn. A retry finds a
response until it is deleted. If a background response has failed, a retry returns the failed response.

With a key, a turn continues for a grace period after a disconnect (conversations/followers.py), because
clients then retry. For requests that store nothing, the key is ignored: a retry runs the request again.
"""

from __future__ import annotations

import hashlib

from pensieve.api.http.exchange import Exchange
from pensieve.errors import InvalidArgument


def client_key_of(exchange: Exchange) -> str:
    """Return the client's key, which may be any text. Empty if there is none."""
    return exchange.headers.get("idempotency-key", "")


def client_or_forwarding_key_of(exchange: Exchange) -> str:
    """Return the client's key, or the key that the forwarding daemon has set. Empty if there is none.

    Two daemons may execute a forwarded request, one after the other. The key ensures that only one turn runs.
    """
    return client_key_of(exchange) or exchange.forwarding_key


def request_id_of(exchange: Exchange) -> str:
    """Return the turn's request_id, which is derived from the key. Empty without a key."""
    key = client_or_forwarding_key_of(exchange)
    return f"key-{digest(key)}" if key else ""


def reused_key_error() -> InvalidArgument:
    return InvalidArgument("idempotency-key", "was used before with another request")


def digest(*words: object) -> str:
    return hashlib.blake2b("/".join(map(str, words)).encode(), digest_size=12).hexdigest()
