"""The SQLite schema, as a list of migrations.

Each migration runs in one transaction, which also records that the migration ran and sets `user_version` to
its number. An existing database is first copied to a file in the same folder. The next deletion
removes this copy, because deleted text must not remain in it. A database of a newer Pensieve is refused. The
tables:

    conversations   one row per conversation; `key` is a digest of (tenant, conversation_id)
    turns           one row per request; `request_key` is a digest of its request_id, unique within the
                    conversation; `idempotency_key` finds a request by its Idempotency-Key, in any
                    conversation
    messages        one row per message, shared by every conversation whose history holds it
    history         the messages of a conversation, in order: (position, message)
    bodies          the private part of conversations, turns and messages; logprobs of turns; responses
                    (bodies.py)
    space           one row: the bytes that wiped bodies waste
    tenants         the bytes that each tenant's conversations take (bodies.py)
    prefixes        which conversations are declared prefixes (declared_prefixes.py)
    chains          digests that find the stored history of a client's messages (chains.py)
    responses       turns that clients may fetch as responses (responses.py)
    sessions        daemons that have the history open (owners.py)
    owners          which session may write to a conversation, and since which epoch
    epochs          one row: the last number that a session or an epoch got; both use one sequence
    housekeeping    one row: the session of the housekeeper (housekeeper.py)
    job_owners      which daemon's data folder has a batch job (job_owners.py)
    salts           a random salt per tenant, so that tenants share no KV (salts.py)

A message exists while a row of `history` refers to it, or while the turn that made it exists (a turn may be
replayed). Both references are indexed, so a reference count, which could be wrong, is not needed. A fork
copies rows of `history`, but no texts or tokens. A rewind deletes rows of `history`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sqlite_utils import Migrations

from pensieve.errors import StoreCorrupt, StoreError, StoreTooNew, StoreUnavailable
from pensieve.store.bodies import STORED_BYTES_QUERY_BEFORE_LOGPROBS

APPLICATION_ID = 0x50656E73  # "Pens"
LAST_RESORT = "restore an older backup (`pensieve restore`)"
Steps = Mapping[str, Sequence[str]]  # the statements of each migration, in order

STEPS: Steps = {
    "m001_initial": (
        f"PRAGMA application_id = {APPLICATION_ID}",
        """
        CREATE TABLE bodies (
            body INTEGER PRIMARY KEY,
            crc INTEGER,
            private BLOB,
            tokens BLOB
        ) STRICT
        """,
        "CREATE TABLE space (wiped_bytes INTEGER NOT NULL) STRICT",
        "INSERT INTO space (wiped_bytes) VALUES (0)",
        """
        CREATE TABLE conversations (
            conversation INTEGER PRIMARY KEY,
            key BLOB NOT NULL UNIQUE,
            tenant TEXT NOT NULL,
            prefix_key BLOB,
            revision INTEGER NOT NULL,
            fingerprint TEXT NOT NULL,
            created_at REAL NOT NULL,
            updated_at REAL NOT NULL,
            body INTEGER NOT NULL
        ) STRICT
        """,
        "CREATE INDEX conversations_tenant ON conversations (tenant)",
        "CREATE INDEX conversations_prefix ON conversations (prefix_key)"
        " WHERE prefix_key IS NOT NULL",
        """
        CREATE TABLE turns (
            turn_id INTEGER PRIMARY KEY AUTOINCREMENT,
            conversation INTEGER NOT NULL REFERENCES conversations DEFERRABLE INITIALLY DEFERRED,
            request_key BLOB NOT NULL,
            state TEXT NOT NULL,
            attempts INTEGER NOT NULL,
            seed TEXT NOT NULL,
            finish_reason TEXT,
            failure TEXT,
            usage TEXT NOT NULL,
            revision INTEGER,
            created_at REAL NOT NULL,
            finished_at REAL,
            body INTEGER NOT NULL,
            UNIQUE (conversation, request_key)
        ) STRICT
        """,
        "CREATE UNIQUE INDEX turns_running ON turns (conversation) WHERE state = 'running'",
        """
        CREATE TABLE messages (
            message INTEGER PRIMARY KEY,
            turn_id INTEGER REFERENCES turns DEFERRABLE INITIALLY DEFERRED,
            role TEXT NOT NULL,
            finish_reason TEXT,
            num_tokens INTEGER NOT NULL,
            body INTEGER NOT NULL
        ) STRICT
        """,
        "CREATE INDEX messages_turn ON messages (turn_id)",
        """
        CREATE TABLE history (
            conversation INTEGER NOT NULL REFERENCES conversations DEFERRABLE INITIALLY DEFERRED,
            position INTEGER NOT NULL,
            message INTEGER NOT NULL REFERENCES messages DEFERRABLE INITIALLY DEFERRED,
            revision INTEGER NOT NULL,
            first_token INTEGER NOT NULL,
            PRIMARY KEY (conversation, position)
        ) STRICT, WITHOUT ROWID
        """,
        "CREATE UNIQUE INDEX history_message ON history (message, conversation)",
    ),
    "m002_holders_by_body": (
        # Compaction looks up the rows that refer to a body.
        *(
            f"CREATE INDEX {table}_body ON {table} (body)"
            for table in ("conversations", "turns", "messages")
        ),
    ),
    "m003_bytes_of_tenants": (
        # Limits per tenant need a counter.
        "CREATE TABLE tenants (tenant TEXT PRIMARY KEY, stored_bytes INTEGER NOT NULL)"
        " STRICT, WITHOUT ROWID",
        f"INSERT INTO tenants (tenant, stored_bytes) {STORED_BYTES_QUERY_BEFORE_LOGPROBS}",
    ),
    "m004_logprobs": (
        # Logprobs may take megabytes, and only a replay reads them.
        "ALTER TABLE turns ADD COLUMN logprobs INTEGER",
        "CREATE INDEX turns_logprobs ON turns (logprobs) WHERE logprobs IS NOT NULL",
    ),
    "m005_prefixes": (
        # No foreign key, because it would need another index. `verify` checks the reference instead.
        "CREATE TABLE prefixes (tenant TEXT NOT NULL, conversation INTEGER NOT NULL,"
        " keep_warm INTEGER NOT NULL, PRIMARY KEY (tenant, conversation)) STRICT, WITHOUT ROWID",
    ),
    "m006_chains": (
        # A row is deleted together with its message.
        """
        CREATE TABLE chains (
            chain INTEGER PRIMARY KEY,
            key BLOB NOT NULL,
            message INTEGER NOT NULL REFERENCES messages ON DELETE CASCADE,
            session BLOB NOT NULL,
            at REAL NOT NULL
        ) STRICT
        """,
        "CREATE INDEX chains_key ON chains (key, session)",
        "CREATE INDEX chains_message ON chains (message)",
    ),
    "m007_responses": (
        # Clients fetch a response and continue from it by the response's id.
        """
        CREATE TABLE responses (
            response INTEGER PRIMARY KEY,
            key BLOB NOT NULL UNIQUE,
            conversation INTEGER NOT NULL REFERENCES conversations DEFERRABLE INITIALLY DEFERRED,
            revision INTEGER,
            last_revision INTEGER NOT NULL,
            is_ours INTEGER NOT NULL,
            body INTEGER NOT NULL
        ) STRICT
        """,
        "CREATE INDEX responses_conversation ON responses (conversation)",
        "CREATE INDEX responses_body ON responses (body)",
    ),
    "m008_owners": (
        # Several daemons may share the history. Each conversation has one owner.
        """
        CREATE TABLE sessions (
            session INTEGER PRIMARY KEY,
            replica TEXT NOT NULL,
            address TEXT NOT NULL,
            http_address TEXT NOT NULL,
            metrics_address TEXT NOT NULL,
            last_call INTEGER NOT NULL,
            opened_at REAL NOT NULL,
            ended_at REAL
        ) STRICT
        """,
        """
        CREATE TABLE owners (
            conversation INTEGER PRIMARY KEY REFERENCES conversations ON DELETE CASCADE,
            session INTEGER NOT NULL,
            epoch INTEGER NOT NULL
        ) STRICT
        """,
        "CREATE INDEX owners_session ON owners (session)",
        "CREATE TABLE epochs (last INTEGER NOT NULL) STRICT",
        "INSERT INTO epochs (last) VALUES (0)",
    ),
    "m009_idempotency_keys": (
        # Until this migration, a request's idempotency key was a row of `chains` with the session "request".
        "ALTER TABLE turns ADD COLUMN idempotency_key BLOB",
        "UPDATE turns SET idempotency_key = c.key FROM chains c JOIN messages m USING (message)"
        " WHERE length(c.session) = 7 AND m.turn_id = turns.turn_id AND length(request_key) = 16",
        "DELETE FROM chains WHERE length(session) = 7",
        "CREATE INDEX turns_idempotency_key ON turns (idempotency_key)"
        " WHERE idempotency_key IS NOT NULL",
    ),
    "m010_leases": (
        # Daemons open the database directly; `folder` identifies a daemon's data folder.
        "ALTER TABLE sessions ADD COLUMN folder TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE sessions ADD COLUMN lease_until REAL",
        "ALTER TABLE sessions ADD COLUMN is_draining INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE sessions DROP COLUMN last_call",
        "ALTER TABLE sessions DROP COLUMN ended_at",
        "DROP INDEX owners_session",
        "CREATE TABLE housekeeping (session INTEGER NOT NULL, epoch INTEGER NOT NULL) STRICT",
        "INSERT INTO housekeeping (session, epoch) VALUES (0, 0)",
    ),
    "m011_job_owners": (
        # Any sharing daemon must find the daemon that has a job.
        "CREATE TABLE job_owners (key BLOB PRIMARY KEY, folder TEXT NOT NULL, replica TEXT NOT NULL,"
        " created_at REAL NOT NULL) STRICT, WITHOUT ROWID",
    ),
    "m012_salts": (
        # All daemons need the same salt for a tenant, also after a restart.
        "CREATE TABLE salts (tenant TEXT PRIMARY KEY, salt BLOB NOT NULL) STRICT, WITHOUT ROWID",
    ),
}


def migrate(
    db: Any,
    path: Path,
    steps: Steps = STEPS,
    application_id: int = APPLICATION_ID,
    last_resort: str = LAST_RESORT,
    is_alone: bool = True,
) -> bool:
    """Migrate the database at `path` to the newest schema. Return whether the schema has changed.

    Raises StoreError if that is not possible. `last_resort` tells the user what to do if the schema is newer
    than this version. `is_alone`: no other process has the database open.
    """
    migrations = Migrations("pensieve")
    for number, (name, statements) in enumerate(steps.items(), 1):
        migrations(name=name)(partial(_run, (*statements, f"PRAGMA user_version = {number}")))
    _refuse_foreign(db, path, application_id)
    (version,) = db.conn.execute("PRAGMA user_version").fetchone()
    applied = [migration.name for migration in migrations.applied(db)]
    unknown = set(applied) - steps.keys()
    if version > len(steps) or unknown:
        raise StoreTooNew(
            f"{path} has schema version {max(version, len(applied))}, but this Pensieve knows only"
            f" versions up to {len(steps)}. Open it with the newer Pensieve that wrote it, or"
            f" {_downgrade_advice(path, len(steps)) or last_resort}"
        )
    if version == len(steps):
        return False
    if not is_alone:
        raise StoreError(
            f"{path} has schema version {version}, this Pensieve needs version {len(steps)}, and"
            " daemons of an older Pensieve have it open. Stop all of them, then start this one"
        )
    if version:
        _back_up(db, path, version)
    migrations.apply(db)
    (reached,) = db.conn.execute("PRAGMA user_version").fetchone()
    if reached != len(steps):
        raise StoreCorrupt(
            f"{path} is damaged: it has schema version {version}, but records all"
            f" {len(steps)} migrations as done"
        )
    return True


def _run(statements: Sequence[str], db: Any) -> None:
    for statement in statements:
        db.conn.execute(statement)


def _refuse_foreign(db: Any, path: Path, our_id: int) -> None:
    (application_id,) = db.conn.execute("PRAGMA application_id").fetchone()
    names = {name for (name,) in db.conn.execute("SELECT name FROM sqlite_schema")}
    ours = application_id == our_id
    # After a crash before the first migration, the database has only the table of sqlite-utils.
    fresh = application_id == 0 and all(Migrations.migrations_table in name for name in names)
    if not ours and not fresh:
        raise StoreError(f"{path} is a database of another program, not of Pensieve")


def _downgrade_advice(path: Path, version: int) -> str:
    """Tell the user which copy, made before the migration, this version can open; empty if there is none."""
    for older in range(version, 0, -1):
        copy = path.with_name(f"{path.name}.version{older}")
        if copy.exists():
            return f"replace it by {copy.name}, the history before the upgrade (without later messages)"
    return ""


def _back_up(db: Any, path: Path, version: int) -> None:
    copy = path.with_name(f"{path.name}.version{version}")
    try:
        copy.unlink(missing_ok=True)
        db.conn.execute("VACUUM INTO ?", (str(copy),))
        copy.chmod(0o600)
    except Exception as error:
        raise StoreUnavailable(
            f"cannot copy {path} to {copy.name} before the schema changes: {error}. The database is"
            " unchanged"
        ) from error


def remove_copies(path: Path) -> None:
    """Remove the copies that migrations made of the database at `path`."""
    for copy in path.parent.glob(f"{path.name}.version*"):
        try:
            copy.unlink()
        except OSError as error:
            raise StoreUnavailable(
                f"cannot remove {copy.name}, which may contain the deleted text: {error.strerror}"
            ) from error
