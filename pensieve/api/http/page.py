"""Serve the web page, and the snapshots of the engine's cache that the page draws."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Mapping
from importlib import resources
from typing import Any

from pensieve.api.http.exchange import Exchange, event
from pensieve.conversations.daemon import Daemon
from pensieve.conversations.live_turn import cache_key
from pensieve.engine.messages import Explain, Picture
from pensieve.errors import PensieveError
from pensieve.guard.callers import Caller
from pensieve.guard.limits import Watchers

FILES = (
    *("page.html", "page.css"),
    *("page_base.js", "page_markdown.js", "page_memory.js", "page.js"),  # in this order
)
LOOK_SECONDS = 0.5  # between two pictures
SHOWN_MAX = 64  # conversations in a picture
WATCHERS_MAX = 64  # watchers per tenant
WATCHERS_OF_ALL_MAX = 256
FIGURES = (
    *("device_pages", "device_pages_free", "host_pages", "host_pages_free"),
    *("turns_running", "turns_queued", "tokens_per_iteration"),
    *("tokens_swapped_in", "tokens_swapped_out"),
)


class PageEndpoint:
    """`GET /`: FILES as one document that needs nothing from another host.

    The Content-Security-Policy allows only the script and the style of the page (by their digests), its icon,
    and calls to its own origin. So text of a model can neither run a script nor load anything.
    """

    def __init__(self) -> None:
        files = resources.files("pensieve.api.http")
        text, style, *scripts = (files.joinpath(name).read_text("utf-8") for name in FILES)
        script = "".join(scripts)
        text = text.replace("<style></style>", f"<style>{style}</style>")
        self._body = text.replace("<script></script>", f"<script>{script}</script>").encode()
        self._headers = {
            "content-security-policy": f"default-src 'none'; script-src '{_digest(script)}'; "
            f"style-src '{_digest(style)}'; img-src data:; connect-src 'self'; base-uri 'none'; "
            "form-action 'none'; frame-ancestors 'none'",
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
        }

    async def __call__(self, exchange: Exchange, by: Caller) -> Mapping[str, Any] | None:
        exchange.out |= self._headers
        await exchange.answer_bytes(self._body, "text/html; charset=utf-8")
        return None


class MemoryEndpoints:
    """`GET /pensieve/memory`: events that show where the KV of a tenant's conversations is.

    Each event has a complete picture of the tenant's part of the engine's cache. All watchers of a tenant
    share a picture. A slow watcher misses some pictures.
    """

    def __init__(self, daemon: Daemon, shows_figures: bool) -> None:
        """`shows_figures`: show all callers the figures of the whole engine, which operators always see."""
        self._daemon, self._shows_figures = daemon, shows_figures
        self._watchers = Watchers(WATCHERS_MAX, WATCHERS_OF_ALL_MAX)
        self._pictures: dict[str, asyncio.Task[dict[str, Any]]] = {}  # by tenant

    async def __call__(self, exchange: Exchange, by: Caller) -> Mapping[str, Any] | None:
        with self._watchers.enter(by.tenant):
            await exchange.no_body()
            exchange.begin_events()
            while True:
                picture = dict(await self._picture(by.tenant))
                if not (self._shows_figures or by.admin):
                    del picture["figures"]
                await exchange.write(event(picture, "memory"))
                await asyncio.sleep(LOOK_SECONDS)

    async def _picture(self, tenant: str) -> dict[str, Any]:
        task = self._pictures.get(tenant)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._draw(tenant))
            self._pictures[tenant] = task
            task.add_done_callback(lambda _: self._pictures.pop(tenant, None))
        return await asyncio.shield(task)

    async def _draw(self, tenant: str) -> dict[str, Any]:
        prefix = f"{tenant}/" if tenant else ""
        try:
            picture = await self._daemon.engine.query(
                lambda number: Picture(number, SHOWN_MAX, prefix)
            )
            stats = await self._daemon.stats()
        except PensieveError as error:  # for example, the engine is restarting
            return {"problem": error.reason, "conversations": [], "figures": {}}
        names = ("id", "tokens", "running", "left_out", "strip")
        return {
            "conversations": [dict(zip(names, row, strict=True)) for row in picture.rows],
            "figures": {name: stats.figures[name] for name in FIGURES if name in stats.figures},
        }

    async def explain(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        """Return where a conversation's chunks are, and what recently happened to them."""
        key = cache_key(by.tenant, exchange.values["conversation_id"])
        answer = await self._daemon.engine.query(lambda number: Explain(number, key))
        runs = [
            dict(zip(("first", "count", "place", "holders"), row, strict=True))
            for row in answer.rows
            if len(row) == 4
        ]
        events = [{"seconds_ago": row[0], "text": row[1]} for row in answer.rows if len(row) == 2]
        return {"runs": runs, "events": events}


def _digest(text: str) -> str:
    """Return the digest of a script or style in the form for a Content-Security-Policy."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
