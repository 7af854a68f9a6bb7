"""Retries over HTTP: find the first request with the same `Idempotency-Key`.

A retry does not run a second turn. The first request is found by an id that is derived from the key:

    chat completions, messages    the request_id of the turn; the binder looks for it in all conversations of
                                  the tenant (binding/binder.py, column `idempotency_key` of `turns`)
    responses                     the id of the response, running or stored

The request_id of a turn is forgotten after 7 days. If the turn has failed, a retry runs a new turn. A
response is known until it is deleted. If a background response has failed, a retry returns the failed
response.

A key with a different body is refused. A retry waits while the first request is being started
(`ArrivingTurns.one_at_a_time`). If the client sent a key, its turn continues for 5 seconds after a
disconnect, because clients then retry. For requests that store nothing, the key is ignored: a retry runs the
request again.

Over gRPC, SendMessage has the field request_id instead: `Daemon.begin` looks for the running turn, and
`History.draft` for the stored one. In a batch job, each line has at most one result (jobs/job_store.py).
"""

from __future__ import annotations

import hashlib

from pensieve.api.http.exchange import Exchange
from pensieve.errors import InvalidArgument


def key_of(exchange: Exchange) -> str:
    """Return the client's key, which may be any text. Empty if there is none."""
    return exchange.headers.get("idempotency-key", "")


def retry_key_of(exchange: Exchange) -> str:
    """Return the client's key, or the key that the forwarding daemon has set. Empty if there is none.

    Two daemons may execute a forwarded request, one after the other. The key ensures that only one turn runs.
    """
    return key_of(exchange) or exchange.retry_key


def request_id_of(exchange: Exchange) -> str:
    """Return the turn's request_id, which is derived from the key. Empty without a key."""
    key = retry_key_of(exchange)
    return f"key-{digest(key)}" if key else ""


def key_reused() -> InvalidArgument:
    return InvalidArgument("idempotency-key", "was used before with another request")


def digest(*words: object) -> str:
    return hashlib.blake2b("/".join(map(str, words)).encode(), digest_size=12).hexdigest()
