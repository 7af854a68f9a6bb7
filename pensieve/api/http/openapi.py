"""The OpenAPI document of the HTTP server, generated from its routes.

To find the members of a request body, `members_of` runs the parser on a minimal body. It records each member
that the parser reads, with its type. So the document always matches the parser.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields as fields_of
from typing import Any

from pensieve import __version__
from pensieve.api.http.exchange import Exchange
from pensieve.api.http.route import JSON, Route, Schema
from pensieve.api.json_fields import Fields
from pensieve.guard.callers import Caller
from pensieve.sampling import Sampling, parameter_of

PARAMETER = re.compile(r"\{(\w+)(?::path)?\}")
TYPES: Mapping[Any, Schema] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    int | float: {"type": "number"},
    bool: {"type": "boolean"},
    list | tuple: {"type": "array", "items": {}},
    Mapping: {"type": "object"},
}
ANY_OBJECT: Schema = {"type": "object"}
ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


class RecordedFields(Fields):
    """Records the members that a parser reads, with their types."""

    def __init__(self, given: Any, seen: dict[str, Schema]) -> None:
        super().__init__(given)
        self._seen = seen

    def __contains__(self, name: str) -> bool:
        self._seen.setdefault(name, {})
        return super().__contains__(name)

    def take(self, name: str) -> Any:
        self._seen.setdefault(name, {})
        return super().take(name)

    def fields(self, name: str) -> Fields | None:
        self._seen[name] = ANY_OBJECT
        return super().fields(name)

    def only(self, name: str, *allowed: Any, problem: str = "") -> None:
        self._seen[name] = {"enum": list(allowed)}
        super().only(name, *allowed, problem=problem)

    def _typed(self, name: str, kind: Any, what: str) -> Any:
        self._seen[name] = TYPES[kind]
        return super()._typed(name, kind, what)


def members_of(
    parse: Callable[[Any, Callable[[Any], Fields]], Any], minimal: Mapping[str, Any]
) -> Schema:
    """Return the schema of a body; `minimal` is a valid body with only the required members."""
    seen: dict[str, Schema] = {}
    parse(minimal, lambda given: RecordedFields(given, seen))
    described = {each.name: parameter_of(each) for each in fields_of(Sampling)}
    properties: dict[str, Any] = {}
    for name in sorted(seen):
        if seen[name] == {"enum": []}:
            continue  # the parser refuses every value of this member
        properties[name] = dict(seen[name])
        if name in described:
            parameter = described[name]
            properties[name]["description"] = f"{parameter.help}; {parameter.bounds}"
    return {"type": "object", "required": sorted(minimal), "properties": properties}


def document(routes: Iterable[Route]) -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        if route.summary:
            path = PARAMETER.sub(r"{\1}", route.path)
            paths.setdefault(path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Pensieve",
            "version": __version__,
            "description": "OpenAI's and Anthropic's APIs, and gRPC's methods with JSON.",
        },
        "paths": paths,
        "components": {
            "schemas": {"Error": ERROR},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{"bearer": []}, {"key": []}, {}],
    }


def _operation(route: Route) -> dict[str, Any]:
    error = {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}
    answer = {
        route.answers: {"schema": ANY_OBJECT if route.answers == JSON else {"type": "string"}}
    }
    words = re.findall(r"\w+", PARAMETER.sub(r"by_\1", route.path))
    found: dict[str, Any] = {
        "operationId": "_".join([route.method.lower(), *words]),
        "summary": route.summary,
        "responses": {
            "200": {"description": "the answer", "content": answer},
            "default": {"description": "an error", "content": error},
        },
    }
    if names := PARAMETER.findall(route.path):
        found["parameters"] = [
            {"name": each, "in": "path", "required": True, "schema": {"type": "string"}}
            for each in names
        ]
    if route.body is not None:
        found["requestBody"] = {"required": True, "content": {route.takes: {"schema": route.body}}}
    if route.settings.get("is_open"):
        found["security"] = []
    return found


class OpenApiEndpoint:
    """`GET /openapi.json`."""

    def __init__(self) -> None:
        self.document: Mapping[str, Any] = {}  # set once all routes are known

    async def __call__(self, exchange: Exchange, by: Caller) -> Mapping[str, Any]:
        return self.document
