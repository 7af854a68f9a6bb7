"""Asserts that what belongs to one thread of the service is called by no other.

`watch` gives an object a class of its own whose public methods and properties look first who calls.  A
wrong call is refused with an AssertionError where it happens, and kept in `violations`, because a task of
the daemon may swallow it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any

from pensieve.conversations.daemon import Daemon

BESIDE_THE_STORE_THREAD = {
    "verify",
    "integrity_check",
    "close",
    "is_shared",
    "keeps_house",
    "came_from",
}
NO_STATE = {"serving"}  # of the engine's client: tests wait for it in their own thread


class OwnerThreads:
    def __init__(self, caller: Callable[[], str]) -> None:
        """`caller` names the present thread: "loop", "store", or another."""
        self.violations: list[str] = []
        self._caller = caller

    def watch_daemon(self, daemon: Daemon) -> None:
        """All that one of its threads owns; to be called when it has started."""
        conversations = daemon.conversations
        self.watch(conversations._history, "store")
        self.watch(daemon.store, "store", BESIDE_THE_STORE_THREAD)
        self.watch(conversations, "loop")
        self.watch(conversations.turns, "loop")
        self.watch(conversations.followers, "loop")
        self.watch(conversations.ends, "loop")
        self.watch(daemon.engine, "loop", NO_STATE)

    def watch(self, thing: Any, owner: str, exempt: Collection[str] = ()) -> None:
        kind = type(thing)
        methods: dict[str, Any] = {}
        for name in dir(kind):
            if name.startswith("_") or name in exempt:
                continue
            found = inspect.getattr_static(kind, name)
            if isinstance(found, property):
                methods[name] = property(self._looked_at(kind, name, owner))
            elif inspect.isfunction(found):
                methods[name] = self._called(kind, name, owner)
        thing.__class__ = type(kind.__name__, (kind,), methods)

    def _called(self, kind: type, name: str, owner: str) -> Callable[..., Any]:
        @functools.wraps(inspect.getattr_static(kind, name))
        def method(this: Any, *arguments: Any, **named: Any) -> Any:
            self._check(kind, name, owner)
            return getattr(kind, name)(this, *arguments, **named)

        return method

    def _looked_at(self, kind: type, name: str, owner: str) -> Callable[[Any], Any]:
        def value(this: Any) -> Any:
            self._check(kind, name, owner)
            return getattr(kind, name).__get__(this)

        return value

    def _check(self, kind: type, name: str, owner: str) -> None:
        if (caller := self._caller()) != owner:
            violation = f"{kind.__name__}.{name} belongs to the {owner}, and {caller} called it"
            self.violations.append(violation)
            raise AssertionError(violation)
