"""The settings of the backup that a daemon writes all the time."""

from __future__ import annotations

from pensieve.config.parsing import file, number
from pensieve.config.setting import Setting, Table

BACKUP_SECONDS = 60.0
BACKUP_KEEP_DAYS = 7.0

BACKING_UP: Table = (
    Setting(
        "backup",
        file,
        "",
        "back the history up into this folder all the time (see `pensieve restore`)",
        "DIR",
        "history",
    ),
    Setting(
        "backup_seconds",
        number(0.1, 86_400),
        f"{BACKUP_SECONDS:g}",
        "time between what is written there, and so the most that a lost disk takes with it",
        "SECONDS",
        "history",
    ),
    Setting(
        "backup_keep",
        number(0, 36_500),
        f"{BACKUP_KEEP_DAYS:g}",
        "how long any moment can be restored; deleted text lies there a day longer (0: for ever)",
        "DAYS",
        "history",
    ),
)
