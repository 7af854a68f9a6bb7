"""What a request says behind the question mark of its path."""

from __future__ import annotations

from urllib.parse import parse_qsl

from pensieve.service.http.exchange import Exchange
from pensieve.service.openai import Refusal

PAGE_SIZE = 20
PAGE_SIZE_MAX = 100


def query_of(exchange: Exchange) -> dict[str, str]:
    """The first value of each name."""
    raw = exchange.scope.get("query_string", b"").decode("latin-1")
    found: dict[str, str] = {}
    try:
        pairs = parse_qsl(raw, max_num_fields=64)
    except ValueError:
        raise Refusal("query", "has too many parameters") from None
    for name, value in pairs:
        found.setdefault(name, value)
    return found


def limit_of(query: dict[str, str]) -> int:
    """How many of a list are wanted."""
    given = query.get("limit", str(PAGE_SIZE))
    if not (given.isascii() and given.isdigit() and 1 <= int(given[:9]) <= PAGE_SIZE_MAX):
        raise Refusal("limit", f"must lie in 1..{PAGE_SIZE_MAX}")
    return int(given)


def is_descending(query: dict[str, str]) -> bool:
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise Refusal("order", "must be asc or desc")
    return order == "desc"
