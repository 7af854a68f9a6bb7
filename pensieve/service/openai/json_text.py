"""JSON as text, read with its bounds and written as one line.

Reading refuses what Python's parser would let pass: a name that an object has twice (the last would count),
NaN and Infinity.  Nesting ends where the parser's stack does, and a text has only so many objects;
`fields.check_json` then allows much less.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from pensieve.service.openai.fields import Refusal, quoted

# They are line ends to some readers, and need no escape in JSON.
LINE_ENDS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})

OBJECTS_MAX = 65_536  # of one text, their members counted too


def read_json(text: bytes | str, where: str, objects_max: float = OBJECTS_MAX) -> Any:
    """The value; whatever is wrong with the text becomes a Refusal of `where`."""
    try:
        written = text if isinstance(text, str) else text.decode("utf-8")
        return json.loads(
            written, object_pairs_hook=_Objects(objects_max), parse_constant=_no_number
        )
    except json.JSONDecodeError as error:
        problem = f"is not JSON: {error.msg} at character {error.pos + 1}"
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8: byte {error.start + 1}"
    except RecursionError:
        problem = "is nested too deeply"
    except _NotOurs as error:
        problem = str(error)
    except ValueError:  # the one that is left: Python reads no integer of so many digits
        problem = "holds a number that is too large"
    raise Refusal(where, problem, "invalid_json")


def one_line(value: Mapping[str, Any]) -> bytes:
    """A line of JSON, with its end; nothing within it ends a line for any reader."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate(LINE_ENDS).encode() + b"\n"


class _NotOurs(ValueError):
    """Python reads it, and we do not."""


class _Objects:
    """Makes the objects of one text, of the parser's pairs."""

    def __init__(self, objects_max: float) -> None:
        self._objects_max = self._left = objects_max

    def __call__(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        self._left -= 1 + len(pairs)
        if self._left < 0:
            raise _NotOurs(f"holds more than {self._objects_max:,} objects and members")
        members = dict(pairs)
        if len(members) < len(pairs):
            names: set[str] = set()
            for name, _ in pairs:
                if name in names:
                    raise _NotOurs(f"has {quoted(name)} twice in one object")
                names.add(name)
        return members


def _no_number(name: str) -> NoReturn:
    raise _NotOurs(f"holds {name}, which is not JSON")
