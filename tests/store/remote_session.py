"""A store as a daemon has it that shares a history, over calls that cross no process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pensieve.store import ConversationStore
from pensieve.store.folder import DataFolder
from pensieve.store.remote import wire
from pensieve.store.remote.calls import Call, Calls, Outcome
from pensieve.store.remote.methods import METHODS, Kind, Method
from pensieve.store.remote.remote_store import Answer, RemoteStore
from pensieve.store.replica_sessions import NOBODY, Session


class LocalCaller:
    """A session whose calls are carried out at once; every value travels as it would between processes."""

    def __init__(self, calls: Calls, store: ConversationStore, replica: str) -> None:
        self.calls, self.store = calls, store
        self.session = calls.open_session(Session(NOBODY, replica, f"{replica}:1")).number
        self.number = 0
        self.on_lost: Callable[[], None] = lambda: None
        self._reader = store.reader()

    def request(
        self, method: Method, given: tuple[Any, ...], named: Mapping[str, Any], again: bool = False
    ) -> Call:
        """The next call of the session."""
        self.number += 1
        arguments, parts = method.write_arguments(given, named)
        return Call(self.session, self.number, method.name, arguments, parts, again)

    def call(self, method: Method, given: tuple[Any, ...], named: Mapping[str, Any]) -> Answer:
        if method.kind is Kind.READ:
            target = self.store if "." not in method.name else self._reader
            text, parts = method.write_arguments(given, named)
            result = method.run(target, method.read_arguments(text, parts))
            return Answer(method.read_result(*method.write_result(result)))
        (outcome,) = self.calls.carry_out([self.request(method, given, named)])
        return answer_of(method, outcome)

    def announce(self, address: str, http_address: str = "", metrics_address: str = "") -> None:
        """It has no address."""

    def drain(self) -> None:
        """As `Calls` says."""
        self.calls.drain(self.session)

    def leave(self) -> None:
        """It ends with the store."""

    def close(self) -> None:
        self._reader.close()


def answer_of(method: Method, outcome: Outcome) -> Answer:
    """What the caller gets, or its error."""
    if outcome.fault is not None:
        raise outcome.fault
    if outcome.failed:
        raise wire.error_read(outcome.result)
    value = method.read_result(outcome.result, outcome.parts)
    return Answer(value, outcome.epoch, outcome.previous_address, outcome.source_epoch)


class SharedHistory:
    """A real store, and the stores of replicas that share it."""

    def __init__(self, store: ConversationStore) -> None:
        self.store = store
        self.calls = Calls(store)
        self.stale: list[tuple[str, str, str]] = []  # replica, tenant, conversation
        self._opened: list[RemoteStore] = []

    def replica(self, name: str) -> RemoteStore:
        folder = DataFolder.open(
            self.store.folder.path.with_name(f"replica-{name}-{len(self._opened)}"),
            "test",
            has_database=False,
        )
        remote = RemoteStore(LocalCaller(self.calls, self.store, name), folder, name)
        remote.now = self.store.now
        remote.on_stale = lambda tenant, conversation: self.stale.append(
            (name, tenant, conversation)
        )
        self._opened.append(remote)
        return remote

    def close(self) -> None:
        for remote in self._opened:
            remote.close()
        self.store.close()


class WholeStore(RemoteStore):
    """A replica's store that is opened and closed with the history, for tests of any store."""

    def __init__(self, store: ConversationStore) -> None:
        folder = DataFolder.open(store.folder.path.with_name("replica"), "test", has_database=False)
        super().__init__(LocalCaller(Calls(store), store, "one"), folder, "one")
        self.store, self.folder, self._own_folder = store, store.folder, folder
        self.now, self.interrupted_at_open = store.now, store.interrupted_at_open
        self._writer = store._writer
        self.list_conversations = self.reader().list_conversations
        self.forgetting, self.chains.forget = store.forgetting, store.chains.forget  # type: ignore

    def __enter__(self) -> WholeStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._caller.close()
        self._own_folder.close(clean=True)
        self.store.close()


def caller_of(remote: RemoteStore) -> LocalCaller:
    """The session beneath a store."""
    caller = remote._caller
    assert isinstance(caller, LocalCaller)
    return caller


def method(name: str) -> Method:
    return METHODS[name]
