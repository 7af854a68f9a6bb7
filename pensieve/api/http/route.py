"""One endpoint of the HTTP server, as the router and the OpenAPI document read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pensieve.api.http.front import Handler

Schema = Mapping[str, Any]
JSON = "application/json"
NOTHING: Mapping[str, Any] = {}


class Route(NamedTuple):
    method: str
    path: str
    handler: Handler
    summary: str = ""  # in the OpenAPI document; empty: the document leaves the endpoint out
    settings: Mapping[str, Any] = NOTHING  # of its `Endpoint`
    body: Schema | None = None  # of the request; None: it has no body
    answers: str = JSON  # the media type
    takes: str = JSON  # the media type of the body
