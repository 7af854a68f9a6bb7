"""A log of conversation owners. Database triggers, which a test adds to a history, write the rows.

    opened, closed    a session: the time in which a daemon has the history open
    claimed           a session owns a conversation from now on, in an epoch; `previous` owned it before
    begun, ended      a turn, with the session and the epoch of its conversation; `how` is its new state

The rows of a conversation are in the order of the commits. In PostgreSQL, two transactions that change one
conversation never overlap. In SQLite, no two writes overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from pensieve.store import ConversationStore
from pensieve.store.connection import preferred_driver
from pensieve.store.conversation_rows import conversation_key
from pensieve.store.postgres.schema import SCHEMA

SQLITE = "sqlite://"
COLUMNS = {
    "event": "TEXT",
    "session": "BIGINT",
    "replica": "TEXT",
    "key": "BYTEA",
    "epoch": "BIGINT",
    "previous": "BIGINT",
    "turn_id": "BIGINT",
    "how": "TEXT",
}
NAMES = ", ".join(COLUMNS)
TURN_EVENT = """
    SELECT '{event}', o.session, NULL, c.key, o.epoch, NULL, new.turn_id, new.state
    FROM owners o JOIN conversations c USING (conversation) WHERE o.conversation = new.conversation
"""
CLAIMED = """
    SELECT 'claimed', new.session, NULL, key, new.epoch, {previous}, NULL, NULL
    FROM conversations WHERE conversation = new.conversation
"""
SESSION = "VALUES ('{event}', {row}.session, {row}.replica, NULL, NULL, NULL, NULL, NULL)"
ROW = "FOR EACH ROW"
TRIGGERS = {
    f"INSERT ON sessions {ROW}": SESSION.format(event="opened", row="new"),
    f"DELETE ON sessions {ROW}": SESSION.format(event="closed", row="old"),
    f"INSERT ON owners {ROW}": CLAIMED.format(previous="0"),
    f"UPDATE ON owners {ROW} WHEN (old.epoch <> new.epoch OR old.session <> new.session)": (
        CLAIMED.format(previous="old.session")
    ),
    f"INSERT ON turns {ROW} WHEN (new.state = 'running')": TURN_EVENT.format(event="begun"),
    f"UPDATE ON turns {ROW} WHEN (old.state <> 'running' AND new.state = 'running')": (
        TURN_EVENT.format(event="begun")
    ),
    f"UPDATE ON turns {ROW} WHEN (old.state = 'running' AND new.state <> 'running')": (
        TURN_EVENT.format(event="ended")
    ),
}


def create_history(store: str, maker: Path) -> None:
    """Create a history at the URL, with triggers for the log. `maker` is a new folder."""
    ConversationStore.open(maker, "a test", url=store, replica="maker").close()
    is_sqlite = store.startswith(SQLITE)
    number = (
        "number INTEGER PRIMARY KEY AUTOINCREMENT"
        if is_sqlite
        else "number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY"
    )
    columns = NAMES if is_sqlite else ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
    with _open_executor(store) as execute:
        execute(f"CREATE TABLE owner_log ({number}, {columns})")
        for place, (when, row) in enumerate(TRIGGERS.items()):
            name, insert = f"owner_log_{place}", f"INSERT INTO owner_log ({NAMES}) {row};"
            action = f"BEGIN {insert} END"
            if not is_sqlite:
                execute(
                    f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql"
                    f" AS $$ BEGIN {insert} RETURN NULL; END $$"
                )
                action = f"EXECUTE FUNCTION {name}()"
            execute(f"CREATE TRIGGER {name} AFTER {when} {action}")


def events(store: str, event: str = "", **wanted: Any) -> list[dict[str, Any]]:
    """Return the logged events of this kind that have these values. `conversation_id` stands for `key`."""
    if (name := wanted.pop("conversation_id", None)) is not None:
        wanted["key"] = conversation_key(name, "")
    if event:
        wanted["event"] = event
    return [each for each in _all(store) if wanted.items() <= each.items()]


def _all(store: str) -> Iterator[dict[str, Any]]:
    with _open_executor(store) as execute:
        for row in execute(f"SELECT {NAMES} FROM owner_log ORDER BY number").fetchall():
            yield {
                name: value for name, value in zip(COLUMNS, row, strict=True) if value is not None
            }


@contextmanager
def _open_executor(store: str) -> Iterator[Callable[[str], Any]]:
    """Yield a function that executes a statement."""
    if store.startswith(SQLITE):
        path = store.removeprefix(SQLITE)
        with closing(preferred_driver.connect(path, timeout=60, isolation_level=None)) as conn:
            yield conn.execute
        return
    import psycopg

    with psycopg.connect(store, autocommit=True, options=f"-c search_path={SCHEMA}") as conn:
        yield conn.execute
