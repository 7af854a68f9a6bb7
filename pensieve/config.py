"""Settings: one table from which flags, environment variables, the file and their help are made.

A value comes from the first of: the command line, PENSIEVE_<NAME>, the TOML file, the default.
`resolve` says for each where it came from.  Unknown keys in the file are errors.  The result is
frozen; what follows from it and from the model (how many pages fit) is computed where it is used.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from pensieve.errors import ConfigError

UNITS = {
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}


class TierSize(NamedTuple):
    """The size of a tier: bytes, tokens, or a share of the memory that is available."""

    amount: float
    unit: str  # "bytes", "tokens", "share"

    def pages(self, page_bytes: int, chunk_tokens: int, available_bytes: int) -> int:
        if self.unit == "tokens":
            return -(-int(self.amount) // chunk_tokens)
        total = self.amount * available_bytes if self.unit == "share" else self.amount
        return int(total) // page_bytes

    def __str__(self) -> str:
        if self.unit == "tokens":
            return f"{int(self.amount)}t"
        if self.unit == "share":
            return f"{self.amount * 100:g}%"
        return f"{self.amount / 2**20:g}MiB"


def parse_tier_size(text: str) -> TierSize:
    """`6GiB`, `512MiB`, `20000t` (tokens) or `60%` (of the memory available)."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z%]+)\s*", text)
    if match is not None:
        amount, unit = float(match[1]), match[2]
        if unit == "t":
            return TierSize(amount, "tokens")
        if unit == "%" and amount <= 95:
            return TierSize(amount / 100, "share")
        if unit.upper() in UNITS:
            return TierSize(amount * UNITS[unit.upper()], "bytes")
    raise ValueError("is a size such as 6GiB, 512MiB, 20000t (tokens) or 60% (at most 95%)")


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"is one of {', '.join(allowed)}")
        return text

    return parse


def _whole(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"-?[0-9]+", text) or not low <= int(text) <= high:
            raise ValueError(f"is a whole number in {low}..{high}")
        return int(text)

    return parse


def _folder(text: str) -> Path:
    return Path(text).expanduser()


class Setting(NamedTuple):
    name: str
    parse: Callable[[str], Any]
    default: str  # as it would be written; "" for none
    help: str
    metavar: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "PENSIEVE_" + self.name.upper()


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "model", str, "", "a folder or a hub id (default: the small model that ships)", "MODEL"
    ),
    Setting("device", _choice("auto", "cpu"), "auto", "where to compute", "auto|cpu"),
    Setting(
        "dtype",
        _choice("auto", "float32", "bfloat16", "float16"),
        "auto",
        "type of weights and KV (auto: the checkpoint's)",
        "TYPE",
    ),
    Setting("device_cache", parse_tier_size, "25%", "size of the device tier", "SIZE"),
    Setting("host_cache", parse_tier_size, "25%", "size of the host tier", "SIZE"),
    Setting("policy", _choice("value", "lru"), "value", "what is evicted first", "value|lru"),
    Setting("chunk_tokens", _whole(1, 1024), "32", "tokens of a chunk", "N"),
    Setting("token_budget", _whole(1, 1 << 20), "512", "tokens of one iteration", "N"),
    Setting("turns_max", _whole(1, 1 << 16), "64", "turns computed at once", "N"),
    Setting("threads", _whole(0, 1024), "0", "threads that compute (0: torch's choice)", "N"),
    Setting("data", _folder, "", "folder of the history (default: the user's data folder)", "DIR"),
    Setting("journal", _folder, "", "append a journal of all iterations to this file", "FILE"),
)


@dataclass(frozen=True)
class Settings:
    """What `chat` (and later `serve`) needs to know, each value parsed and checked."""

    model: str
    device: str
    dtype: str
    device_cache: TierSize
    host_cache: TierSize
    policy: str
    chunk_tokens: int
    token_budget: int
    turns_max: int
    threads: int
    data: Path
    journal: Path | None


class Resolved(NamedTuple):
    settings: Settings
    sources: dict[str, str]  # by name: "flag", "PENSIEVE_…", the file, or "default"
    written: dict[str, str]  # by name, as it was written; what is not given is missing


def resolve(
    flags: Mapping[str, str | None], environ: Mapping[str, str], file: Path | None = None
) -> Resolved:
    written = _read(file) if file is not None else {}
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    taken: dict[str, str] = {}
    for setting in SETTINGS:
        if (text := flags.get(setting.name)) is not None:
            source = "flag"
        elif setting.variable in environ:
            text, source = environ[setting.variable], setting.variable
        elif setting.name in written:
            text, source = written[setting.name], str(file)
        else:
            text, source = setting.default, "default"
        named = setting.flag if source in ("flag", "default") else f"{setting.name} ({source})"
        try:
            values[setting.name] = setting.parse(text) if text else None
        except ValueError as error:
            raise ConfigError(f"{named} {error}, not {text!r}") from None
        sources[setting.name] = source
        if text:
            taken[setting.name] = text
    values["model"] = values["model"] or ""
    values["data"] = values["data"] or default_data_folder(environ)
    assert set(values) == {field.name for field in fields(Settings)}
    return Resolved(Settings(**values), sources, taken)


def print_settings(resolved: Resolved) -> None:
    """Each setting, its value, and where it comes from."""
    for setting in SETTINGS:
        value = getattr(resolved.settings, setting.name)
        shown = "" if value is None else value
        print(f"{setting.name} = {shown}  # {resolved.sources[setting.name]}")


def _read(file: Path) -> dict[str, str]:
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from error
    known = {setting.name for setting in SETTINGS}
    for name, value in table.items():
        if name not in known:
            raise ConfigError(f"{file}: there is no setting {name!r}")
        if not isinstance(value, str | int):
            raise ConfigError(f"{file}: {name} is a string or a whole number")
    return {name: str(value) for name, value in table.items()}


def default_data_folder(environ: Mapping[str, str]) -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "pensieve"
    home = environ.get("XDG_DATA_HOME")
    return (Path(home) if home else Path.home() / ".local" / "share") / "pensieve"


def available_memory_bytes() -> int:
    """Memory that can be taken without swapping, within the control group's limit."""
    try:
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except (OSError, ValueError):
        available = 4 * 2**30
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text().strip()
        if limit.isdigit():
            available = min(available, max(int(limit) - int(used), 0))
    except (OSError, ValueError):
        return available
    return available
