"""The history in a PostgreSQL database, in the place of SQLite in the data folder (extra `postgres`)."""
