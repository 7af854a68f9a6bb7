"""All settings of the program.

A value comes from the first of these sources that has one: the command line, PENSIEVE_<NAME>, the TOML file,
the default. `resolve` records the source of each value. Each command uses only some settings. All commands
may share one file, so keys of other commands are allowed. Unknown keys are an error. The result is frozen.
Values that also depend on the model, such as the number of pages, are computed where they are used."""

from pensieve.config.machine import available_memory_bytes
from pensieve.config.resolve import (
    Resolved,
    default_data_folder,
    print_settings,
    removed_setting_error,
    resolve,
)
from pensieve.config.secret import read_secret, without_secrets
from pensieve.config.settings import (
    ENGINE,
    GROUPS,
    LOOK,
    RANK,
    REACH,
    REMOVED_SETTINGS,
    SERVE,
    TALK,
    Setting,
    Settings,
    Table,
    settings_for,
    settings_named,
)
from pensieve.config.values import MOVED_HISTORY, TierSize, shown_store

__all__ = [
    "ENGINE",
    "GROUPS",
    "LOOK",
    "MOVED_HISTORY",
    "RANK",
    "REACH",
    "REMOVED_SETTINGS",
    "SERVE",
    "TALK",
    "Resolved",
    "Setting",
    "Settings",
    "Table",
    "TierSize",
    "available_memory_bytes",
    "default_data_folder",
    "print_settings",
    "read_secret",
    "removed_setting_error",
    "resolve",
    "settings_for",
    "settings_named",
    "shown_store",
    "without_secrets",
]
