"""The required form of a reply as a plain value, with checks that bound the cost of compiling it.

    kind          text                                         the reply is
    json_schema   a JSON schema                                JSON that the schema accepts
    json_object   empty                                        any JSON object
    regex         a regular expression (Rust's syntax)         text that the whole expression matches
    choice        a JSON list of strings                       one of the strings
    grammar       a grammar in the Lark format of llguidance   a sentence of the grammar
    tool_calls    JSON; see text/call_grammars.py              text, and calls that match the tools' schemas

Clients cannot name the kind `tool_calls`: it is made from a request's tools.

`problem` checks only the text, in time proportional to its length. text/grammars.py knows the model's tokens
and checks whether the text can be compiled. The compiler's own limit (its fuel) does not cover all of its
work. The cost of some features grows faster than the length of the text. So this module limits the number of
values in a schema (the cost is quadratic), and the number of patterns that must match at the same time (each
pattern doubles the cost).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

TEXT_BYTES_MAX = 64 << 10
OBJECTS_MAX = 1_000  # JSON objects within a schema: about 50 ms of compiling
VALUES_MAX = 4_000  # values of all kinds within a schema
MEMBERS_MAX = 1_000  # members of one object or list within a schema
INTERSECTED_MAX = 4  # patterns that must match at the same time
EMBEDDED = "%json"  # a schema within a grammar, which would evade the bounds of schemas
DEPTH_MAX = 64  # nesting of lists and objects within a schema
CHOICES_MAX = 1_000


class ConstraintKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class Constraint:
    kind: ConstraintKind
    text: str = ""

    def problem(self) -> str | None:
        """Return why the constraint is refused; None if it may be compiled."""
        try:
            num_bytes = len(self.text.encode())
        except UnicodeEncodeError:
            return "the text has an unpaired surrogate"
        if num_bytes > TEXT_BYTES_MAX:
            return f"has {num_bytes:,} bytes; the maximum is {TEXT_BYTES_MAX:,}"
        if self.kind is ConstraintKind.JSON_OBJECT:
            return "must have no text" if self.text else None
        if not self.text:
            return "must not be empty"
        if self.kind is ConstraintKind.JSON_SCHEMA:
            return _problem_of_schema(self.text)
        if self.kind is ConstraintKind.CHOICE:
            return _problem_of_choices(self.text)
        if self.kind is ConstraintKind.TOOL_CALLS:
            return _problem_of_calls(self.text)
        return _problem_of_grammar(self.kind, self.text)

    @property
    def identity(self) -> dict[str, str]:
        """A short value that identifies the constraint. The text may be long."""
        return {"kind": self.kind.value, "sha256": self.digest}

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).hexdigest()


def choice_of(choices: tuple[str, ...]) -> Constraint:
    """Make the constraint that the reply is one of these strings."""
    return Constraint(ConstraintKind.CHOICE, json.dumps(choices))


def _problem_of_schema(text: str) -> str | None:
    try:
        schema = json.loads(text)
    except RecursionError:
        return f"is nested deeper than {DEPTH_MAX}"
    except ValueError as error:
        return f"is not JSON: {error}"
    if not isinstance(schema, dict | bool):
        return "must be a JSON object"
    return _problem_of_values([schema])


def _problem_of_calls(text: str) -> str | None:
    """Check the schemas of all tools together."""
    try:
        wanted = json.loads(text)
    except RecursionError:
        return f"is nested deeper than {DEPTH_MAX}"
    schemas = [each["schema"] for each in wanted["tools"]]
    if (problem := _problem_of_values(schemas)) is not None or wanted["reply"] is None:
        return problem
    kind, inner = wanted["reply"]
    return Constraint(ConstraintKind(kind), inner).problem()


def _problem_of_values(schemas: list[Any]) -> str | None:
    num_objects = num_values = num_patterns = 0
    is_intersected, stack = False, [(each, 1) for each in schemas]
    while stack:
        value, depth = stack.pop()
        if not isinstance(value, dict | list):
            continue
        if depth > DEPTH_MAX:
            return f"is nested deeper than {DEPTH_MAX}"
        if isinstance(value, dict):
            num_objects += 1
            num_patterns += "pattern" in value or "format" in value
            is_intersected |= "allOf" in value
        inner: list[Any] = value if isinstance(value, list) else _inner(value)
        if len(inner) > MEMBERS_MAX:
            return f"has {len(inner):,} members in one place; the maximum is {MEMBERS_MAX:,}"
        num_values += len(inner)
        stack.extend((each, depth + 1) for each in inner)
    if num_objects > OBJECTS_MAX:
        return f"has {num_objects:,} objects; the maximum is {OBJECTS_MAX:,}"
    if num_values > VALUES_MAX:
        return f"has {num_values:,} values; the maximum is {VALUES_MAX:,}"
    if is_intersected and num_patterns > INTERSECTED_MAX:
        return f"has allOf and {num_patterns} patterns; the maximum with allOf is {INTERSECTED_MAX}"
    return None


def _inner(schema: dict[str, Any]) -> list[Any]:
    """Return the members, without the strings of an enumeration, because even many strings cost little."""
    return [each for name, each in schema.items() if name != "enum" or not isinstance(each, list)]


def _problem_of_grammar(kind: ConstraintKind, text: str) -> str | None:
    """Check a grammar or a regular expression. In both, `&` means that both sides must hold."""
    if (num_intersections := text.count("&")) > INTERSECTED_MAX:
        return f"contains '&' {num_intersections} times; the maximum is {INTERSECTED_MAX}"
    if kind is ConstraintKind.GRAMMAR and EMBEDDED in text:
        return f"has {EMBEDDED}; give a json_schema instead"
    return None


def _problem_of_choices(text: str) -> str | None:
    try:
        choices = json.loads(text)
    except (ValueError, RecursionError):
        choices = None
    if not isinstance(choices, list) or not all(isinstance(each, str) for each in choices):
        return "must be a list of strings"
    if not 1 <= len(choices) <= CHOICES_MAX:
        return f"must have 1 to {CHOICES_MAX:,} strings"
    if not all(choices):
        return "a string must not be empty"
    return None
