"""The settings of `pensieve history`."""

from __future__ import annotations

from pensieve.config.backing_up import BACKING_UP
from pensieve.config.setting import Table
from pensieve.config.sharing import HISTORY_SERVICE
from pensieve.config.tables import DATA, SERVING, STORE

# Of those of a daemon, what the history alone needs (`pensieve history`).
HISTORY: Table = (
    *HISTORY_SERVICE,
    *(
        each
        for each in SERVING
        if each in BACKING_UP
        or each.name
        in {"ready_file", "tls_cert", "tls_key", "insecure", "history_secret", "log_format"}
    ),
    DATA,
    STORE,
)
