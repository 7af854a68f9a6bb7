"""`pensieve copy`: copy a history from the data folder to a shared database, or back."""

from __future__ import annotations

import argparse
import json
from typing import Any

from pensieve.cli.flags import add_settings, with_settings
from pensieve.config import Resolved, settings_named
from pensieve.errors import ConfigError


def add_parser(commands: Any) -> None:
    copy_parser = commands.add_parser(
        "copy",
        help="copy a history from the data folder to a database for several daemons, or back",
        description="Copy the history in --data to the empty database at --store (PostgreSQL, or an SQLite "
        "file). With --back, copy from --store to --data. First stop the daemons that use either of them. "
        "The copy is checked, and the original stays.",
    )
    copy_parser.add_argument("--back", action="store_true", help="copy from --store to --data")
    copy_parser.add_argument("--json", action="store_true", help="print JSON")
    add_settings(copy_parser, settings_named("data", "store"))
    copy_parser.set_defaults(run=with_settings(copy))


def copy(arguments: argparse.Namespace, resolved: Resolved) -> int:
    from pensieve.store.copying import copy_history, opened
    from pensieve.store.folder import DATABASE_NAME
    from pensieve.store.shared_file import SQLITE_SCHEME, path_of

    data, url = resolved.settings.data, resolved.settings.store
    if not url:
        raise ConfigError(
            "pensieve copy needs --store, the other database: postgresql://USER@HOST/NAME or sqlite:///FILE"
        )
    file = path_of(url) if url.startswith(SQLITE_SCHEME) else None
    if arguments.back and file is not None and not file.exists():
        raise ConfigError(f"--store: there is no file {file}")
    if not arguments.back and not (data / DATABASE_NAME).exists():
        raise ConfigError(f"--data: the folder {data} has no history")
    with opened(data, "", "pensieve copy") as here, opened(data, url, "pensieve copy") as there:
        copied = copy_history(*((there, here) if arguments.back else (here, there)))
    target = data if arguments.back else file or "PostgreSQL"
    words = f"copied {copied.conversations:,} conversations with {copied.messages:,} messages to {target}"
    print(json.dumps(copied._asdict()) if arguments.json else f"{words}, and checked the copy")
    return 0
