"""Add a flag for each setting to a command, and run the command with its settings."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pensieve.config import (
    ENGINE,
    GROUPS,
    REMOVED_SETTINGS,
    Resolved,
    Table,
    print_settings,
    removed_setting_error,
    resolve,
    settings_for,
)

if TYPE_CHECKING:
    from pensieve.client.channel import Tls

# Prefix of the argparse destination of a removed flag, because a command may have its own flag of that name.
REMOVED_FLAG = "removed_"


def add_settings(command: argparse.ArgumentParser, table: Table) -> None:
    """Add a flag for each setting. A flag that is not given is None.

    If a command has all settings of the engine, --help shows the common settings and --help-all shows all.
    """
    is_long = set(settings_for(ENGINE)) <= set(table)
    groups = {name: command.add_argument_group(name, GROUPS.get(name)) for name in _groups(table)}
    hidden: list[tuple[argparse.Action, str]] = []
    for setting in table:
        default = f" (default: {setting.default})" if setting.default else ""
        text = (setting.help + default).replace("%", "%%")
        shown = text if setting.common or not is_long else argparse.SUPPRESS
        if setting.name == "model":
            command.add_argument("model", nargs="?", metavar="MODEL", help=text)
            continue
        keywords: dict[str, Any] = {"action": "store_const", "const": "true"}
        if setting.metavar:
            keywords = {"metavar": setting.metavar}
        action = groups[setting.group].add_argument(
            setting.flag, dest=setting.name, help=shown, **keywords
        )
        if shown != text:
            hidden.append((action, text))
    if any(ENGINE in setting.used_by for setting in table):
        for name in REMOVED_SETTINGS:
            command.add_argument(
                "--" + name.replace("_", "-"),
                dest=REMOVED_FLAG + name,
                nargs="?",
                const="",
                help=argparse.SUPPRESS,
            )
    group = command.add_argument_group(
        "settings",
        "each flag above is also a variable, PENSIEVE_<NAME>, and a key in the --config file",
    )
    group.add_argument(
        "--config", type=Path, metavar="FILE", help="read settings from this TOML file"
    )
    group.add_argument(
        "--print-config", action="store_true", help="print each setting and where it comes from"
    )
    if hidden:
        positional = [each for each in command._actions if not each.option_strings]
        names = [each.metavar if each.nargs is None else f"[{each.metavar}]" for each in positional]
        command.usage = f"{command.prog} {' '.join(map(str, names))} [options]"
        group.add_argument(
            "--help-all",
            action=_HelpAll,
            hidden=hidden,
            help="print all settings, not only the common ones",
        )
    command.set_defaults(table=table)


def _groups(table: Table) -> list[str]:
    """Return the groups of flags, in the order of the help."""
    return list(dict.fromkeys(setting.group for setting in table if setting.group))


class _HelpAll(argparse.Action):
    """Print the help with all flags."""

    def __init__(self, *, hidden: list[tuple[argparse.Action, str]], **options: Any) -> None:
        super().__init__(nargs=0, default=argparse.SUPPRESS, **options)
        self._hidden = hidden

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        for action, text in self._hidden:
            action.help = text
        parser.print_help()
        parser.exit()


def tls_to(address: str, resolved: Resolved) -> Tls:
    """Return the TLS settings for these addresses. UNIX sockets have no TLS."""
    names = [each.strip().removeprefix("grpc://") for each in address.split(",")]
    if all(name.startswith("unix:") for name in names):
        return False
    return resolved.settings.tls_ca or bool(resolved.settings.tls)


def with_settings(
    act: Callable[[argparse.Namespace, Resolved], int],
) -> Callable[[argparse.Namespace], int]:
    """Return a function that resolves the settings and runs the command.

    With --print-config, the function prints the settings instead.
    """

    def run(arguments: argparse.Namespace) -> int:
        for name in REMOVED_SETTINGS:
            if getattr(arguments, REMOVED_FLAG + name, None) is not None:
                raise removed_setting_error("--" + name.replace("_", "-"), name)
        table: Table = arguments.table
        flags = {setting.name: getattr(arguments, setting.name) for setting in table}
        resolved = resolve(flags, os.environ, arguments.config, table)
        if arguments.print_config:
            print_settings(resolved)
            return 0
        return act(arguments, resolved)

    return run
