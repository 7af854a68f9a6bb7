"""Values of the store as JSON and bytes, derived from the types that they declare.

    NewMessage("user", "hi", array("I", [7, 8]))  <->  ["user", "hi", 0, "", {}, 1] and [b"\\x07...", b""]

A dataclass or a NamedTuple is the list of its fields.  Bytes, and token ids as bytes of 'I', travel beside
the JSON, as *parts*; in it stands the number of the part.  Reading makes only what the declared type says,
so nothing that is read can become code, and a value of another shape is Unreadable.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from pensieve import errors
from pensieve.errors import PensieveError

TOKEN_BYTES = 4
PLAIN = (int, float, str, bool, NoneType, Any)
Parts = list[bytes]
Write = Callable[[Any, Parts], Any]
Read = Callable[[Any, Sequence[bytes]], Any]


class Tokens:
    """Stands for the type `array[int]`, which Python has in annotations alone."""

    def __class_getitem__(cls, kind: Any) -> type[Tokens]:
        return cls


def hints_of(declared: Any) -> Mapping[str, Any]:
    """The types that a class or a function declares."""
    return get_type_hints(declared, localns={"array": Tokens})


class Unreadable(ValueError):
    """These are not the values that they ought to be."""


class Form(NamedTuple):
    """How values of a type travel."""

    write: Write
    read: Read


def written(value: Any, kind: Any) -> tuple[str, Parts]:
    """A value of this type as JSON, and the bytes that travel beside it."""
    parts: Parts = []
    return json.dumps(form_of(kind).write(value, parts), separators=(",", ":")), parts


def read(text: str, parts: Sequence[bytes], kind: Any) -> Any:
    """The value that was `written`; Unreadable if it is none of this type."""
    return read_form(text, parts, form_of(kind))


def read_form(text: str, parts: Sequence[bytes], form: Form) -> Any:
    """The same, of a type whose form is known."""
    try:
        return form.read(json.loads(text), parts)
    except (TypeError, ValueError, LookupError, RecursionError, AttributeError) as error:
        raise Unreadable(f"not a value of its type: {error}") from error


@cache
def form_of(kind: Any) -> Form:
    origin, inner = get_origin(kind), get_args(kind)
    if kind in PLAIN or origin in (Mapping, dict):
        return _plain(kind, origin, inner)
    if kind is bytes:
        return Form(_write_bytes, lambda value, parts: parts[_index(value)])
    if kind is Tokens:
        return Form(_write_tokens, _read_tokens)
    if origin in (Union, UnionType):
        return _of_union(inner)
    if origin is tuple and not (len(inner) == 2 and inner[1] is Ellipsis):
        return _of_fields(inner, lambda *values: values)
    if origin in (Sequence, list, tuple):
        return _of_sequence(inner[0], tuple if origin is tuple else list, origin is Sequence)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return Form(lambda value, parts: value.value, lambda value, parts: kind(value))
    if is_dataclass(kind) and isinstance(kind, type):
        hints = hints_of(kind)
        return _of_dataclass(kind, [(each.name, hints[each.name]) for each in fields(kind)])
    if isinstance(kind, type) and issubclass(kind, tuple):  # a NamedTuple
        return _of_fields(tuple(hints_of(kind).values()), kind)
    raise TypeError(f"a value of type {kind} cannot travel")


def _plain(kind: Any, origin: Any, inner: tuple[Any, ...]) -> Form:
    if origin is None:
        if kind is Any:
            return Form(lambda value, parts: value, lambda value, parts: value)
        wanted = (int, float) if kind is float else (kind,)

        def read_one(value: Any, parts: Sequence[bytes]) -> Any:
            if type(value) not in wanted:
                raise Unreadable(f"{value!r} is no {kind.__name__}")
            return value

        return Form(lambda value, parts: value, read_one)
    if inner[0] is not str or inner[1] not in PLAIN:
        raise TypeError(f"a value of type {kind} cannot travel")
    return Form(lambda value, parts: dict(value), lambda value, parts: dict(value))


def _index(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise Unreadable(f"{value!r} is the number of no part")
    return value


def _write_bytes(value: bytes, parts: Parts) -> int:
    parts.append(bytes(value))
    return len(parts) - 1


def _write_tokens(value: Sequence[int], parts: Parts) -> int:
    tokens = value if isinstance(value, array) and value.typecode == "I" else array("I", value)
    return _write_bytes(tokens.tobytes(), parts)


def _read_tokens(value: Any, parts: Sequence[bytes]) -> array[int]:
    tokens = array("I")
    tokens.frombytes(parts[_index(value)])
    return tokens


def _of_union(inner: tuple[Any, ...]) -> Form:
    others = [each for each in inner if each is not NoneType]
    if all(each in PLAIN for each in inner):
        return Form(lambda value, parts: value, lambda value, parts: value)
    (only,) = others
    form = form_of(only)
    return Form(
        lambda value, parts: None if value is None else form.write(value, parts),
        lambda value, parts: None if value is None else form.read(value, parts),
    )


def _of_sequence(kind: Any, make: Callable[[Any], Any], is_abstract: bool) -> Form:
    if kind is int and is_abstract:  # token ids, of which there may be many
        return Form(_write_tokens, lambda value, parts: _read_tokens(value, parts) or ())
    form = form_of(kind)
    return Form(
        lambda value, parts: [form.write(each, parts) for each in value],
        lambda value, parts: make([form.read(each, parts) for each in _list(value)]),
    )


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise Unreadable(f"{type(value).__name__} is no list")
    return value


def _of_fields(kinds: tuple[Any, ...], make: Callable[..., Any]) -> Form:
    forms = [form_of(each) for each in kinds]
    return Form(
        lambda value, parts: [
            form.write(each, parts) for form, each in zip(forms, value, strict=True)
        ],
        lambda value, parts: make(
            *(form.read(each, parts) for form, each in zip(forms, _list(value), strict=True))
        ),
    )


def _of_dataclass(kind: type[Any], kinds: list[tuple[str, Any]]) -> Form:
    forms = [(name, form_of(each)) for name, each in kinds]

    def write(value: Any, parts: Parts) -> list[Any]:
        return [form.write(getattr(value, name), parts) for name, form in forms]

    def read_all(values: Any, parts: Sequence[bytes]) -> Any:
        given = zip(forms, _list(values), strict=True)
        return kind(**{name: form.read(each, parts) for (name, form), each in given})

    return Form(write, read_all)


# -- errors --

ERRORS = {
    name: each
    for name, each in vars(errors).items()
    if isinstance(each, type) and issubclass(each, PensieveError)
}


def error_written(error: PensieveError) -> str:
    """An error as JSON: its class, its message, and what else it says."""
    more = {name: each for name, each in vars(error).items() if type(each) in PLAIN}
    return json.dumps([type(error).__name__, str(error), more])


def error_read(text: str) -> PensieveError:
    """The error that was written."""
    try:
        name, message, more = json.loads(text)
        kind = ERRORS[name]
        error = kind.__new__(kind, message)
        Exception.__init__(error, message)
        vars(error).update({str(key): each for key, each in dict(more).items()})
    except (TypeError, ValueError, LookupError) as wrong:
        raise Unreadable(f"not an error of ours: {wrong}") from wrong
    return error
