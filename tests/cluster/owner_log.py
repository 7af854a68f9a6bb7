"""Who had which conversation: rows that triggers write, which a test adds to a SQLite file.

    opened, closed    a session: a daemon has the history open
    claimed           a conversation is a session's from here on, in an epoch; `previous` had it before
    begun, ended      a turn, with the session and the epoch of its conversation; `how` is its new state

The rows are in the order of the commits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from pensieve.store import ConversationStore
from pensieve.store.connection import preferred_driver
from pensieve.store.conversation_rows import conversation_key

COLUMNS = ("event", "session", "replica", "key", "epoch", "previous", "turn_id", "how")
WHOSE = """
    SELECT '{event}', o.session, NULL, c.key, o.epoch, NULL, new.turn_id, new.state
    FROM owners o JOIN conversations c USING (conversation) WHERE o.conversation = new.conversation
"""
CLAIMED = """
    SELECT 'claimed', new.session, NULL, key, new.epoch, {previous}, NULL, NULL
    FROM conversations WHERE conversation = new.conversation
"""
SESSION = "VALUES ('{event}', {row}.session, {row}.replica, NULL, NULL, NULL, NULL, NULL)"
TRIGGERS = {
    "INSERT ON sessions": SESSION.format(event="opened", row="new"),
    "DELETE ON sessions": SESSION.format(event="closed", row="old"),
    "INSERT ON owners": CLAIMED.format(previous="0"),
    "UPDATE ON owners WHEN old.epoch <> new.epoch OR old.session <> new.session": CLAIMED.format(
        previous="old.session"
    ),
    "INSERT ON turns WHEN new.state = 'running'": WHOSE.format(event="begun"),
    "UPDATE ON turns WHEN old.state <> 'running' AND new.state = 'running'": WHOSE.format(
        event="begun"
    ),
    "UPDATE ON turns WHEN old.state = 'running' AND new.state <> 'running'": WHOSE.format(
        event="ended"
    ),
}


def keep(database: Path) -> None:
    """Create a history in the file, and have it keep the log from now on."""
    url, folder = f"sqlite://{database}", database.with_name(f"{database.name}.maker")
    ConversationStore.open(folder, "a test", url=url, replica="maker").close()
    columns = ", ".join(COLUMNS)
    with closing(preferred_driver.connect(str(database), isolation_level=None)) as conn:
        conn.execute(
            f"CREATE TABLE owner_log (number INTEGER PRIMARY KEY AUTOINCREMENT, {columns})"
        )
        for number, (when, row) in enumerate(TRIGGERS.items()):
            conn.execute(
                f"CREATE TRIGGER owner_log_{number} AFTER {when} BEGIN"
                f" INSERT INTO owner_log ({columns}) {row}; END"
            )


def events(database: Path, event: str = "", **wanted: Any) -> list[dict[str, Any]]:
    """Those so far, of a kind and with such values; `conversation_id` stands for its key."""
    if (name := wanted.pop("conversation_id", None)) is not None:
        wanted["key"] = conversation_key(name, "")
    if event:
        wanted["event"] = event
    return [each for each in _all(database) if wanted.items() <= each.items()]


def _all(database: Path) -> Iterator[dict[str, Any]]:
    with closing(preferred_driver.connect(str(database), timeout=60)) as conn:
        rows = conn.execute(f"SELECT {', '.join(COLUMNS)} FROM owner_log ORDER BY number")
        for row in rows.fetchall():
            yield {
                name: value for name, value in zip(COLUMNS, row, strict=True) if value is not None
            }
