"""Retries over HTTP: find the first request with the same `Idempotency-Key`.

A retry is not run again. The key determines an id by which the first request is found:

    chat completions, messages    the request_id of its turn; the binder looks for it in all conversations of
                                  the tenant (binding/binder.py, column `idempotency_key` of `turns`)
    responses                     the id of the response, running or stored

A turn's request_id is forgotten after 7 days, and a failed turn runs again. A response is known until it is
deleted, and a failed background response is returned as it is.

A key with a different body is refused. While the first request is about to begin, a retry waits
(`ArrivingTurns.one_at_a_time`). A turn whose client sent a key runs on for the grace period of 5 seconds
after a disconnect, because that is when clients retry. Requests that store nothing ignore their key and run
again.

Over gRPC, SendMessage has a request_id of its own. `Daemon.begin` finds the running turn, and `History.draft`
the stored one. A batch job has one result per line: a line that is run again replaces nothing
(jobs/job_store.py).
"""

from __future__ import annotations

import hashlib

from pensieve.api.http.exchange import Exchange
from pensieve.errors import InvalidArgument


def key_of(exchange: Exchange) -> str:
    """Return the client's key, which may be any text; empty if absent."""
    return exchange.headers.get("idempotency-key", "")


def retry_key_of(exchange: Exchange) -> str:
    """Return the client's key, or the key of a forwarded request; empty if absent.

    Two daemons may execute a forwarded request, one after the other. It must be one turn.
    """
    return key_of(exchange) or exchange.retry_key


def request_id_of(exchange: Exchange) -> str:
    """Return the turn's request_id, derived from the key; empty without a key."""
    key = retry_key_of(exchange)
    return f"key-{digest(key)}" if key else ""


def key_reused() -> InvalidArgument:
    return InvalidArgument("idempotency-key", "was used before with another request")


def digest(*words: object) -> str:
    return hashlib.blake2b("/".join(map(str, words)).encode(), digest_size=12).hexdigest()
