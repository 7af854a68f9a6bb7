"""From what was written (flags, environment, file) to values, and where each of them came from."""

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

from pensieve.config.parsing import TierSize
from pensieve.config.setting import Table
from pensieve.config.tables import INTERNAL, REMOVED, SERVING, SETTINGS, TABLES
from pensieve.errors import ConfigError


@dataclass(frozen=True)
class Settings:
    """The settings of the engine and the history, parsed and checked."""

    model: str
    device: str
    dtype: str
    context_max: int | None
    chat_template: Path | None
    weights: str
    kv_dtype: str
    device_cache: TierSize
    host_cache: TierSize
    stream: str
    check_kv: bool | None
    policy: str
    cost: Path | None
    token_budget: int
    prompt_seconds: float
    tbt: float
    ttft: float
    share: int
    turns_max: int
    threads: int
    tensor_parallel: int
    pipeline_stages: int
    rank_address: str | None
    ranks_elsewhere: int
    rank_secret: Path | None
    rank_wait: float
    data: Path
    store: str | None  # with its password, if it has one
    journal: Path | None
    chunk_tokens: int
    staging_tokens: int


@dataclass(frozen=True)
class Serving:
    """The settings of `pensieve serve` alone."""

    address: str
    http: str | None
    http_hosts: tuple[str, ...] | None
    http_origins: tuple[str, ...] | None
    ready_file: Path | None
    token_file: Path | None
    audit_log: Path | None
    tls_cert: Path | None
    tls_key: Path | None
    tls_client_ca: Path | None
    insecure: bool | None
    reflection: bool | None
    replica: str | None
    metrics: str | None
    traces: bool | None
    turns_waiting_max: int
    grace: float
    drain_timeout: float
    announce: str | None
    history_secret: Path | None
    history_ca: Path | None
    backup: Path | None
    backup_seconds: float
    backup_keep: float
    engine: str
    tool_calls: str
    log_format: str


@dataclass(frozen=True)
class Resolved:
    tables: tuple[Table, ...]
    values: dict[str, Any]  # by name; None where there is none
    sources: dict[str, str]  # by name: "flag", "PENSIEVE_…", the file, or "default"
    written: dict[str, str]  # settings as they were written; without secrets and what is not given
    texts: dict[str, str]  # of every table, as they were written; "" where nothing was

    @property
    def settings(self) -> Settings:
        return Settings(**{each.name: self.values[each.name] for each in (*SETTINGS, *INTERNAL)})

    @property
    def serving(self) -> Serving:
        return Serving(**{each.name: self.values[each.name] for each in SERVING})


def resolve(
    flags: Mapping[str, str | None],
    environ: Mapping[str, str],
    file: Path | None = None,
    tables: tuple[Table, ...] = (SETTINGS,),
) -> Resolved:
    in_file = _read(file) if file is not None else {}
    for name in REMOVED:
        if (variable := f"PENSIEVE_{name.upper()}") in environ:
            raise removed(variable, name)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    written: dict[str, str] = {}
    texts: dict[str, str] = {}
    for setting in (each for table in (*tables, INTERNAL) for each in table):
        if (text := flags.get(setting.name)) is not None:
            source = "flag"
        elif setting not in INTERNAL and setting.variable in environ:
            text, source = environ[setting.variable], setting.variable
        elif setting.name in in_file:
            text, source = in_file[setting.name], str(file)
        else:
            text = ""
        if not text:  # also one that is given and empty, such as a variable in a container
            text, source = setting.default, "default"
        named = setting.flag if source in ("flag", "default") else f"{setting.name} ({source})"
        try:
            values[setting.name] = setting.parse(text) if text else None
        except ValueError as error:
            but = "" if setting.secret else f", not {text!r}"
            raise ConfigError(f"{named} {error}{but}") from None
        sources[setting.name], texts[setting.name] = source, text
        if text and setting in (*SETTINGS, *INTERNAL) and not setting.secret:
            written[setting.name] = text
    for name, default in (("model", ""), ("data", default_data_folder(environ))):
        if name in values:
            values[name] = values[name] or default
    return Resolved(tables, values, sources, written, texts)


def removed(given: str, name: str) -> ConfigError:
    """The error for a setting of an earlier version."""
    return ConfigError(f"{given} was removed: {REMOVED[name]}")


def print_settings(resolved: Resolved) -> None:
    """Print each setting and where it comes from, as TOML that --config reads; a secret is left out."""
    for setting in (each for table in resolved.tables for each in table):
        name, value = setting.name, resolved.values[setting.name]
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
    """A number where it reads back as the same text, else a string."""
    if re.fullmatch(r"0|[1-9][0-9]{0,17}", text):
        return text
    if re.fullmatch(r"[0-9]+\.[0-9]+", text) and str(float(text)) == text:
        return text
    # TOML has JSON's escapes, and allows no bare DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _read(file: Path) -> dict[str, str]:
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from error
    known = {setting.name for each in TABLES for setting in each}
    for name, value in table.items():
        if name in REMOVED:
            raise removed(f"{file}: {name}", name)
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            perhaps = f"; {near[0]!r} is one" if near else ""
            raise ConfigError(f"{file}: there is no setting {name!r}{perhaps}")
        if not isinstance(value, str | int | float):
            raise ConfigError(f"{file}: {name} is a string, a number, true or false")
    return {name: str(value) for name, value in table.items()}


def default_data_folder(environ: Mapping[str, str]) -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "pensieve"
    home = environ.get("XDG_DATA_HOME")
    return (Path(home) if home else Path.home() / ".local" / "share") / "pensieve"
