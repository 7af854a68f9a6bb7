"""`pensieve backup` and `pensieve restore`: copy a history into a folder, and back.

`backup` may run while daemons write to the history. It checks the copy. `restore` locks the data folder, so
no daemon may use that folder."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pensieve.cli.flags import add_settings, with_settings
from pensieve.config import Resolved, settings_named
from pensieve.errors import BackupDamaged, ConfigError, InvalidArgument


def add_parser(commands: Any) -> None:
    backup = commands.add_parser(
        "backup",
        help="copy a history into a folder, also while a daemon serves it",
        description="Copy the whole history into a folder, and check the copy. A daemon may run meanwhile. "
        "`pensieve serve --backup` keeps a backup up to date.",
    )
    backup.add_argument(
        "folder", type=Path, metavar="FOLDER", help="folder of the backup; made if missing"
    )
    backup.add_argument("--json", action="store_true", help="print JSON")
    add_settings(backup, settings_named("data", "store"))
    backup.set_defaults(run=with_settings(back_up))
    restore_parser = commands.add_parser(
        "restore",
        help="restore a moment of a history from a backup",
        description="Restore a backup into --data. Without --at, the latest moment is restored. With --at, "
        "the last moment up to that time. The history is checked before it is put in place.",
    )
    restore_parser.add_argument("folder", type=Path, metavar="FOLDER", help="the backup")
    restore_parser.add_argument(
        "--list", action="store_true", help="only list the moments that the backup has"
    )
    restore_parser.add_argument(
        "--at",
        metavar="TIME",
        help="a time such as 2026-11-22T03:18 (UTC), or 2026-11-22T03:18+01:00",
    )
    restore_parser.add_argument(
        "--last-good",
        action="store_true",
        help="if a file of the backup is damaged or missing, restore the last moment before the damage",
    )
    restore_parser.add_argument(
        "--replace", action="store_true", help="replace an existing history in --data"
    )
    restore_parser.add_argument("--json", action="store_true", help="print JSON")
    add_settings(restore_parser, settings_named("data"))
    restore_parser.set_defaults(run=with_settings(restore))


def back_up(arguments: argparse.Namespace, resolved: Resolved) -> int:
    from pensieve.store.backup import BASE_NAME, Backup, check_database
    from pensieve.store.folder import DATABASE_NAME
    from pensieve.store.shared_file import SQLITE_SCHEME, path_of

    folder, data, url = arguments.folder.absolute(), resolved.settings.data, resolved.settings.store
    if url and not url.startswith(SQLITE_SCHEME):
        raise ConfigError("--store: back PostgreSQL up with its own tools (docs/postgresql.md)")
    database = path_of(url) if url else data / DATABASE_NAME
    if not database.exists():
        raise ConfigError(f"there is no history {database}; see --data and --store")
    with closing(Backup(folder, database)) as backup:
        base = backup.write()
    path = folder / f"generation-{base.generation:06}"
    if problems := check_database(path / BASE_NAME):
        raise BackupDamaged(f"the history itself is damaged: {problems[0]}; the copy is in {path}")
    figures = {"generation": base.generation, "time": base.time, "bytes": base.num_bytes}
    words = (
        f"{path} has the history as of {_time_text(base.time)} ({base.num_bytes / 2**20:,.1f} MiB)"
    )
    print(json.dumps(figures) if arguments.json else f"{words}; the copy was checked")
    return 0


def restore(arguments: argparse.Namespace, resolved: Resolved) -> int:
    from pensieve.store import backup

    if arguments.list:
        return _print_moments(arguments)
    restored = backup.restore(
        arguments.folder,
        resolved.settings.data,
        None if arguments.at is None else _time(arguments.at),
        to_last_good=arguments.last_good,
        replace=arguments.replace,
        report=lambda line: print(line, file=sys.stderr),
    )
    if arguments.json:
        print(json.dumps(vars(restored)))
        return 0
    print(
        f"restored {restored.conversations:,} conversations with {restored.messages:,} messages as of "
        f"{_time_text(restored.time)} (generation {restored.generation}, segment {restored.segment}) "
        f"to {resolved.settings.data}"
    )
    if restored.damage:
        print(f"later moments are damaged or missing: {restored.damage}")
    return 0


def _print_moments(arguments: argparse.Namespace) -> int:
    from pensieve.store.backup import points

    for each in points(arguments.folder):
        if arguments.json:
            print(json.dumps({**each._asdict(), "path": str(each.path)}))
            continue
        times = (
            f"{_time_text(each.times[0])} to {_time_text(each.times[-1])}"
            if each.times
            else "nothing"
        )
        print(
            f"generation {each.generation}: {times}, {len(each.times)} moments, "
            f"{each.num_bytes / 2**20:,.1f} MiB" + (f"; {each.damage}" if each.damage else "")
        )
    return 0


def _time(text: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidArgument(
            "--at", f"must be a time such as 2026-11-22T03:18, not {text!r}"
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _time_text(time: float) -> str:
    return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S} UTC"
