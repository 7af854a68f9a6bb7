"""Read JSON from a client: take members one by one with their types, and refuse unknown members.

* A null member counts as absent.
* A bool is not a number, and 1.0 is not an integer. Numbers are finite and fit a double.
* Errors name a member by its path: `messages[2].content[0].type`.

`read_json` refuses some JSON that Python's parser would accept: duplicate names in an object, NaN and
Infinity, and more than OBJECTS_MAX objects. `check_json` checks a whole value. Its strings must be valid
Unicode, and its depth and its number of values are limited.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from pensieve.errors import InvalidArgument
from pensieve.text.message import DEPTH_MAX, plain_text

VALUES_MAX = 16_384  # per parameter; an object, a list and each value in them count as one
MESSAGES_VALUES_MAX = 1 << 16  # for the messages of a request
LISTS_OF_TOKENS = ("prompt", "tokens")  # the code that reads these lists checks them
NAME_CHARACTERS_MAX = 80  # of a text that an error quotes


class Refusal(InvalidArgument):
    """A parameter that is malformed or cannot be honoured; `code` is OpenAI's error code."""

    def __init__(self, field: str, problem: str, code: str = "invalid_value") -> None:
        super().__init__(field, problem)
        self.code = code


def quoted(text: str) -> str:
    """Return a client's text as a short ASCII literal, for error messages."""
    return ascii(text if len(text) <= NAME_CHARACTERS_MAX else text[:NAME_CHARACTERS_MAX] + "...")


def check_json(value: Any, where: str, values_max: int = VALUES_MAX) -> None:
    """Refuse a value that is not JSON, is too deep, or has too many values."""
    left, stack = values_max - 1, [(value, 0)]
    while stack:
        each, depth = stack.pop()
        if each is None or isinstance(each, bool):
            continue
        if isinstance(each, str):
            plain_text(each, where)
        elif isinstance(each, int | float):
            if not abs(each) <= sys.float_info.max:
                raise Refusal(where, "holds a number that is too large or not finite")
        elif isinstance(each, Mapping | list | tuple):
            left -= len(each)
            if left < 0:
                raise Refusal(where, f"holds more than {values_max:,} JSON values")
            if depth == DEPTH_MAX:
                raise Refusal(where, f"is nested deeper than {DEPTH_MAX}")
            if isinstance(each, Mapping):
                for key in each:
                    plain_text(key, where)
            inner = each.values() if isinstance(each, Mapping) else each
            stack.extend((item, depth + 1) for item in inner)
        else:
            raise Refusal(where, f"holds a {type(each).__name__}, which is not JSON")


class Fields:
    """A JSON object. Taking a member removes it; `end` refuses all remaining members."""

    def __init__(self, given: Any, path: str = "") -> None:
        if not isinstance(given, Mapping):
            raise Refusal(path or "body", "must be a JSON object", "invalid_type")
        self._left = {name: value for name, value in given.items() if value is not None}
        self._path = path

    def where(self, name: str) -> str:
        """Return the path of a member, for error messages."""
        plain = name.isidentifier() and len(name) <= NAME_CHARACTERS_MAX
        shown = name if plain else quoted(name)
        return f"{self._path}.{shown}" if self._path else shown

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def peek(self, name: str) -> Any:
        """Return a member without taking it; None if absent."""
        return self._left.get(name)

    def take(self, name: str) -> Any:
        """Take a member of any type; None if absent."""
        return self._left.pop(name, None)

    def text(self, name: str) -> str | None:
        found: str | None = self._typed(name, str, "a string")
        return found

    def needed_text(self, name: str) -> str:
        found = self.text(name)
        if found is None:
            raise Refusal(self.where(name), "is required", "missing_required_parameter")
        return found

    def integer(self, name: str) -> int | None:
        found: int | None = self._typed(name, int, "an integer")
        return found

    def number(self, name: str) -> float | None:
        found = self._typed(name, int | float, "a number")
        return None if found is None else float(found)

    def flag(self, name: str, default: bool = False) -> bool:
        found = self._typed(name, bool, "true or false")
        return default if found is None else bool(found)

    def switch(self, name: str) -> bool | None:
        """Take a member that is true, false or absent."""
        found: bool | None = self._typed(name, bool, "true or false")
        return found

    def items(self, name: str) -> Sequence[Any] | None:
        found: Sequence[Any] | None = self._typed(name, list | tuple, "a list")
        return found

    def object(self, name: str) -> Mapping[str, Any] | None:
        found: Mapping[str, Any] | None = self._typed(name, Mapping, "an object")
        return found

    def fields(self, name: str) -> Fields | None:
        found = self.take(name)
        return None if found is None else Fields(found, self.where(name))

    def only(self, name: str, *allowed: Any, problem: str = "") -> None:
        """Take a member that has no effect. Raises Refusal if its value is not one of `allowed`."""
        found = self.take(name)
        if found is None or any(type(found) is type(each) and found == each for each in allowed):
            return
        if not problem:
            known = " or ".join(repr(each) for each in allowed)
            problem = f"only {known} is supported" if allowed else "is not supported"
        raise Refusal(self.where(name), problem, "unsupported_parameter")

    def end(self) -> None:
        for name in self._left:
            raise Refusal(self.where(name), "is not supported", "unsupported_parameter")

    def _typed(self, name: str, kind: Any, what: str) -> Any:
        found = self.take(name)
        if found is None:
            return None
        if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
            raise Refusal(self.where(name), f"must be {what}", "invalid_type")
        return found


def checked_fields(given: Any, histories: Collection[str] = ("messages", "input")) -> Fields:
    """Return the members of a body. Members named in `histories` may have MESSAGES_VALUES_MAX values."""
    fields = Fields(given)
    for name, value in given.items():
        plain_text(name, "body")
        if name not in LISTS_OF_TOKENS or not isinstance(value, list | tuple):
            values_max = MESSAGES_VALUES_MAX if name in histories else VALUES_MAX
            check_json(value, fields.where(name), values_max)
    return fields


# JSON does not require escapes for these characters, but some programs treat them as line ends.
LINE_ENDS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})

OBJECTS_MAX = 65_536  # objects and their members in a text


def read_json(text: bytes | str, where: str, objects_max: float = OBJECTS_MAX) -> Any:
    """Parse JSON. Raises Refusal with `where` as the name of the parameter."""
    try:
        written = text if isinstance(text, str) else text.decode("utf-8")
        return json.loads(
            written, object_pairs_hook=_Objects(objects_max), parse_constant=_refuse_number
        )
    except json.JSONDecodeError as error:
        problem = f"is not JSON: {error.msg} at character {error.pos + 1}"
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8: byte {error.start + 1}"
    except RecursionError:
        problem = "is nested too deeply"
    except _RefusedJson as error:
        problem = str(error)
    except ValueError:  # Python does not parse integers with thousands of digits
        problem = "holds a number that is too large"
    raise Refusal(where, problem, "invalid_json")


def one_line(value: Mapping[str, Any]) -> bytes:
    """Return JSON as one line with a line end. Other characters that look like line ends are escaped."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate(LINE_ENDS).encode() + b"\n"


class _RefusedJson(ValueError):
    """The text is JSON that Python's parser accepts but `read_json` refuses."""


class _Objects:
    """Builds the objects of a text from their pairs. The parser calls it for each object."""

    def __init__(self, objects_max: float) -> None:
        self._objects_max = self._left = objects_max

    def __call__(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        self._left -= 1 + len(pairs)
        if self._left < 0:
            raise _RefusedJson(f"holds more than {self._objects_max:,} objects and members")
        members = dict(pairs)
        if len(members) < len(pairs):
            names: set[str] = set()
            for name, _ in pairs:
                if name in names:
                    raise _RefusedJson(f"has {quoted(name)} twice in one object")
                names.add(name)
        return members


def _refuse_number(name: str) -> NoReturn:
    raise _RefusedJson(f"holds {name}, which is not JSON")
