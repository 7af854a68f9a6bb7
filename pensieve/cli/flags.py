"""Flags of settings, and the settings that they, the environment and the file come to."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pensieve.config import (
    GROUPS,
    HISTORY,
    REMOVED,
    SETTINGS,
    Resolved,
    Table,
    print_settings,
    removed,
    resolve,
)

if TYPE_CHECKING:
    from pensieve.client.channel import Tls


def add_settings(command: argparse.ArgumentParser, *tables: Table) -> None:
    """A flag for each setting; what is not given stays None."""
    groups = {}
    for setting in (each for table in tables for each in table):
        default = f" (default: {setting.default})" if setting.default else ""
        text = (setting.help + default).replace("%", "%%") or None
        if setting.name == "model":
            command.add_argument("model", nargs="?", help=text)
            continue
        if setting.group not in groups:
            described = GROUPS.get(setting.group)
            groups[setting.group] = command.add_argument_group(setting.group, described)
        group = groups[setting.group]
        if setting.metavar:
            group.add_argument(setting.flag, dest=setting.name, metavar=setting.metavar, help=text)
        else:
            group.add_argument(
                setting.flag, dest=setting.name, action="store_const", const="true", help=text
            )
    if SETTINGS in tables or HISTORY in tables:
        for name in REMOVED:
            command.add_argument(
                "--" + name.replace("_", "-"),
                dest=name,
                nargs="?",
                const="",
                help=argparse.SUPPRESS,
            )
    group = groups.get("settings") or command.add_argument_group("settings", GROUPS["settings"])
    group.add_argument("--config", type=Path, metavar="FILE", help="read settings from this file")
    group.add_argument(
        "--print-config", action="store_true", help="print each setting and where it comes from"
    )
    command.set_defaults(tables=tables)


def tls_to(address: str, resolved: Resolved) -> Tls:
    """How the daemons at these addresses are reached; UNIX sockets have no TLS, whatever the network has."""
    names = [each.strip().removeprefix("grpc://") for each in address.split(",")]
    if all(name.startswith("unix:") for name in names):
        return False
    return resolved.values["tls_ca"] or bool(resolved.values["tls"])


def with_settings(
    act: Callable[[argparse.Namespace, Resolved], int],
) -> Callable[[argparse.Namespace], int]:
    """Run a command with its settings, or print them where --print-config is given."""

    def run(arguments: argparse.Namespace) -> int:
        tables: tuple[Table, ...] = arguments.tables
        for name in REMOVED:
            if getattr(arguments, name, None) is not None:
                raise removed("--" + name.replace("_", "-"), name)
        names = [setting.name for table in tables for setting in table]
        flags = {name: getattr(arguments, name) for name in names}
        resolved = resolve(flags, os.environ, arguments.config, tables)
        if arguments.print_config:
            print_settings(resolved)
            return 0
        return act(arguments, resolved)

    return run
