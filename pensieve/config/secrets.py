"""The environment of a process of ours that is to know no secret: the engine's.

It computes for whoever asks, from files that others made, and needs neither the history nor a token.  So it
gets no variable of a setting that is secret, and none by which PostgreSQL's library finds a password.
"""

from __future__ import annotations

from collections.abc import Mapping

from pensieve.config.tables import TABLES

OF_LIBPQ = ("PGPASSWORD", "PGPASSFILE", "PGSERVICEFILE", "PGSSLKEY")
SECRETS = frozenset(
    {*OF_LIBPQ, *(each.variable for table in TABLES for each in table if each.secret)}
)


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in SECRETS}
