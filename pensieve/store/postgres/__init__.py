"""Store the history in PostgreSQL instead of SQLite (needs the extra `postgres`)."""
