"""The description of an endpoint, which the router and the OpenAPI document use."""

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
    summary: str = ""  # for the OpenAPI document; empty: the endpoint is not in the document
    settings: Mapping[str, Any] = NOTHING  # keyword arguments of its `Endpoint`
    body: Schema | None = None  # of the request; None: it has no body
    answers: str = JSON  # media type of the answer
    takes: str = JSON  # media type of the request's body
