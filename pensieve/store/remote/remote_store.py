"""The store of a daemon that shares a history with others: every method is a call to who has the history.

It has the methods of `ConversationStore` that a daemon uses, with the same arguments, values and errors; and
one error more: OwnedElsewhere, of what would write to a conversation that another daemon has.

**What the engine knows.**  A daemon's engine keeps KV of conversations between turns, and that is right only
while nobody else has written to them.  So this store remembers the epoch in which it had a conversation last.
A call that finds the conversation in another epoch was preceded by other writers: then `on_stale` is called
before the call returns, in the store's thread, and whoever listens has the engine forget the conversation
before it hears of a turn.  A conversation that was never here needs no such thing.  A session that was lost
is no exception: the next one has other epochs; that its turns run no more is said at once, by `on_lost`, in
a thread of the connection's.  The same is done for declared prefixes, whose epoch is the time of their
declaration.

**Whence.**  Where another daemon had the conversation and goes on, its address is in `came_from`: it may
still have KV of it.  It is taken from there with the next turn, or dropped when the conversation is deleted
or is claimed in another epoch.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

from pensieve.errors import StaleRevision
from pensieve.store.backend import ErasureSteps, WriteFigures
from pensieve.store.chains import Chains
from pensieve.store.conversation_changes import ConversationChanges, Pending, PendingChange
from pensieve.store.conversation_store import ConversationStore
from pensieve.store.declared_prefixes import PrefixStore, stored_id
from pensieve.store.folder import DataFolder
from pensieve.store.history_reader import HistoryReader
from pensieve.store.records import PREFIX_MARK, Conversation
from pensieve.store.remote import methods
from pensieve.store.remote.calls import prefix_epoch
from pensieve.store.remote.methods import METHODS, Kind, Method
from pensieve.store.responses import ResponseStore

P = ParamSpec("P")
T = TypeVar("T")
EPOCHS_MAX = 200_000  # conversations whose epochs are remembered
CAME_FROM_MAX = 20_000  # conversations that have moved here and had no turn since
TRIES_MAX = 8  # to change what others change, too


class Answer(NamedTuple):
    """What a call brought."""

    value: Any
    epoch: int = 0
    previous_address: str = ""
    source_epoch: int = 0


class Caller(Protocol):
    """A session with who has the history."""

    on_lost: Callable[[], None]

    def call(self, method: Method, given: tuple[Any, ...], named: Mapping[str, Any]) -> Answer: ...
    def announce(self, address: str, http_address: str = "", metrics_address: str = "") -> None: ...
    def drain(self) -> None: ...
    def leave(self) -> None: ...
    def close(self) -> None: ...


def remote(function: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """The method of this name, as a call."""
    method = next(each for each in METHODS.values() if each.function is function)

    def call(self: Any, /, *given: P.args, **named: P.kwargs) -> T:
        value: T = self.call(method, given, named)
        return value

    return call


class _Part:
    """Methods that the store has in an object of their own."""

    def __init__(self, store: RemoteStore) -> None:
        self._store = store

    def watch(self, on_stale: Callable[[str, str], None], on_lost: Callable[[], None]) -> None:
        """`on_stale` gets each conversation that others have written to, in the store's thread; `on_lost` is
        called when the session has ended, in another."""
        self.on_stale, self.on_lost = on_stale, on_lost

    def call(self, method: Method, given: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        return self._store.call(method, given, named)


class RemoteChains(_Part):
    longest = remote(Chains.longest)

    def forget(self, before: float) -> bool:
        """Who has the history does that."""
        return False


class RemoteResponses(_Part):
    save = remote(ResponseStore.save)
    delete = remote(ResponseStore.delete)
    is_made_for = remote(ResponseStore.is_made_for)
    goes_with = remote(ResponseStore.goes_with)


class RemotePrefixes(_Part):
    declare = remote(PrefixStore.declare)
    begin = remote(PrefixStore.begin)
    find = remote(PrefixStore.find)
    num_of = remote(PrefixStore.num_of)
    to_keep_warm = remote(PrefixStore.to_keep_warm)
    has_turns = remote(PrefixStore.has_turns)
    num_shared_tokens = remote(PrefixStore.num_shared_tokens)


class RemoteChanges(_Part):
    set_metadata = remote(ConversationChanges.set_metadata)
    begin_with = remote(ConversationChanges.begin_with)
    delete_last = remote(ConversationChanges.delete_last)

    def change_pending(
        self, conversation_id: str, change: Callable[[Pending], Pending], *, tenant: str = ""
    ) -> PendingChange:
        """The change is made here, and taken there unless another one came between."""
        for _ in range(TRIES_MAX):
            conversation, before = self._store.with_pending(conversation_id, tenant=tenant)
            after = _without_tokens(change(before))
            changed = self._store.replace_pending(conversation_id, before, after, tenant=tenant)
            if changed.after == after:
                return changed
        raise StaleRevision(conversation.revision, conversation.revision)


def _without_tokens(pending: Pending) -> Pending:
    """Messages that are pending have none, however that is written."""
    messages = tuple(replace(each, token_ids=()) for each in pending.messages)
    return replace(pending, messages=messages)


class RemoteErasure(_Part, ErasureSteps):
    """What was deleted is erased where the history is, by who has it."""

    def finish(self) -> None:
        self._store.finish_erasure()


class RemoteForgetting:
    def step(self, before: float) -> bool:
        """Who has the history does that."""
        return False


class NoMarks:
    """Who has the history marks it as damaged, and refuses changes then."""

    is_damaged = False
    is_check_due = False

    def mark_damaged(self, is_damaged: bool) -> None:
        """Of another process's history nothing is noted here."""


class NoScrub:
    """Who has the history reads all of it now and then."""

    num_passes = 0

    def num_steps(self) -> int:
        return 1

    def step(self) -> list[str]:
        return []

    def close(self) -> None:
        """Nothing is open."""


class RemoteReader:
    """Reads beside the store's thread; in one thread at a time."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    def watch(self, on_stale: Callable[[str, str], None], on_lost: Callable[[], None]) -> None:
        """`on_stale` gets each conversation that others have written to, in the store's thread; `on_lost` is
        called when the session has ended, in another."""
        self.on_stale, self.on_lost = on_stale, on_lost

    def call(self, method: Method, given: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        return self._caller.call(method, given, named).value

    get_conversation = remote(HistoryReader.get_conversation)
    find_turn = remote(HistoryReader.find_turn)
    num_conversations = remote(HistoryReader.num_conversations)
    stored_bytes = remote(HistoryReader.stored_bytes)
    tenants_of = remote(HistoryReader.tenants_of)
    list_conversations = remote(HistoryReader.list_conversations)
    prefix = remote(HistoryReader.prefix)
    prefixes = remote(HistoryReader.prefixes)
    all_prefixes = remote(HistoryReader.all_prefixes)
    num_prefixes = remote(HistoryReader.num_prefixes)
    response = remote(HistoryReader.response)
    with_pending = remote(HistoryReader.with_pending)
    message_page = remote(HistoryReader.message_page)

    def close(self) -> None:
        """The session goes on until the store is closed."""


class RemoteStore:
    """Used from one thread at a time, but for what `reader` returns."""

    num_lanes = 1

    is_shared = True
    keeps_house = True

    def __init__(self, caller: Caller, folder: DataFolder, replica: str = "") -> None:
        """`folder` is the daemon's own, for all but the history; `replica` is its name."""
        self.folder = folder
        self.replica = replica
        self.marks = NoMarks()
        self.integrity_check_due = False
        self.now: Callable[[], float] = time.time
        self.figures = WriteFigures()
        self.interrupted_at_open: tuple[Any, ...] = ()
        self.on_stale: Callable[[str, str], None] = lambda tenant, conversation_id: None
        self.on_lost: Callable[[], None] = lambda: None
        self.came_from: OrderedDict[tuple[str, str], str] = OrderedDict()
        self.chains, self.responses = RemoteChains(self), RemoteResponses(self)
        self.prefixes, self.changes = RemotePrefixes(self), RemoteChanges(self)
        self.erasure, self.forgetting = RemoteErasure(self), RemoteForgetting()
        self._epochs: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._caller = caller
        caller.on_lost = lambda: self.on_lost()

    def watch(self, on_stale: Callable[[str, str], None], on_lost: Callable[[], None]) -> None:
        """`on_stale` gets each conversation that others have written to, in the store's thread; `on_lost` is
        called when the session has ended, in another."""
        self.on_stale, self.on_lost = on_stale, on_lost

    def call(self, method: Method, given: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        began = time.perf_counter()
        answer = self._caller.call(method, given, named)
        if method.writes:
            self.figures.committed(time.perf_counter() - began)
        self._note(method, given, named, answer)
        return answer.value

    get_conversation_there = remote(ConversationStore.get_conversation)
    num_conversations = remote(ConversationStore.num_conversations)
    stored_bytes = remote(ConversationStore.stored_bytes)
    create_conversation = remote(ConversationStore.create_conversation)
    fork_conversation = remote(ConversationStore.fork_conversation)
    rewind_conversation = remote(ConversationStore.rewind_conversation)
    replace_log = remote(ConversationStore.replace_log)
    delete_conversation = remote(ConversationStore.delete_conversation)
    begin_turn = remote(ConversationStore.begin_turn)
    finish_turn = remote(ConversationStore.finish_turn)
    fail_turn = remote(ConversationStore.fail_turn)
    interrupt_turn = remote(ConversationStore.interrupt_turn)
    get_turn = remote(ConversationStore.get_turn)
    find_turn = remote(ConversationStore.find_turn)
    find_keyed = remote(ConversationStore.find_keyed)
    look_up = remote(ConversationStore.look_up)
    turn_messages = remote(ConversationStore.turn_messages)
    log = remote(ConversationStore.log)
    log_end = remote(ConversationStore.log_end)
    messages = remote(ConversationStore.messages)
    verify = remote(ConversationStore.verify)
    with_pending = remote(HistoryReader.with_pending)
    replace_pending = remote(methods.replace_pending)
    finish_erasure = remote(methods.finish_erasure)
    claim = remote(methods.claim)
    take = remote(methods.take)
    give_up = remote(methods.give_up)

    def get_conversation(self, conversation_id: str, *, tenant: str = "") -> Conversation:
        """One conversation, without its messages."""
        found: Conversation = self.get_conversation_there(conversation_id, tenant=tenant)
        if conversation_id.startswith(PREFIX_MARK):
            self._compare(tenant, conversation_id, prefix_epoch(found))
        return found

    def reader(self) -> RemoteReader:
        """For reading in another thread."""
        return RemoteReader(self._caller)

    def scrub(self) -> NoScrub:
        return NoScrub()

    def integrity_check(self) -> list[str]:
        """Who has the history does that."""
        return []

    def announce(self, address: str, http_address: str, metrics_address: str) -> None:
        """Where this daemon is reached, by its other ones too."""
        self._caller.announce(address, http_address, metrics_address)

    def drain(self) -> None:
        """This daemon takes no more turns: others may have each conversation whose turn has ended."""
        self._caller.drain()

    def close(self) -> None:
        """No turn runs here: every conversation is anybody's.  A second call does nothing."""
        try:
            self._caller.leave()
            self._caller.close()
        finally:
            self.folder.close(clean=True)

    # -- what the engine knows --

    def _note(
        self, method: Method, given: tuple[Any, ...], named: Mapping[str, Any], answer: Answer
    ) -> None:
        if not (answer.epoch or answer.source_epoch):
            return
        arguments = method.arguments(given, named)
        tenant = arguments.get("tenant", "")
        if method.kind is Kind.CREATE:
            created: Conversation = answer.value
            self._compare(created.tenant, created.conversation_id, answer.epoch)
            self.came_from.pop((created.tenant, created.conversation_id), None)
            if method.name == "fork_conversation":
                self._compare(tenant, arguments["source_id"], answer.source_epoch)
        elif method.name == "prefixes.num_shared_tokens":
            of: Conversation = arguments["conversation"]
            self._compare(of.tenant, stored_id(of.prefix_id), answer.source_epoch)
        else:
            key = tenant, arguments["conversation_id"]
            is_gone = method.name == "delete_conversation"
            if is_gone or self._epochs.get(key) != answer.epoch:
                self.came_from.pop(key, None)
            self._compare(*key, answer.epoch)
            if answer.previous_address and not is_gone:
                self.came_from[key] = answer.previous_address
                if len(self.came_from) > CAME_FROM_MAX:
                    self.came_from.popitem(last=False)

    def _compare(self, tenant: str, conversation_id: str, epoch: int) -> None:
        """Have it forgotten if others have written to it since it was here."""
        key = tenant, conversation_id
        known = self._epochs.get(key)
        if known is not None and known != epoch:
            self.on_stale(tenant, conversation_id)
        if epoch:
            self._epochs[key] = epoch
            self._epochs.move_to_end(key)
        elif known is not None:
            del self._epochs[key]
        if len(self._epochs) > EPOCHS_MAX:
            self.on_stale(*self._epochs.popitem(last=False)[0])
