"""A call with the id of another tenant's conversation takes exactly as much work as with an unknown id."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from pensieve.errors import NotFound
from pensieve.store import ConversationStore, NewConversation, NewTurn
from tests.store.faulty import writer_of
from tests.store.talk import user

pytestmark = pytest.mark.sqlite  # counts instructions of SQLite's virtual machine

PROBES: dict[str, Callable[[ConversationStore, str], object]] = {
    "get": lambda store, name: store.get_conversation(name, tenant="b"),
    "begin": lambda store, name: store.begin_turn(name, NewTurn("r1", [user("hi", 1)]), tenant="b"),
    "find": lambda store, name: store.find_turn(name, "r1", tenant="b"),
    "log": lambda store, name: store.log(name, tenant="b"),
    "log_end": lambda store, name: store.log_end(name, 4, tenant="b"),
    "messages": lambda store, name: store.messages(name, tenant="b"),
    "fork": lambda store, name: store.fork_conversation(name, 1, "mine", tenant="b"),
    "rewind": lambda store, name: store.rewind_conversation(name, 0, tenant="b"),
    "replace_log": lambda store, name: store.replace_log(name, "f", [[1]], tenant="b"),
    "delete": lambda store, name: store.delete_conversation(name, tenant="b"),
    "list": lambda store, name: store.list_conversations(tenant="b"),
}


def work(store: ConversationStore, probe: Callable[[], object]) -> tuple[list[str], int]:
    """Return a probe's statements, and the number of its instructions in SQLite's virtual machine."""
    statements: list[str] = []
    instructions = 0

    def count() -> int:
        nonlocal instructions
        instructions += 1
        return 0

    with writer_of(store).reading() as conn:
        conn.set_trace_callback(statements.append)
        conn.set_progress_handler(count, 1)
    with contextlib.suppress(NotFound):
        probe()
    with writer_of(store).reading() as conn:
        conn.set_progress_handler(None, 0)
        conn.set_trace_callback(None)
    return [statement.partition("WHERE")[0] for statement in statements], instructions


@pytest.mark.parametrize("name", PROBES)
def test_a_call_with_another_tenants_id_takes_the_same_work_as_with_an_unknown_id(
    store: ConversationStore, name: str
) -> None:
    for number in range(40):
        store.create_conversation(NewConversation(f"a{number}", "f", [user("x", 1)], tenant="a"))
        store.create_conversation(NewConversation(f"b{number}", "f", [user("x", 1)], tenant="b"))
    begun = store.begin_turn("a7", NewTurn("r1", [user("hi", 1)]), tenant="a")
    store.finish_turn(begun.turn.turn_id, user("hello", 2), "stop", {})
    probe = PROBES[name]
    # The first call prepares statements. The second call may execute one more, to look for dead turns.
    for _ in range(2):
        work(store, lambda: probe(store, "warm"))
    statements, instructions = work(store, lambda: probe(store, "a7"))
    assert statements
    assert instructions > 5
    assert work(store, lambda: probe(store, "never")) == (statements, instructions)
    seen = store.get_conversation("a7", tenant="a")
    assert (seen.revision, seen.num_messages) == (1, 3)
