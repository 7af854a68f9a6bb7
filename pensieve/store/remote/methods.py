"""The methods of the store that daemons call over the wire, and what kind of call each is.

    READ     reads; in the thread of reads, what was committed (`reader.…`)
    LOOK     reads in the store's thread, where it sees what the same replica's calls before it did
    WRITE    writes to a conversation, which is the caller's from then on, or refuses
    CREATE   makes a conversation, which is the caller's
    TURN     ends a turn, which must be the caller's
    OTHER    writes to no conversation
    ALONE    a WRITE or OTHER that erases from the files, which cannot be a part of a group's transaction

The types of arguments and of what comes back are those of the method's own signature.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from functools import cached_property
from typing import Any

from pensieve.store.chains import Chains
from pensieve.store.conversation_changes import ConversationChanges, Pending, PendingChange
from pensieve.store.conversation_store import ConversationStore
from pensieve.store.declared_prefixes import PrefixStore
from pensieve.store.history_reader import HistoryReader
from pensieve.store.remote import wire
from pensieve.store.remote.wire import Form, Parts, Unreadable
from pensieve.store.responses import ResponseStore


class Kind(Enum):
    READ = auto()
    LOOK = auto()
    WRITE = auto()
    CREATE = auto()
    TURN = auto()
    OTHER = auto()


class Method:
    def __init__(
        self, name: str, function: Callable[..., Any], kind: Kind, *, alone: bool = False
    ) -> None:
        self.name = name
        self.kind = kind
        self.alone = alone
        self.writes = kind not in (Kind.READ, Kind.LOOK)
        self.is_long = name == "verify"  # it takes longer the more there is
        self.function = function
        _, *parameters = inspect.signature(function).parameters.values()  # but the first, the store
        self._names = [each.name for each in parameters]
        self._needed = {each.name for each in parameters if each.default is each.empty}

    @cached_property
    def _forms(self) -> Mapping[str, Form]:
        """Of each argument, and of what is returned."""
        hints = wire.hints_of(self.function)
        return {name: wire.form_of(hints[name]) for name in (*self._names, "return")}

    def arguments(self, given: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
        """By name."""
        return {**dict(zip(self._names, given, strict=False)), **named}

    def write_arguments(
        self, given: tuple[Any, ...], named: Mapping[str, Any]
    ) -> tuple[str, Parts]:
        bound = self.arguments(given, named).items()
        parts: Parts = []
        values = {name: self._forms[name].write(value, parts) for name, value in bound}
        return json.dumps(values, separators=(",", ":")), parts

    def read_arguments(self, text: str, parts: Sequence[bytes]) -> dict[str, Any]:
        """By name."""
        try:
            given = dict(json.loads(text))
            values = {name: self._forms[name].read(each, parts) for name, each in given.items()}
            if missing := self._needed - values.keys():
                raise Unreadable(f"without {', '.join(missing)}")
        except (TypeError, ValueError, LookupError, RecursionError) as error:
            raise Unreadable(f"these are not the arguments of {self.name}: {error}") from error
        return values

    def write_result(self, value: Any) -> tuple[str, Parts]:
        parts: Parts = []
        return json.dumps(self._forms["return"].write(value, parts)), parts

    def read_result(self, text: str, parts: Sequence[bytes]) -> Any:
        return wire.read_form(text, parts, self._forms["return"])

    def run(self, target: Any, arguments: Mapping[str, Any]) -> Any:
        return self.function(target, **arguments)

    def run_on(self, store: ConversationStore, arguments: Mapping[str, Any]) -> Any:
        """`run`, on the part of the store that has the method."""
        part, dot, _ = self.name.partition(".")
        return self.run(getattr(store, part) if dot else store, arguments)


def replace_pending(
    store: ConversationStore,
    conversation_id: str,
    before: Pending,
    after: Pending,
    *,
    tenant: str = "",
) -> PendingChange:
    """Put other messages in the place of those that are pending; if they are not `before`, they stay."""
    return store.changes.change_pending(
        conversation_id, lambda found: after if found == before else found, tenant=tenant
    )


def finish_erasure(store: ConversationStore) -> None:
    store.erasure.finish()


def claim(store: ConversationStore, conversation_id: str, *, tenant: str = "") -> None:
    """Make a conversation the caller's, which `calls.py` does for every WRITE."""


def take(store: ConversationStore, conversation_id: str, *, tenant: str = "") -> None:
    """The same, also where another replica has it and does not answer, or has no turn of it."""


def give_up(store: ConversationStore, conversation_id: str, *, tenant: str = "") -> None:
    """Leave a conversation to whoever claims it next."""


def _methods() -> dict[str, Method]:
    store, found = ConversationStore, dict[str, Method]()

    def add(prefix: str, owner: Any, kind: Kind, names: str, *, alone: bool = False) -> None:
        for name in names.split():
            found[prefix + name] = Method(prefix + name, getattr(owner, name), kind, alone=alone)

    add("", store, Kind.LOOK, "get_conversation stored_bytes find_turn get_turn turn_messages")
    add("", store, Kind.LOOK, "find_keyed look_up log log_end messages num_conversations")
    add("", store, Kind.WRITE, "begin_turn rewind_conversation replace_log")
    add("", store, Kind.WRITE, "delete_conversation", alone=True)
    add("", store, Kind.CREATE, "create_conversation fork_conversation")
    add("", store, Kind.TURN, "finish_turn fail_turn interrupt_turn")
    add("", store, Kind.READ, "verify")
    add("chains.", Chains, Kind.LOOK, "longest")
    add("responses.", ResponseStore, Kind.LOOK, "is_made_for goes_with")
    add("responses.", ResponseStore, Kind.OTHER, "save")
    add("responses.", ResponseStore, Kind.OTHER, "delete", alone=True)
    add("changes.", ConversationChanges, Kind.WRITE, "set_metadata begin_with")
    add("changes.", ConversationChanges, Kind.WRITE, "delete_last", alone=True)
    add("prefixes.", PrefixStore, Kind.LOOK, "find num_of to_keep_warm has_turns")
    add("prefixes.", PrefixStore, Kind.LOOK, "num_shared_tokens")
    add("prefixes.", PrefixStore, Kind.OTHER, "declare")
    add("prefixes.", PrefixStore, Kind.CREATE, "begin")
    reads = (
        "get_conversation find_turn num_conversations stored_bytes tenants_of list_conversations"
        " prefix prefixes all_prefixes num_prefixes response with_pending message_page"
    )
    add("reader.", HistoryReader, Kind.READ, reads)
    for function, kind, alone in (
        (replace_pending, Kind.WRITE, True),
        (finish_erasure, Kind.OTHER, True),
        (claim, Kind.WRITE, False),
        (take, Kind.WRITE, False),
        (give_up, Kind.OTHER, False),
    ):
        found[function.__name__] = Method(function.__name__, function, kind, alone=alone)
    return found


METHODS = _methods()
