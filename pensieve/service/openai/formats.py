"""The parameters of a body that say what the reply has to be, as a `Constraint`.

    response_format        {"type": "json_schema", "json_schema": {"name", "schema", …}}, or a json_object
    text.format            the same of a response, without the inner object
    output_config.format   {"type": "json_schema", "schema"} of Anthropic's API
    structured_outputs     open servers' own: one of json, json_object, regex, choice, grammar
    guided_json, guided_regex, guided_choice, guided_grammar    their older names

A reply is always held to a schema, whether it is `strict` or not.  Two of these in one body contradict each
other, and are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from pensieve.core.constraint import Constraint, ConstraintKind
from pensieve.service.openai.fields import Fields, Refusal, quoted

FORMATS = ("text", "json_object", "json_schema")
OPEN_NAMES = {
    "json": ConstraintKind.JSON_SCHEMA,
    "json_object": ConstraintKind.JSON_OBJECT,
    "regex": ConstraintKind.REGEX,
    "choice": ConstraintKind.CHOICE,
    "grammar": ConstraintKind.GRAMMAR,
}


class FormatFields(NamedTuple):
    """What a body says of its reply's form."""

    constraint: Constraint | None = None
    params: Mapping[str, str] = {}  # what the body calls the fields of a constraint


def take_response_format(fields: Fields) -> FormatFields:
    """Of a chat completion or a completion."""
    found = [
        *_of_format(fields.fields("response_format"), "json_schema"),
        *_of_open_names(fields.fields("structured_outputs"), ""),
        *_of_open_names(fields, "guided_"),
    ]
    return _only_one(found)


def take_text_format(text: Fields) -> FormatFields:
    """Of a response."""
    return _only_one(_of_format(text.fields("format"), ""))


def take_output_format(config: Fields) -> FormatFields:
    """Of a message of Anthropic's API: a schema without a name, and nothing else."""
    given = config.fields("format")
    if given is None:
        return FormatFields()
    kind = given.needed_text("type")
    if kind != "json_schema":
        problem = f"{quoted(kind)} is not json_schema"
        raise Refusal(given.where("type"), problem, "unsupported_parameter")
    found = _schema(given)
    given.end()
    return _only_one([found])


class _Found(NamedTuple):
    where: str
    constraint: Constraint


def _only_one(found: list[_Found]) -> FormatFields:
    if not found:
        return FormatFields()
    if len(found) > 1:
        raise Refusal(found[1].where, f"is given beside {found[0].where}: give one of them")
    ((where, constraint),) = found
    if (problem := constraint.problem()) is not None:
        raise Refusal(where, problem)
    return FormatFields(constraint, {f"constraint.{constraint.kind.value}": where})


def _of_format(given: Fields | None, inside: str) -> list[_Found]:
    """`inside`: the member that holds the schema and its name, where it has one of its own."""
    if given is None:
        return []
    kind = given.needed_text("type")
    if kind not in FORMATS:
        problem = f"{quoted(kind)} is not one of {', '.join(FORMATS)}"
        raise Refusal(given.where("type"), problem, "unsupported_parameter")
    found: list[_Found] = []
    if kind == "json_object":
        found.append(_Found(given.where("type"), Constraint(ConstraintKind.JSON_OBJECT)))
    elif kind == "json_schema":
        found.append(_of_schema(given, inside))
    given.end()
    return found


def _of_schema(given: Fields, inside: str) -> _Found:
    described = given
    if inside:
        inner = given.fields(inside)
        if inner is None:
            raise Refusal(given.where(inside), "is required", "missing_required_parameter")
        described = inner
    described.needed_text("name")
    described.text("description")
    described.flag("strict")
    found = _schema(described)
    if inside:
        described.end()
    return found


def _schema(described: Fields) -> _Found:
    where, schema = described.where("schema"), described.object("schema")
    if schema is None:
        raise Refusal(where, "is required", "missing_required_parameter")
    return _Found(where, Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema)))


def _of_open_names(given: Fields | None, prefix: str) -> list[_Found]:
    if given is None:
        return []
    found = []
    for name, kind in OPEN_NAMES.items():
        where = given.where(f"{prefix}{name}")
        if (text := _text(kind, given, f"{prefix}{name}")) is not None:
            found.append(_Found(where, Constraint(kind, text)))
    if not prefix:
        given.end()
    return found


def _text(kind: ConstraintKind, given: Fields, name: str) -> str | None:
    """Of a constraint; None where the body has none of this name."""
    if kind is ConstraintKind.JSON_OBJECT:
        return "" if given.flag(name) else None
    if kind is ConstraintKind.CHOICE:
        choices = given.items(name)
        return None if choices is None else json.dumps(choices)
    if kind is not ConstraintKind.JSON_SCHEMA:
        return given.text(name)
    schema: Any = given.take(name)
    return schema if schema is None or isinstance(schema, str) else json.dumps(schema)
