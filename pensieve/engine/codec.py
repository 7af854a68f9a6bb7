"""Encode messages and events as plain JSON values, derived from the fields of their dataclasses.

    SubmitTurn(attempt_id=7, tokens=b"....", …)  <->  ["SubmitTurn", 7, "conversation", 4, …] and b"...."

A value is written as its class name and its fields in order. Trailing fields with default values are omitted.
A field of type bytes is written as its length. The bytes are sent separately, after the JSON; a journal omits
them. Decoding creates only instances of the classes in KINDS, by the declared types of their fields, so no
input can run code.

A new field needs no change here if its type is int, float, str, bool, bytes, an enum of strings, an optional
of these, a tuple, a dict with plain keys and values, a NamedTuple or a dataclass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from pensieve.engine.messages import EngineEvent, EngineMessage

PLAIN = (int, float, str, bool, NoneType)
KINDS: dict[str, type[Any]] = {
    each.__name__: each for each in (*get_args(EngineMessage), *get_args(EngineEvent))
}
Convert = Callable[[Any], Any]


class Unreadable(ValueError):
    """Raised if JSON values are neither a message nor an event."""


def encode(value: EngineMessage | EngineEvent) -> tuple[list[Any], bytes]:
    """Return the JSON values of a message or event, and its bytes, which are sent after the JSON."""
    form = _form_of(type(value))
    items = list(form.read(value))
    body = b""
    if form.bytes_index is not None:
        body, items[form.bytes_index] = items[form.bytes_index], len(items[form.bytes_index])
    _shorten(items, form)
    return [form.kind.__name__, *items], body


def decode(items: Sequence[Any], body: bytes = b"") -> Any:
    """Return the message or event that `encode` wrote. Raises Unreadable."""
    kind = KINDS.get(items[0]) if items and isinstance(items[0], str) else None
    if kind is None:
        raise Unreadable(f"a value of the unknown kind {items[0] if items else None!r}")
    form = _form_of(kind)
    values = list(items[1:])
    try:
        if form.bytes_index is not None:
            if values[form.bytes_index] != len(body):
                raise Unreadable(f"{len(body)} bytes beside a {kind.__name__}")
            values[form.bytes_index] = body
        return _make(form, values)
    except (TypeError, ValueError, LookupError) as error:
        raise Unreadable(f"a {kind.__name__} that cannot be read: {error}") from error


def named(items: Sequence[Any]) -> dict[str, Any]:
    """Return the output of `encode` by field name, readable for people and for later versions."""
    names = [each.name for each in fields(KINDS[items[0]])]
    return dict(zip(names, items[1:], strict=False))


def decode_named(name: str, values: Mapping[str, Any]) -> Any:
    """Return the message or event that `named` wrote, with zeros for its bytes. Raises Unreadable."""
    if name not in KINDS:
        raise Unreadable(f"a value of the unknown kind {name!r}")
    form, names = _form_of(KINDS[name]), [each.name for each in fields(KINDS[name])]
    if not values.keys() <= set(names):
        raise Unreadable(f"a {name} with {', '.join(values.keys() - set(names))}")
    items = [values.get(each, default) for each, default in zip(names, form.defaults, strict=True)]
    if MISSING in items:
        raise Unreadable(f"a {name} without {names[items.index(MISSING)]}")
    while items and names[len(items) - 1] not in values:
        items.pop()
    num_bytes = items[form.bytes_index] if form.bytes_index is not None else 0
    if not isinstance(num_bytes, int) or num_bytes < 0:
        raise Unreadable(f"a {name} with {num_bytes!r} bytes")
    return decode([name, *items], bytes(num_bytes))


class _Form(NamedTuple):
    """The rules for encoding a dataclass."""

    kind: type[Any]
    read: Callable[[Any], Sequence[Any]]
    defaults: tuple[Any, ...]  # MISSING for a field without default
    writers: tuple[tuple[int, Convert], ...]  # for fields that are not plain
    readers: tuple[tuple[int, Convert], ...]
    bytes_index: int | None


def _form_of(kind: type[Any]) -> _Form:
    if kind not in _forms:
        _forms[kind] = _derive_form(kind)
    return _forms[kind]


_forms: dict[type[Any], _Form] = {}


def _derive_form(kind: type[Any]) -> _Form:
    hints, names = get_type_hints(kind), [each.name for each in fields(kind)]
    get = attrgetter(*names)
    defaults = [
        each.default_factory() if each.default_factory is not MISSING else each.default
        for each in fields(kind)
    ]
    converters = [(index, _converters(hints[name])) for index, name in enumerate(names)]
    return _Form(
        kind,
        get if len(names) > 1 else lambda value: (get(value),),
        tuple(defaults),
        tuple((index, write) for index, (write, _) in converters if write is not None),
        tuple((index, read) for index, (_, read) in converters if read is not None),
        next((index for index, name in enumerate(names) if hints[name] is bytes), None),
    )


def _shorten(items: list[Any], form: _Form) -> None:
    """Drop trailing defaults, and convert the remaining values."""
    defaults = form.defaults
    while items and items[-1] == defaults[len(items) - 1]:
        items.pop()
    for index, write in form.writers:
        if index < len(items):
            items[index] = write(items[index])


def _make(form: _Form, values: list[Any]) -> Any:
    for index, read in form.readers:
        if index < len(values):
            values[index] = read(values[index])
    return form.kind(*values)


def _write_nested(form: _Form) -> Convert:
    def write(value: Any) -> list[Any]:
        items = list(form.read(value))
        _shorten(items, form)
        return items

    return write


def _converters(kind: Any) -> tuple[Convert | None, Convert | None]:
    """Return the converters to plain values and back; None if a value is plain already."""
    if kind in PLAIN or kind is bytes:
        return None, None
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return _union_converters(inner)
    if origin is tuple:
        return _tuple_converters(inner)
    if origin is dict:
        assert all(each in PLAIN for each in inner), f"{kind} is not plain"
        return None, None
    if isinstance(kind, type) and issubclass(kind, Enum):
        return (lambda value: value.value), kind
    if is_dataclass(kind):
        form = _form_of(kind)  # type: ignore[arg-type]
        return _write_nested(form), lambda items: _make(form, list(items))
    if isinstance(kind, type) and issubclass(kind, tuple):  # a NamedTuple
        _, reads = zip(*map(_converters, get_type_hints(kind).values()), strict=True)
        assert not any(reads), f"{kind} holds a value that is not plain"
        return list, lambda items: kind(*items)
    raise TypeError(f"a field of type {kind} cannot be written")


def _union_converters(inner: tuple[Any, ...]) -> tuple[Convert | None, Convert | None]:
    others = [each for each in inner if each not in PLAIN]
    if not others:
        return None, None
    (only,) = others
    write, read = _converters(only)
    return (
        write and (lambda value: None if value is None else write(value)),
        read and (lambda value: None if value is None else read(value)),
    )


def _tuple_converters(inner: tuple[Any, ...]) -> tuple[Convert | None, Convert | None]:
    """Return the converters of a tuple of any length, or of a fixed tuple of plain values."""
    if len(inner) == 2 and inner[1] is Ellipsis:
        write, read = _converters(inner[0])
        return (
            (lambda values: [write(each) for each in values]) if write else list,
            (lambda values: tuple(read(each) for each in values)) if read else tuple,
        )
    assert all(each in PLAIN for each in inner), f"a tuple of {inner} is not plain"
    return list, tuple
