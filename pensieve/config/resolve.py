"""Resolve settings from flags, environment and file, and record the source of each value."""

from __future__ import annotations

import difflib
import json
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pensieve.config.settings import (
    ALL,
    DATA_FOLDER,
    ENGINE,
    ENGINE_SETTINGS,
    INTERNAL,
    REMOVED_SETTINGS,
    Settings,
    Table,
    settings_for,
)
from pensieve.errors import ConfigError


@dataclass(frozen=True)
class Resolved:
    table: Table
    settings: Settings
    sources: dict[str, str]  # by setting: "flag", "PENSIEVE_…", the file's path, or "default"
    written: dict[str, str]  # the engine's settings as texts, without secrets and empty values
    texts: dict[str, str]  # all settings as texts; "" for no value


def resolve(
    flags: Mapping[str, str | None],
    environ: Mapping[str, str],
    file: Path | None = None,
    table: Table = ENGINE_SETTINGS,
) -> Resolved:
    """Resolve the settings of `table` and the internal settings.

    Raises ConfigError, which names the invalid setting or file.
    """
    in_file = _read(file) if file is not None else {}
    internal = {each.name for each in settings_for(INTERNAL)}
    for name in REMOVED_SETTINGS.keys() - internal:
        if (variable := f"PENSIEVE_{name.upper()}") in environ:
            raise removed_setting_error(variable, name)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    written: dict[str, str] = {}
    texts: dict[str, str] = {}
    for setting in (*table, *settings_for(INTERNAL)):
        if (text := flags.get(setting.name)) is not None:
            source = "flag"
        elif setting.variable in environ:
            text, source = environ[setting.variable], setting.variable
        elif setting.name in in_file:
            text, source = in_file[setting.name], str(file)
        else:
            text = ""
        if not text:  # an empty text counts as not given, because containers set empty variables
            text, source = setting.default, "default"
        subject = setting.flag if source in ("flag", "default") else f"{setting.name} ({source})"
        try:
            values[setting.name] = setting.parse(text) if text else None
        except ValueError as error:
            value_text = "" if setting.secret else f", not {text!r}"
            raise ConfigError(f"{subject} {error}{value_text}") from None
        sources[setting.name], texts[setting.name] = source, text
        if text and not setting.secret and {ENGINE, INTERNAL} & set(setting.used_by):
            written[setting.name] = text
    for name, default in (("model", ""), ("data", default_data_folder(environ))):
        if name in values:
            values[name] = values[name] or default
    return Resolved(table, Settings(**values), sources, written, texts)


def removed_setting_error(given: str, name: str) -> ConfigError:
    """Return the error for a setting of an earlier version."""
    return ConfigError(f"{given} was removed: {REMOVED_SETTINGS[name]}")


def print_settings(resolved: Resolved) -> None:
    """Print each setting and its source, as TOML that --config reads, without secrets."""
    for setting in resolved.table:
        name, value = setting.name, getattr(resolved.settings, setting.name)
        if value is None or value == "":
            line = f"# {name} is not set"
        elif setting.secret:
            line = f"# {name} is set and not shown"
        elif isinstance(value, bool):
            line = f"{name} = {str(value).lower()}"
        else:
            line = f"{name} = {_as_toml(resolved.texts[name] or str(value))}"
        print(f"{line}  # {' '.join(resolved.sources[name].split())}")


def _as_toml(text: str) -> str:
    """Write a text as a TOML number if the number reads back unchanged, otherwise as a TOML string."""
    if re.fullmatch(r"0|[1-9][0-9]{0,17}", text):
        return text
    if re.fullmatch(r"[0-9]+\.[0-9]+", text) and str(float(text)) == text:
        return text
    # TOML has the escapes of JSON, but does not allow a bare DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _read(file: Path) -> dict[str, str]:
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config: cannot read {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from error
    known = {each.name for each in ALL if INTERNAL not in each.used_by}
    for name, value in table.items():
        if name in REMOVED_SETTINGS:
            raise removed_setting_error(f"{file}: {name}", name)
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            perhaps = f". Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{file}: unknown setting {name!r}{perhaps}")
        if not isinstance(value, str | int | float):
            raise ConfigError(f"{file}: {name} must be a string, a number, true or false")
    return {name: str(value) for name, value in table.items()}


def default_data_folder(environ: Mapping[str, str]) -> Path:
    """Return DATA_FOLDER, or the folder `pensieve` in XDG_DATA_HOME."""
    home = environ.get("XDG_DATA_HOME")
    folder = Path(DATA_FOLDER).expanduser()
    return Path(home) / folder.name if home and sys.platform != "darwin" else folder
