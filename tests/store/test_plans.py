"""No everyday statement reads a whole table, so statements do not slow down with more conversations."""

from __future__ import annotations

from typing import Any

import pytest

from pensieve.store import ConversationStore, NewTurn
from pensieve.store.records import ChainState, NewConversation, NewPrefix
from pensieve.store.responses import StoredResponse
from tests.store.faulty import writer_of
from tests.store.talk import begin, create, reply, say, user

pytestmark = pytest.mark.sqlite  # SQLite's query plans are the subject

# Steps that scan no table, or an almost empty index.
NO_TABLE = ("turns_running", "CONSTANT ROWS", "-ROW VALUES")
SCANNED_ON_PURPOSE = {"sqlite_schema", "space", "epochs", "_sqlite_migrations"}


def test_no_everyday_statement_scans_a_whole_table(
    store: ConversationStore, open_store: Any, driver: Any
) -> None:
    statements: set[str] = set()

    class Watching:
        Error = driver.Error
        sqlite_version_info = driver.sqlite_version_info

        @staticmethod
        def connect(*args: Any, **options: Any) -> Any:
            class Connection(driver.Connection):  # type: ignore[misc]
                def execute(self, sql: str, *rest: Any) -> Any:
                    statements.add(sql)
                    return super().execute(sql, *rest)

            return driver.connect(*args, factory=Connection, **options)

    store.close()
    store = open_store(driver=Watching)
    create(store, "tea", user("head", 1))
    for number in range(30):
        create(store, f"c{number}")
    say(store, "tea", "r1", user("hi", 1), reply("hello", 2))
    bound = begin(store, "c0", "r1", "hi", 3)
    store.finish_turn(bound, reply("hello", 2), "stop", {}, ChainState(b"state", b"session"))
    for session in (b"session", b"another"):
        assert store.chains.longest([b"state"], session) is not None
    keyed = NewTurn("key", [user("hi", 3)], history_digest=b"digest")
    turn_id = store.begin_turn("c1", keyed).turn.turn_id
    assert store.find_turn_by_key("key") is not None
    store.interrupt_turn(turn_id)
    assert store.chains.forget(0.0) is False
    store.fork_conversation("tea", 1, "cup")
    store.interrupt_turn(begin(store, "cup", "r1", "hi", 3))
    begin(store, "cup", "r1", "hi", 3)
    store.close()
    store = open_store(driver=Watching)
    assert len(store.interrupted_at_open) == 1
    store.fail_turn(begin(store, "cup", "r2", "hi", 3), "x")
    store.replace_log("tea", "f2", [[1], [2], [3]])
    store.prefixes.declare(NewPrefix("rules", "f", [user("head", 1)]))
    assert store.prefixes.num_of("") == 1
    ruled = store.prefixes.begin(NewConversation("ruled", "", prefix_id="rules"))
    assert not store.prefixes.has_turns(ruled)
    store.rewind_conversation("tea", 0)
    store.list_conversations(2)
    store.messages("tea")
    store.turn_messages(1)
    for response_id in ("resp_1", "resp_1", "resp_2"):
        store.responses.save(StoredResponse(response_id, "tea", {"id": response_id}))
    reader = store.reader()
    assert reader.response("resp_1") is not None
    reader.close()
    store.responses.delete("resp_1")
    store.changes.set_metadata("tea", {"topic": "milk"})
    store.delete_conversation("tea")

    scanned = set()
    with writer_of(store).reading() as conn:
        for sql in sorted(statements):
            if sql.split()[0] not in ("SELECT", "UPDATE", "DELETE", "INSERT", "WITH"):
                continue
            num_parameters = sql.count("?")
            values: Any = (1,) * num_parameters or {"conversation": 1, "revision": 1}
            for *_, step in conn.execute("EXPLAIN QUERY PLAN " + sql, values).fetchall():
                words = step.split()
                if words[0] == "SCAN" and not any(each in step for each in NO_TABLE):
                    scanned.add((words[1], sql))
    subqueries = {(name, sql) for name, sql in scanned if name in SCANNED_ON_PURPOSE}
    assert scanned - subqueries == set()
    assert len(statements) > 40
