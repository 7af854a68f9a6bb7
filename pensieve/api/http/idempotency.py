"""The same request again over HTTP, by its `Idempotency-Key`.

A request with a key that came before is not run a second time. The key becomes a name by which the first
request is found:

    chat completions, messages    the request_id of its turn; the binder looks for it in all conversations of
                                  the tenant (binding/binder.py, column `idempotency_key` of `turns`)
    responses                     the response's id; a response that runs or is stored has it

A key of responses names the response, not its turn. A response is known until it is deleted, and one that
failed in the background is returned as it is; the request_id of a turn is forgotten after 7 days, and a turn
that failed runs again. The refusal and the waiting are the same.

A request that stores nothing (`store: false`, a text completion) ignores its key and runs again.

A key with another body is refused. While the first request is about to begin, the same request waits
(`ArrivingTurns.one_at_a_time`). A turn whose client sent a key goes on for the grace of 5 seconds when the
client leaves, because that is when clients retry.

Over gRPC, SendMessage has a request_id of its own (conversations/history.py).
"""

from __future__ import annotations

import hashlib

from pensieve.api.http.exchange import Exchange
from pensieve.errors import InvalidArgument


def key_of(exchange: Exchange) -> str:
    """Return the key, which may be any text; empty if there is none."""
    return exchange.headers.get("idempotency-key", "")


def retry_key_of(exchange: Exchange) -> str:
    """Return the client's key, or the one of a request that is forwarded; empty if there is none.

    Two daemons may carry out a forwarded request, one after the other. It is one turn.
    """
    return key_of(exchange) or exchange.retry_key


def request_id_of(exchange: Exchange) -> str:
    """Return the request_id for the turn of a request with a key; empty if it has none."""
    key = retry_key_of(exchange)
    return f"key-{digest(key)}" if key else ""


def key_reused() -> InvalidArgument:
    return InvalidArgument("idempotency-key", "was used before with another request")


def digest(*words: object) -> str:
    return hashlib.blake2b("/".join(map(str, words)).encode(), digest_size=12).hexdigest()
