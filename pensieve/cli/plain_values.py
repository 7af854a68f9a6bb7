"""Convert protobuf messages to plain values for JSON."""

from __future__ import annotations

from typing import Any


def _word(enum: Any, number: int) -> str:
    """Return an enum value without the common prefix: SERVER_STATE_LOADING is `loading`."""
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    known = enum.values_by_number.get(number)
    return known.name.removeprefix(prefix).lower() if known is not None else "unknown"


def plain(message: Any) -> dict[str, Any]:
    """Return a message as a dict with every field. All integers stay numbers, unlike in protobuf's JSON."""
    values: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            values[field.name] = dict(value)
        elif field.label == field.LABEL_REPEATED:
            values[field.name] = [plain(each) for each in value]
        elif field.message_type is not None:
            values[field.name] = plain(value)
        elif field.enum_type is not None:
            values[field.name] = _word(field.enum_type, value)
        else:
            values[field.name] = value
    return values
