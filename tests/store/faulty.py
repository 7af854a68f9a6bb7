"""A SQLite driver that fails at a chosen statement, and a small history for it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from pensieve.store import (
    ConversationStore,
    NewConversation,
    NewMessage,
)
from pensieve.store.connection import WriterConnection
from pensieve.store.postgres.session import SqlSession
from tests.store.talk import begin, reply, say, user

NEVER = 10**9


class FaultyDriver:
    """A real SQLite driver that fails at the Nth statement from now.

    The failure comes before or after the execution of the statement. It happens once, or at each later
    statement until `heal`.
    """

    def __init__(self, driver: Any, code: int, after: bool, lasting: bool) -> None:
        self.Error = driver.Error
        self.sqlite_version = driver.sqlite_version
        self.sqlite_version_info = driver.sqlite_version_info
        self.connect = self._connect
        self.countdown = NEVER
        self.fired = False
        self._driver = driver
        self._code = code
        self.after = after
        self.lasting = lasting

    def arm(self, countdown: int) -> None:
        self.countdown, self.fired = countdown, False

    def heal(self) -> None:
        self.countdown = NEVER

    def _connect(self, *args: Any, **options: Any) -> Any:
        faults = self

        class FaultyConnection(self._driver.Connection):  # type: ignore[misc, name-defined]
            def execute(self, *args: Any) -> Any:
                faults.countdown -= 1
                fails = faults.countdown == 0 or (faults.lasting and faults.countdown < 0)
                if fails and not faults.after:
                    raise faults.error()
                cursor = super().execute(*args)
                if fails:
                    raise faults.error()
                return cursor

        return self._driver.connect(*args, factory=FaultyConnection, **options)

    def error(self) -> Any:
        self.fired = True
        error = self._driver.OperationalError("planted")
        error.sqlite_errorcode = self._code
        return error


HEAD = NewMessage("system", "Be brief.", (1, 2))


def writer_of(store: ConversationStore) -> WriterConnection:
    """Return a store's writer connection, for tests that damage, starve or inspect the database."""
    found: WriterConnection = vars(store)["_writer"]
    return found


def disable_foreign_keys(conn: Any) -> None:
    """Disable foreign keys, which would prevent some kinds of damage."""
    is_postgres = isinstance(conn, SqlSession)
    conn.execute(
        "SET session_replication_role = replica" if is_postgres else "PRAGMA foreign_keys = OFF"
    )


def database_of(store: ConversationStore) -> Any:
    """Return the open database, or None after an I/O error has closed it."""
    return writer_of(store)._db


def write_history(store: ConversationStore) -> None:
    """Create the small history.

    tea has two turns. cup is a fork of tea after the first turn. pot has an interrupted and a cut turn.
    """
    for name in ("tea", "pot"):
        store.create_conversation(NewConversation(name, "f", [HEAD], prefix_id="bot"))
    say(store, "tea", "r1", user("hi", 10), reply("hello", 20, 21))
    say(store, "tea", "r2", user("more" * 500, 30), reply("yes", 40, logprobs=b"packed" * 9))
    store.fork_conversation("tea", 1, "cup")
    say(store, "pot", "r1", user("a", 3), reply("b", 4))
    store.rewind_conversation("pot", 0)
    store.interrupt_turn(begin(store, "pot", "r2", "hi", 50))


def history(store: ConversationStore) -> Any:
    """Return everything visible, except times and turn states."""
    reader = store.reader()
    try:
        return [
            (
                c.conversation_id,
                c.revision,
                c.fingerprint,
                list(store.log(c.conversation_id)),
                [(m.content, m.revision) for m in store.messages(c.conversation_id)],
                [m.content for m in reader.with_pending(c.conversation_id)[1].messages],
            )
            for c in store.list_conversations().conversations
        ]
    finally:
        reader.close()


def begin_third_turn(store: ConversationStore) -> int:
    """Begin a third turn in tea. Return its id."""
    return begin(store, "tea", "r3", "third", 60, 61)


def open_copy(folder: Path, copy: str, driver: Any) -> ConversationStore:
    """Copy a closed store to a folder with this name, and open the copy."""
    target = folder.with_name(copy)
    shutil.copytree(folder, target)
    return ConversationStore.open(target, "test", driver=driver, compact_bytes_min=1)
