"""How values of the SDK look in a prompt, a log or a debugger: one line, without what is empty or long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime
from typing import Any

TEXT_CHARACTERS_MAX = 60
ITEMS_MAX = 6


def shown(value: Any) -> str:
    """The `__repr__` of a dataclass: its class, and its fields but those that are empty or as by default."""
    named = {each.name: (getattr(value, each.name), each.default) for each in fields(value)}
    parts = [
        f"{name}={_short(given)}"
        for name, (given, default) in named.items()
        if given != default and given not in ("", (), {})
    ]
    return f"{type(value).__name__}({', '.join(parts)})"


def _short(given: Any) -> str:
    if isinstance(given, str):
        if len(given) <= TEXT_CHARACTERS_MAX:
            return repr(given)
        return f"{given[:TEXT_CHARACTERS_MAX] + '…'!r} ({len(given):,} characters)"
    if isinstance(given, float):
        return f"{given:.4g}"
    if isinstance(given, datetime):
        return given.isoformat(timespec="seconds")
    if isinstance(given, tuple) and len(given) > ITEMS_MAX:
        first = ", ".join(_short(item) for item in given[:ITEMS_MAX])
        return f"({first}, … {len(given):,} in all)"
    if isinstance(given, Mapping):
        items = ", ".join(f"{key!r}: {_short(item)}" for key, item in [*given.items()][:ITEMS_MAX])
        return f"{{{items}{', …' if len(given) > ITEMS_MAX else ''}}}"
    return repr(given)
