"""Check that the state of one thread of the service is used only by this thread.

`watch` replaces the class of an object: its public methods and properties first check the calling thread. A
call from a wrong thread raises AssertionError. It is also recorded in `violations`, because a task of the
daemon may swallow the error.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any

from pensieve.conversations.daemon import Daemon

ALLOWED_IN_OTHER_THREADS = {
    "verify",
    "integrity_check",
    "close",
    "is_shared",
    "is_housekeeper",
    "kv_sources",
}
NOT_CHECKED = {"serving"}  # an attribute of the engine client that tests read in their own thread


class OwnerThreads:
    def __init__(self, caller: Callable[[], str]) -> None:
        """`caller` returns the name of the current thread: "loop", "store", or another name."""
        self.violations: list[str] = []
        self._caller = caller

    def watch_daemon(self, daemon: Daemon) -> None:
        """Watch all objects that a thread of the daemon owns. Call this after the daemon has started."""
        conversations = daemon.conversations
        self.watch(conversations._history, "store", {"interim_root"})  # thread-safe
        self.watch(daemon.store, "store", ALLOWED_IN_OTHER_THREADS)
        self.watch(conversations, "loop")
        self.watch(conversations.turns, "loop")
        self.watch(conversations.followers, "loop")
        self.watch(conversations.ends, "loop")
        self.watch(daemon.engine, "loop", NOT_CHECKED)

    def watch(self, thing: Any, owner: str, exempt: Collection[str] = ()) -> None:
        kind = type(thing)
        methods: dict[str, Any] = {}
        for name in dir(kind):
            if name.startswith("_") or name in exempt:
                continue
            found = inspect.getattr_static(kind, name)
            if isinstance(found, property):
                methods[name] = property(self._checked_property(kind, name, owner))
            elif inspect.isfunction(found):
                methods[name] = self._checked_method(kind, name, owner)
        thing.__class__ = type(kind.__name__, (kind,), methods)

    def _checked_method(self, kind: type, name: str, owner: str) -> Callable[..., Any]:
        @functools.wraps(inspect.getattr_static(kind, name))
        def method(this: Any, *arguments: Any, **named: Any) -> Any:
            self._check(kind, name, owner)
            return getattr(kind, name)(this, *arguments, **named)

        return method

    def _checked_property(self, kind: type, name: str, owner: str) -> Callable[[Any], Any]:
        def value(this: Any) -> Any:
            self._check(kind, name, owner)
            return getattr(kind, name).__get__(this)

        return value

    def _check(self, kind: type, name: str, owner: str) -> None:
        if (caller := self._caller()) != owner:
            violation = f"{kind.__name__}.{name} belongs to the {owner}, and {caller} called it"
            self.violations.append(violation)
            raise AssertionError(violation)
