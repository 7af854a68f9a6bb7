"""Statements that change a database back to an older schema, to test migrations."""

from __future__ import annotations

UNDO = {  # by step, in SQLite and PostgreSQL
    12: ("DROP TABLE salts",),
    11: ("DROP TABLE job_owners",),
    10: (
        "DROP TABLE housekeeping",
        *(
            f"ALTER TABLE sessions DROP COLUMN {name}"
            for name in ("folder", "lease_until", "is_draining")
        ),
        "ALTER TABLE sessions ADD COLUMN last_call INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE sessions ADD COLUMN ended_at REAL",
        "CREATE INDEX owners_session ON owners (session)",
    ),
    9: (
        "DROP INDEX turns_idempotency_key",
        "ALTER TABLE turns DROP COLUMN idempotency_key",
    ),
}


def _undo_to(version: int) -> tuple[str, ...]:
    """Return the statements that undo all steps after `version`, the newest first."""
    return tuple(
        each for step in sorted(UNDO, reverse=True) if step > version for each in UNDO[step]
    )


def _record(version: int) -> tuple[str, str]:
    return (
        f"DELETE FROM _sqlite_migrations WHERE name > 'm{version + 1:03}'",
        f"PRAGMA user_version = {version}",
    )


_UNDO_TO_3 = (
    *_undo_to(8),
    *(
        f"DROP TABLE {table}"
        for table in ("owners", "sessions", "epochs", "responses", "chains", "prefixes")
    ),
    "DROP INDEX turns_logprobs",
    "ALTER TABLE turns DROP COLUMN logprobs",
)
TO_SCHEMA_11 = (*_undo_to(11), *_record(11))
TO_SCHEMA_9 = (*_undo_to(9), *_record(9))
TO_SCHEMA_8 = (*_undo_to(8), *_record(8))
TO_SCHEMA_3 = (*_UNDO_TO_3, *_record(3))
TO_SCHEMA_1 = (
    *_UNDO_TO_3,
    "DROP TABLE tenants",
    *(f"DROP INDEX {table}_body" for table in ("conversations", "turns", "messages")),
    *_record(1),
)
POSTGRES_TO_SCHEMA_11 = (
    *_undo_to(11),
    "DELETE FROM schema_versions WHERE version > 11",
)
POSTGRES_TO_SCHEMA_9 = (
    *_undo_to(9),
    "DROP SEQUENCE epoch_numbers",
    "DROP VIEW tenants",
    "CREATE TABLE tenants (tenant TEXT PRIMARY KEY, stored_bytes BIGINT NOT NULL)",
    "INSERT INTO tenants SELECT tenant, sum(stored_bytes) FROM tenant_bytes GROUP BY tenant",
    "DROP TABLE tenant_bytes",
    "DELETE FROM schema_versions WHERE version > 9",
)
POSTGRES_TO_SCHEMA_8 = (
    *POSTGRES_TO_SCHEMA_9,
    *UNDO[9],
    "DELETE FROM schema_versions WHERE version > 8",
)
