"""`GET /`: the page, one file that brings all it needs and asks no other host for anything.

Its Content-Security-Policy allows the script and the style that it holds, by their digests, calls to the
place that it came from, and its icon, which lies in it; nothing else runs or is fetched, whatever a model
writes.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from importlib import resources
from typing import Any

from pensieve.service.grpc.auth import Caller
from pensieve.service.http.exchange import Exchange


class Page:
    def __init__(self) -> None:
        text = resources.files("pensieve.service.http").joinpath("page.html").read_text("utf-8")
        self._body = text.encode()
        script, style = (_digest(text, tag) for tag in ("script", "style"))
        self._headers = {
            "content-security-policy": f"default-src 'none'; script-src '{script}'; "
            f"style-src '{style}'; img-src data:; connect-src 'self'; base-uri 'none'; "
            "form-action 'none'; frame-ancestors 'none'",
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
        }

    async def __call__(self, exchange: Exchange, by: Caller) -> Mapping[str, Any] | None:
        exchange.out |= self._headers
        await exchange.answer_bytes(self._body, "text/html; charset=utf-8")
        return None


def _digest(text: str, tag: str) -> str:
    """Of what the one element of this name holds, as the policy writes it."""
    _, _, rest = text.partition(f"<{tag}>")
    held, end, _ = rest.partition(f"</{tag}>")
    assert end, tag
    return f"sha256-{base64.b64encode(hashlib.sha256(held.encode()).digest()).decode()}"
