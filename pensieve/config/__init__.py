"""All settings of the program.

A value comes from the first of: the command line, PENSIEVE_<NAME>, the TOML file, the default.
`resolve` records for each where it came from.  A command uses the tables that concern it.  All commands may
use one file, so it may have keys of every table; any other key is an error.  The result is frozen; what
follows from it and from the model (how many pages fit) is computed where it is used.
"""

from pensieve.config.backing_up import BACKUP_KEEP_DAYS, BACKUP_SECONDS
from pensieve.config.history_service import HISTORY
from pensieve.config.machine import available_memory_bytes
from pensieve.config.parsing import TierSize, shown_store
from pensieve.config.ranks import RANKING
from pensieve.config.resolve import (
    Resolved,
    Serving,
    Settings,
    default_data_folder,
    print_settings,
    removed,
    resolve,
)
from pensieve.config.secrets import without_secrets
from pensieve.config.setting import Setting, Table
from pensieve.config.tables import (
    DATA,
    ENGINE,
    GRACE_SECONDS,
    GROUPS,
    REMOVED,
    SERVING,
    SETTINGS,
    STORE,
    TABLES,
    TURNS_WAITING_MAX,
)
from pensieve.config.talking import LOOKING, REACHING, TALKING

__all__ = [
    "BACKUP_KEEP_DAYS",
    "BACKUP_SECONDS",
    "DATA",
    "ENGINE",
    "GRACE_SECONDS",
    "GROUPS",
    "HISTORY",
    "ITERATION_SECONDS_MAX",
    "LOOKING",
    "RANKING",
    "REACHING",
    "REMOVED",
    "SERVING",
    "SETTINGS",
    "STORE",
    "TABLES",
    "TALKING",
    "TURNS_WAITING_MAX",
    "Resolved",
    "Serving",
    "Setting",
    "Settings",
    "Table",
    "TierSize",
    "available_memory_bytes",
    "default_data_folder",
    "print_settings",
    "removed",
    "resolve",
    "shown_store",
    "without_secrets",
]
