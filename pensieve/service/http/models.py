"""What is served: `/v1/models`, `/health` and `/version`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from pensieve import __version__
from pensieve.errors import DiskFull, NotFound, Unavailable
from pensieve.service.daemon import Daemon
from pensieve.service.grpc.auth import Caller
from pensieve.service.grpc.translate import text_of
from pensieve.service.http.bodies import Bodies
from pensieve.service.http.exchange import Exchange
from pensieve.service.openai import Refusal


class Models:
    """The list, and each model of it."""

    def __init__(self, daemon: Daemon, bodies: Bodies) -> None:
        self._daemon, self._bodies = daemon, bodies
        self._since = int(time.time())

    async def all(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        return {"object": "list", "data": [self._model(self._bodies.models[0])]}

    async def one(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        name = exchange.values["model"]
        if name not in self._bodies.models:
            raise Refusal("model", "is not served here", "model_not_found")
        return self._model(name)

    def _model(self, name: str) -> Mapping[str, Any]:
        ready = self._daemon.engine.ready
        length = {"max_model_len": ready.context_max} if ready is not None else {}
        return {
            "id": name,
            "object": "model",
            "created": self._since,
            "owned_by": "pensieve",
            **length,
        }


class Health:
    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    async def health(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        """An error unless new turns are taken."""
        refusal = self._daemon.store_refusal
        if isinstance(refusal, DiskFull):
            raise Unavailable(text_of(refusal))
        if not self._daemon.serving:
            raise Unavailable("the daemon does not take turns at present")
        return {"status": "ok"}

    async def version(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        return {"version": __version__}


async def not_here(exchange: Exchange, by: Caller) -> Mapping[str, Any]:
    """Every path that is none, and what this server does not do."""
    if exchange.path == "/v1/embeddings":
        raise NotFound("there are no embeddings here: the model that is served writes text")
    raise NotFound(f"there is nothing at {exchange.method} {exchange.path[:200]}")
