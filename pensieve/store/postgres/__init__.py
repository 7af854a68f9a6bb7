"""A history in a PostgreSQL database instead of SQLite (extra `postgres`)."""
