"""The required format of a reply becomes a constraint, or is refused by its name in the body."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from pensieve.api.openai.request import ParsedRequest
from pensieve.core.constraint import OBJECTS_MAX, TEXT_BYTES_MAX, Constraint, ConstraintKind
from tests.api.openai.bodies import chat, completion, refused, response

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
OF_SCHEMA = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA))
NAMED = {"name": "answer", "schema": SCHEMA}


def json_schema_format(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


@pytest.mark.parametrize("strict", [True, False, None])
def test_a_json_schema_becomes_a_constraint_strict_or_not(strict: bool | None) -> None:
    described = {**NAMED, "strict": strict, "description": "of an answer"}
    assert chat(**json_schema_format(described)).turn.options.constraint == OF_SCHEMA
    assert completion(**json_schema_format(described)).turn.options.constraint == OF_SCHEMA
    text = {"format": {"type": "json_schema", **described}, "verbosity": "medium"}
    given = response(text=text)
    assert given.turn.options.constraint == OF_SCHEMA
    assert given.echoed["text"] == text


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Constraint(ConstraintKind.JSON_OBJECT)),
        ({"structured_outputs": {"json": SCHEMA}}, OF_SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, OF_SCHEMA),
        ({"structured_outputs": {"json_object": True}}, Constraint(ConstraintKind.JSON_OBJECT)),
        ({"structured_outputs": {"json_object": False}}, None),
        ({"structured_outputs": {"regex": "a+"}}, Constraint(ConstraintKind.REGEX, "a+")),
        ({"structured_outputs": {"choice": ["b"]}}, Constraint(ConstraintKind.CHOICE, '["b"]')),
        (
            {"structured_outputs": {"grammar": 'start: "c"'}},
            Constraint(ConstraintKind.GRAMMAR, 'start: "c"'),
        ),
        ({"guided_json": SCHEMA}, OF_SCHEMA),
        ({"guided_regex": "a+"}, Constraint(ConstraintKind.REGEX, "a+")),
        ({"guided_choice": ["b"]}, Constraint(ConstraintKind.CHOICE, '["b"]')),
        ({"guided_grammar": 'start: "c"'}, Constraint(ConstraintKind.GRAMMAR, 'start: "c"')),
    ],
)
@pytest.mark.parametrize("kind", [chat, completion])
def test_each_constraint_field_becomes_its_constraint(
    kind: Callable[..., ParsedRequest], members: dict[str, Any], expected: Constraint | None
) -> None:
    assert kind(**members).turn.options.constraint == expected


INNER = "response_format.json_schema"


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, INNER),
        (json_schema_format({"schema": SCHEMA}), f"{INNER}.name"),
        (json_schema_format({"name": "a"}), f"{INNER}.schema"),
        (json_schema_format({"name": "a", "schema": "no"}), f"{INNER}.schema"),
        (json_schema_format({**NAMED, "more": 1}), f"{INNER}.more"),
        (
            json_schema_format({"name": "a", "schema": {"enum": ["x" * TEXT_BYTES_MAX]}}),
            f"{INNER}.schema",
        ),
        (
            json_schema_format({"name": "a", "schema": {"anyOf": [{}] * OBJECTS_MAX}}),
            f"{INNER}.schema",
        ),
        ({"guided_choice": ["a", 7]}, "guided_choice"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "7"}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": 7}, "guided_regex"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_invalid_constraints_are_refused_by_name(members: dict[str, Any], param: str) -> None:
    assert refused(chat, **members)[0] == param


def test_compile_errors_use_the_field_names_of_the_body() -> None:
    """The service refuses such a format later, and uses its own name of the field."""
    assert chat(**json_schema_format(NAMED)).param("constraint.json_schema") == f"{INNER}.schema"
    assert chat(guided_regex="(").param("constraint.regex") == "guided_regex"
    given = response(text={"format": {"type": "json_schema", **NAMED}})
    assert given.param("constraint.json_schema") == "text.format.schema"
