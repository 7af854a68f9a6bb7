"""Random JSON schemas with short values, and a check whether a value matches a schema."""

from __future__ import annotations

import random
from typing import Any

WORDS = ("name", "age", "id", "Oslo", "größe", "a b", 'x"y', "日本")


def random_schema(chance: random.Random, depth: int = 2) -> dict[str, Any]:
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const"]
    if depth:
        kinds += ["object", "object", "array", "anyOf", "ref"]
    match chance.choice(kinds):
        case "string":
            return {"type": "string", "maxLength": chance.randint(0, 6)}
        case "integer":
            low = chance.randint(-20, 20)
            return {"type": "integer", "minimum": low, "maximum": low + chance.randint(0, 300)}
        case "number":
            return {"type": "number", "minimum": -1, "maximum": chance.randint(0, 9)}
        case "enum":
            return {"enum": [*chance.sample(WORDS, 3), chance.randint(-9, 9), None, True]}
        case "const":
            return {"const": {"k": [1, chance.choice(WORDS)]}}
        case "object":
            return random_object(chance, depth)
        case "array":
            least = chance.randint(0, 2)
            most = least + chance.randint(0, 2)
            items = random_schema(chance, depth - 1)
            return {"type": "array", "items": items, "minItems": least, "maxItems": most}
        case "anyOf":
            return {"anyOf": [random_schema(chance, depth - 1) for _ in range(3)]}
        case "ref":
            return {"$ref": "#/$defs/shared"}
        case kind:
            return {"type": kind}


def random_object(chance: random.Random, depth: int = 2) -> dict[str, Any]:
    names = chance.sample(WORDS, chance.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(chance, depth - 1) for name in names},
        "required": [name for name in names if chance.random() < 0.6],
        "additionalProperties": False,
    }


def random_root_schema(chance: random.Random) -> dict[str, Any]:
    shared = {"type": "array", "items": {"enum": ["p", "q"]}, "maxItems": 2}
    return {**random_object(chance), "$defs": {"shared": shared}}


def is_valid(value: Any, schema: dict[str, Any], root: dict[str, Any] | None = None) -> bool:
    """Return whether the value matches. Supports only the keywords that `random_schema` uses."""
    root = schema if root is None else root
    if "$ref" in schema:
        return is_valid(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema:
        return any(is_valid(value, each, root) for each in schema["anyOf"])
    if "const" in schema:
        return bool(value == schema["const"])
    if "enum" in schema:
        return any(type(value) is type(each) and value == each for each in schema["enum"])
    match schema["type"]:
        case "string":
            return isinstance(value, str) and len(value) <= schema["maxLength"]
        case "integer" | "number" as kind:
            kinds = int if kind == "integer" else int | float
            is_number = isinstance(value, kinds) and not isinstance(value, bool)
            return is_number and schema["minimum"] <= value <= schema["maximum"]
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "array":
            if not isinstance(value, list):
                return False
            fits = schema.get("minItems", 0) <= len(value) <= schema["maxItems"]
            return fits and all(is_valid(each, schema["items"], root) for each in value)
        case _:
            if not isinstance(value, dict) or not set(schema["required"]) <= value.keys():
                return False
            inner = schema["properties"]
            return all(
                name in inner and is_valid(each, inner[name], root) for name, each in value.items()
            )
