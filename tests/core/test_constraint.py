"""A constraint has limits, and encoding does not change it."""

from __future__ import annotations

import json

import pytest

from pensieve.core.constraint import (
    CHOICES_MAX,
    DEPTH_MAX,
    OBJECTS_MAX,
    TEXT_BYTES_MAX,
    Constraint,
    ConstraintKind,
    choice_of,
)
from pensieve.core.turn import TurnOptions
from pensieve.engine.codec import decode, encode
from pensieve.engine.messages import SubmitTurn

Kind = ConstraintKind


def nested(depth: int) -> str:
    return '{"items":' * depth + "true" + "}" * depth


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint(Kind.JSON_SCHEMA, "{}"),
        Constraint(Kind.JSON_SCHEMA, "true"),
        Constraint(Kind.JSON_SCHEMA, nested(DEPTH_MAX)),
        Constraint(Kind.JSON_SCHEMA, json.dumps({"anyOf": [{}] * (OBJECTS_MAX - 1)})),
        Constraint(Kind.JSON_OBJECT),
        Constraint(Kind.REGEX, "a" * TEXT_BYTES_MAX),
        Constraint(Kind.GRAMMAR, "no grammar, which only the compiler finds"),
        choice_of(("a",) * CHOICES_MAX),
        choice_of(('"', "\n", "日本", "\\")),
    ],
    ids=lambda each: each.kind,
)
def test_a_constraint_within_the_limits_has_no_problem(constraint: Constraint) -> None:
    assert constraint.problem() is None


@pytest.mark.parametrize(
    ("constraint", "problem"),
    [
        (Constraint(Kind.JSON_SCHEMA, ""), "must not be empty"),
        (Constraint(Kind.JSON_SCHEMA, "{"), "is not JSON"),
        (Constraint(Kind.JSON_SCHEMA, "[]"), "must be a JSON object"),
        (Constraint(Kind.JSON_SCHEMA, nested(DEPTH_MAX + 1)), "deeper than 64"),
        (Constraint(Kind.JSON_SCHEMA, "[" * 50_000), "deeper than 64"),
        (
            Constraint(Kind.JSON_SCHEMA, json.dumps({"anyOf": [{"not": {}}] * OBJECTS_MAX})),
            "2,001 objects",
        ),
        (
            Constraint(
                Kind.JSON_SCHEMA,
                json.dumps({"properties": dict.fromkeys(map(str, range(1001)), True)}),
            ),
            "1,001 members in one place",
        ),
        (
            Constraint(Kind.JSON_SCHEMA, json.dumps({"anyOf": [{"enum": [], "a": [0] * 900}] * 9})),
            "values; the maximum is",
        ),
        (
            Constraint(
                Kind.JSON_SCHEMA,
                json.dumps({"allOf": [{"pattern": f"(a|b)*a(a|b){{{n}}}$"} for n in range(5)]}),
            ),
            "allOf and 5 patterns",
        ),
        (
            Constraint(Kind.GRAMMAR, "start: X\nX: " + " & ".join(["/a/"] * 6)),
            "contains '&' 5 times",
        ),
        (Constraint(Kind.REGEX, "a&b&c&d&e&f"), "contains '&' 5 times"),
        (Constraint(Kind.GRAMMAR, 'start: %json {"type": "object"}'), "has %json"),
        (Constraint(Kind.REGEX, "ä" * (TEXT_BYTES_MAX // 2 + 1)), "65,538 bytes"),
        (Constraint(Kind.REGEX, ""), "must not be empty"),
        (Constraint(Kind.REGEX, "\ud800"), "surrogate"),
        (Constraint(Kind.GRAMMAR, ""), "must not be empty"),
        (Constraint(Kind.JSON_OBJECT, "{}"), "must have no text"),
        (choice_of(()), "1 to 1,000"),
        (choice_of(("a",) * (CHOICES_MAX + 1)), "1 to 1,000"),
        (choice_of(("a", "")), "must not be empty"),
        (Constraint(Kind.CHOICE, "[7]"), "list of strings"),
        (Constraint(Kind.CHOICE, "{"), "list of strings"),
    ],
    ids=lambda each: each if isinstance(each, str) else each.kind,
)
def test_a_constraint_beyond_the_limits_is_refused(constraint: Constraint, problem: str) -> None:
    found = constraint.problem()
    assert found is not None
    assert problem in found


def test_a_constraint_is_unchanged_by_the_pipe() -> None:
    for constraint in (None, choice_of(("ä", '"')), Constraint(Kind.JSON_OBJECT)):
        message = SubmitTurn(7, "c", b"1234", 0, TurnOptions(constraint=constraint))
        items, body = encode(message)
        assert decode(json.loads(json.dumps(items)), body) == message


def test_the_identity_of_a_constraint_is_short_and_unique() -> None:
    long = Constraint(Kind.REGEX, "a" * 10_000)
    assert len(json.dumps(long.identity)) < 120
    others = [Constraint(Kind.GRAMMAR, long.text), Constraint(Kind.REGEX, "a" * 9_999)]
    assert all(each.identity != long.identity for each in others)
    assert Constraint(Kind.REGEX, "a" * 10_000).identity == long.identity
