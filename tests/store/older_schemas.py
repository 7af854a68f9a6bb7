"""Statements that change a database back to an older schema, to test migrations. Run the newest first."""

from __future__ import annotations

FROM_SCHEMA_11 = ("DROP TABLE job_owners",)
FROM_SCHEMA_10 = (
    "DROP TABLE housekeeping",
    *(
        f"ALTER TABLE sessions DROP COLUMN {name}"
        for name in ("folder", "lease_until", "is_draining")
    ),
    "ALTER TABLE sessions ADD COLUMN last_call INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE sessions ADD COLUMN ended_at REAL",
    "CREATE INDEX owners_session ON owners (session)",
)
FROM_SCHEMA_9 = (
    "DROP INDEX turns_idempotency_key",
    "ALTER TABLE turns DROP COLUMN idempotency_key",
)
TABLES_SINCE_SCHEMA_3 = tuple(
    f"DROP TABLE {table}"
    for table in ("owners", "sessions", "epochs", "responses", "chains", "prefixes")
)
TO_SCHEMA_9 = (
    *FROM_SCHEMA_11,
    *FROM_SCHEMA_10,
    "DELETE FROM _sqlite_migrations WHERE name > 'm010'",
    "PRAGMA user_version = 9",
)
TO_SCHEMA_8 = (
    *FROM_SCHEMA_11,
    *FROM_SCHEMA_10,
    *FROM_SCHEMA_9,
    "DELETE FROM _sqlite_migrations WHERE name > 'm009'",
    "PRAGMA user_version = 8",
)
TO_SCHEMA_3 = (
    *FROM_SCHEMA_11,
    *FROM_SCHEMA_10,
    *FROM_SCHEMA_9,
    *TABLES_SINCE_SCHEMA_3,
    "DROP INDEX turns_logprobs",
    "ALTER TABLE turns DROP COLUMN logprobs",
    "DELETE FROM _sqlite_migrations WHERE name > 'm004'",
    "PRAGMA user_version = 3",
)
POSTGRES_TO_SCHEMA_9 = (
    *FROM_SCHEMA_11,
    *FROM_SCHEMA_10,
    "DROP SEQUENCE epoch_numbers",
    "DROP VIEW tenants",
    "CREATE TABLE tenants (tenant TEXT PRIMARY KEY, stored_bytes BIGINT NOT NULL)",
    "INSERT INTO tenants SELECT tenant, sum(stored_bytes) FROM tenant_bytes GROUP BY tenant",
    "DROP TABLE tenant_bytes",
    "DELETE FROM schema_versions WHERE version > 9",
)
POSTGRES_TO_SCHEMA_8 = (
    *POSTGRES_TO_SCHEMA_9,
    *FROM_SCHEMA_9,
    "DELETE FROM schema_versions WHERE version > 8",
)
