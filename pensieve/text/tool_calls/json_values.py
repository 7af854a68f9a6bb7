"""Read JSON character by character, strictly.

The scanners also reject JSON that a later request could not contain: half of a surrogate pair, a number
outside the range of a double, and nesting deeper than `message.DEPTH_MAX`.
"""

from __future__ import annotations

from pensieve.text.tool_calls.scan import Emit, NoCall, Scan, ignore
from pensieve.text.tool_calls.values import Notation, is_number, value, word

ESCAPES = {
    '"': '"',
    "\\": "\\",
    "/": "/",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
}
HIGH, LOW, END = 0xD800, 0xDC00, 0xE000  # ranges of the halves of surrogate pairs


def string(emit: Emit, text: Emit = ignore) -> Scan[None]:
    """Read a string after its opening quote. `text` gets the decoded string, `emit` its JSON form."""
    while (character := (yield)) != '"':
        emit(character)
        if character == "\\":
            character = yield
            emit(character)
            if character == "u":
                text((yield from _unicode_escape(emit)))
            elif character in ESCAPES:
                text(ESCAPES[character])
            else:
                raise NoCall
        elif character < " ":
            raise NoCall
        else:
            text(character)
    emit(character)


def _unicode_escape(emit: Emit) -> Scan[str]:
    """Read a `\\u` escape, or the two escapes of a surrogate pair."""
    first = yield from hex_number(4, emit)
    if not HIGH <= first < END:
        return chr(first)
    if first >= LOW:
        raise NoCall
    for each in "\\u":
        if (yield) != each:
            raise NoCall
        emit(each)
    second = yield from hex_number(4, emit)
    if not LOW <= second < END:
        raise NoCall
    return chr(0x10000 + ((first - HIGH) << 10) + second - LOW)


def hex_number(num_digits: int, emit: Emit = ignore) -> Scan[int]:
    found = 0
    for _ in range(num_digits):
        digit = yield
        if digit not in "0123456789abcdefABCDEF":
            raise NoCall
        emit(digit)
        found = found << 4 | int(digit, 16)
    return found


def _scalar(character: str, emit: Emit) -> Scan[str]:
    if character == '"':
        emit(character)
        yield from string(emit)
        return ""
    found, character = yield from word(character)
    if found not in ("true", "false", "null") and not is_number(found):
        raise NoCall
    emit(found)
    return character


JSON = Notation(_scalar, '"', is_json=True)


def is_json(text: str) -> bool:
    scan = value(text[:1], ignore, JSON)
    num_sent = 0
    try:
        next(scan)
        for each in text[1:] + " ":  # the space ends a number
            num_sent += 1
            scan.send(each)
    except StopIteration as ended:
        return num_sent == len(text) - (not ended.value)
    except NoCall:
        pass
    return False
