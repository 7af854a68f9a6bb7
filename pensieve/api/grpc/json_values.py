"""Convert google.protobuf.Struct to plain JSON values and back, up to VALUES_MAX values.

protobuf's `json_format` converts to text first, which takes ten times as long. These conversions run on the
event loop. VALUES_MAX values take about twenty milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from google.protobuf import struct_pb2

from pensieve.errors import InvalidArgument

VALUES_MAX = 16_384  # per field; an object, a list and each value in them count as one
# The numbers of a Struct are doubles: integers are exact only up to this number.
WHOLE_MAX = 2.0**53


class TooManyValues(ValueError):
    """There are more than VALUES_MAX values."""


class NoValue(ValueError):
    """A Value has no kind, so it is not JSON."""


class _Count:
    def __init__(self) -> None:
        self.left = VALUES_MAX

    def add_value(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise TooManyValues


def objects(name: str, structs: Any) -> list[dict[str, Any]]:
    """Return Structs as JSON objects. Whole numbers become int."""
    count = _Count()
    try:
        return [_object(struct, count) for struct in structs]
    except TooManyValues:
        raise InvalidArgument(name, f"has more than {VALUES_MAX:,} JSON values") from None
    except NoValue:
        raise InvalidArgument(name, "holds a value without a kind") from None
    except ValueError:
        raise InvalidArgument(name, "holds a number that is not finite") from None


def one_object(name: str, struct: struct_pb2.Struct) -> dict[str, Any]:
    return objects(name, [struct])[0]


def _object(struct: struct_pb2.Struct, count: _Count) -> dict[str, Any]:
    count.add_value()
    return {key: _plain(value, count) for key, value in struct.fields.items()}


def _plain(value: struct_pb2.Value, count: _Count) -> Any:
    match value.WhichOneof("kind"):
        case "struct_value":
            return _object(value.struct_value, count)
        case "list_value":
            count.add_value()
            return [_plain(each, count) for each in value.list_value.values]
        case "string_value":
            count.add_value()
            return value.string_value
        case "number_value":
            count.add_value()
            return _number(value.number_value)
        case "bool_value":
            count.add_value()
            return value.bool_value
        case "null_value":
            count.add_value()
            return None
    raise NoValue


def _number(number: float) -> float | int:
    if not math.isfinite(number):
        raise ValueError
    return int(number) if number.is_integer() and abs(number) < WHOLE_MAX else number


def structs(values: Any) -> list[struct_pb2.Struct]:
    """Return JSON objects as Structs. Raises TooManyValues if they have too many values in total."""
    count = _Count()
    result = []
    for value in values:
        struct = struct_pb2.Struct()
        _fill(struct, value, count)
        result.append(struct)
    return result


def one_struct(value: Mapping[str, Any]) -> struct_pb2.Struct:
    return structs([value])[0]


def _fill(struct: struct_pb2.Struct, value: Mapping[str, Any], count: _Count) -> None:
    count.add_value()
    for key, item in value.items():
        _set(struct.fields[key], item, count)


def _set(target: struct_pb2.Value, item: Any, count: _Count) -> None:
    if isinstance(item, Mapping):
        target.struct_value.SetInParent()
        _fill(target.struct_value, item, count)
        return
    count.add_value()
    if isinstance(item, list | tuple):
        target.list_value.SetInParent()
        for each in item:
            _set(target.list_value.values.add(), each, count)
    elif item is None:
        target.null_value = struct_pb2.NULL_VALUE
    elif isinstance(item, bool):
        target.bool_value = item
    elif isinstance(item, str):
        target.string_value = item
    else:
        target.number_value = item
