"""All settings, as tables from which flags, variables, file keys and help are made.

A value comes from the first of: the command line, PENSIEVE_<NAME>, the TOML file, the default.
`resolve` records for each where it came from.  A command uses the tables that concern it.  All commands may
use one file, so it may have keys of every table; any other key is an error.  The result is frozen; what
follows from it and from the model (how many pages fit) is computed where it is used.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
    unit: str  # "bytes", "tokens", "share"; "auto": decided where the device is known

    def pages(self, page_bytes: int, chunk_tokens: int, available_bytes: int) -> int:
        if self.unit == "tokens":
            return -(-int(self.amount) // chunk_tokens)
        total = self.amount * available_bytes if self.unit == "share" else self.amount
        return int(total) // page_bytes

    def __str__(self) -> str:
        if self.unit == "auto":
            return "auto"
        if self.unit == "tokens":
            return f"{int(self.amount)}t"
        if self.unit == "share":
            return f"{self.amount * 100:g}%"
        return f"{self.amount / 2**20:g}MiB"


def parse_tier_size(text: str) -> TierSize:
    """`6GiB`, `512MiB`, `20000t` (tokens), `60%` (of the memory available) or `auto`."""
    if text.strip() == "auto":
        return TierSize(0, "auto")
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z%]+)\s*", text)
    if match is not None:
        amount, unit = float(match[1]), match[2]
        if unit == "t":
            return TierSize(amount, "tokens")
        if unit == "%" and amount <= 95:
            return TierSize(amount / 100, "share")
        if unit.upper() in UNITS:
            return TierSize(amount * UNITS[unit.upper()], "bytes")
    raise ValueError("is a size such as 6GiB, 512MiB, 20000t (tokens), 60% (at most 95%), or auto")


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


def _number(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:  # NaN fails both comparisons
            raise ValueError(f"is a number in {low:g}..{high:g}")
        return value

    return parse


def _device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", text):
        raise ValueError("is one of auto, cpu, cuda, cuda:N")
    return text


def _switch(text: str) -> bool:
    if (word := text.lower()) not in ("true", "false", "1", "0", "yes", "no", "on", "off"):
        raise ValueError("is true or false")
    return word in ("true", "1", "yes", "on")


def _file(text: str) -> Path:
    return Path(text).expanduser()


class Setting(NamedTuple):
    name: str
    parse: Callable[[str], Any]
    default: str  # as it would be written; "" for none
    help: str
    metavar: str = ""  # "" for a switch
    group: str = "settings"
    spelled: str = ""  # the flag, where it is not the name
    secret: bool = False

    @property
    def flag(self) -> str:
        return self.spelled or "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "PENSIEVE_" + self.name.upper()


Table = tuple[Setting, ...]

DATA = Setting("data", _file, "", "folder of the history (default: the user's data folder)", "DIR")
SETTINGS: Table = (
    Setting(
        "model", str, "", "a folder or a hub id (default: the small model that ships)", "MODEL"
    ),
    Setting(
        "device",
        _device,
        "auto",
        "where to compute (auto: a GPU, if there is one)",
        "auto|cpu|cuda[:N]",
    ),
    Setting(
        "dtype",
        _choice("auto", "float32", "bfloat16", "float16"),
        "auto",
        "type of weights and KV (auto: the checkpoint's)",
        "TYPE",
    ),
    Setting(
        "weights",
        _choice("native", "int8"),
        "native",
        "int8 halves the bytes read per step and changes replies (see `pensieve bench step`)",
        "native|int8",
    ),
    Setting(
        "device_cache",
        parse_tier_size,
        "auto",
        "size of the device tier (auto: a quarter of memory; on a GPU, what is left of its own)",
        "SIZE",
    ),
    Setting(
        "host_cache",
        parse_tier_size,
        "auto",
        "size of the host tier (auto: a quarter of memory)",
        "SIZE",
    ),
    Setting(
        "policy",
        _choice("value", "lru", "return"),
        "value",
        "what is evicted first (return: learns which conversations return)",
        "value|lru|return",
    ),
    Setting(
        "cost",
        _file,
        "",
        "what computing and copying cost on this machine, a file of `pensieve simulate --fit` "
        "(default: estimated from the model's shape)",
        "FILE",
    ),
    Setting("chunk_tokens", _whole(1, 1024), "32", "tokens per chunk", "N"),
    Setting("token_budget", _whole(1, 1 << 20), "512", "most tokens of an iteration", "N"),
    Setting("turns_max", _whole(1, 1 << 16), "64", "most turns that run at once", "N"),
    Setting("threads", _whole(0, 1024), "0", "threads that compute (0: torch's choice)", "N"),
    Setting(
        "tensor_parallel",
        _whole(1, 64),
        "1",
        "ranks that share each layer: one GPU each, or processes on the CPU",
        "N",
    ),
    DATA,
    Setting("journal", _file, "", "append a journal of all iterations to this file", "FILE"),
)
SERVING: Table = (
    Setting(
        "address",
        str,
        "127.0.0.1:50051",
        "where to listen (port 0: any free one)",
        "HOST:PORT",
        "listening",
    ),
    Setting(
        "ready_file", _file, "", "write the address to this file when ready", "FILE", "listening"
    ),
    Setting(
        "token_file",
        _file,
        "",
        "tokens that clients need (see `pensieve token`)",
        "FILE",
        "listening",
    ),
    Setting("tls_cert", _file, "", "certificate chain, PEM", "FILE", "listening"),
    Setting("tls_key", _file, "", "the certificate's key, PEM", "FILE", "listening"),
    Setting(
        "tls_client_ca",
        _file,
        "",
        "clients need a certificate of this authority, PEM",
        "FILE",
        "listening",
    ),
    Setting(
        "insecure",
        _switch,
        "",
        "let other machines connect without TLS or tokens",
        group="listening",
    ),
    Setting(
        "reflection",
        _switch,
        "",
        "offer gRPC reflection even if tokens are needed",
        group="listening",
    ),
    Setting(
        "turns_waiting_max",
        _whole(1, 1 << 20),
        "1024",
        "most turns begun and not ended; more are refused",
        "N",
        "turns",
    ),
    Setting(
        "grace",
        _number(0, 86_400),
        "5",
        "how long a turn runs on after its connection broke, to be attached to again",
        "SECONDS",
        "turns",
    ),
    Setting(
        "keepalive",
        _number(0.5, 86_400),
        "30",
        "time between pings; a client that does not answer within a third of it is cut off",
        "SECONDS",
        "turns",
    ),
    Setting(
        "drain_timeout",
        _number(0, 86_400),
        "30",
        "how long running turns may go on when the daemon stops",
        "SECONDS",
        "turns",
    ),
    Setting(
        "engine",
        _choice("model", "echo"),
        "model",
        "echo: arithmetic instead of a model, to measure or test the service alone",
        "model|echo",
    ),
    Setting(
        "echo_seconds",
        _number(0, 3600),
        "0",
        "what an iteration of the echo engine takes",
        "SECONDS",
    ),
    Setting(
        "log_format",
        _choice("auto", "text", "json"),
        "auto",
        "auto: text on a terminal",
        "auto|text|json",
    ),
)
REACHING: Table = (
    Setting("daemon", str, "", "a daemon's HOST:PORT or unix:PATH", "A", "daemon", "--address"),
    Setting("token", str, "", "token for that daemon", "TOKEN", "daemon", secret=True),
    Setting("tls_ca", _file, "", "authority of that daemon's certificate, PEM", "FILE", "daemon"),
)
TALKING: Table = (
    Setting("system", str, "", "system prompt of new conversations", "TEXT", "talking"),
    Setting(
        "stats", _switch, "", "print after each reply where its tokens came from", group="talking"
    ),
    Setting("temperature", _number(0, 100), "", "temperature; 0 is greedy", "T", "sampling"),
    Setting(
        "top_p", _number(0, 1), "", "keep the likeliest tokens up to this share", "P", "sampling"
    ),
    Setting(
        "top_k",
        _whole(0, 1 << 31),
        "",
        "keep so many of the likeliest tokens (0: all)",
        "K",
        "sampling",
    ),
    Setting(
        "max_tokens",
        _whole(1, 1 << 31),
        "",
        "most tokens of a reply (default: 1024)",
        "N",
        "sampling",
    ),
    Setting("seed", _whole(0, (1 << 64) - 1), "", "of the random numbers", "N", "sampling"),
)
TABLES = (SETTINGS, SERVING, REACHING, TALKING)
GROUPS = {
    "settings": "each flag also as PENSIEVE_<NAME> and in the TOML file of --config",
    "daemon": "--address also as PENSIEVE_DAEMON, and as `daemon` in the file",
    "sampling": "defaults come from the model's own files",
}


@dataclass(frozen=True)
class Settings:
    """The settings of the engine and the history, parsed and checked."""

    model: str
    device: str
    dtype: str
    weights: str
    device_cache: TierSize
    host_cache: TierSize
    policy: str
    cost: Path | None
    chunk_tokens: int
    token_budget: int
    turns_max: int
    threads: int
    tensor_parallel: int
    data: Path
    journal: Path | None


@dataclass(frozen=True)
class Serving:
    """The settings of `pensieve serve` alone."""

    address: str
    ready_file: Path | None
    token_file: Path | None
    tls_cert: Path | None
    tls_key: Path | None
    tls_client_ca: Path | None
    insecure: bool | None
    reflection: bool | None
    turns_waiting_max: int
    grace: float
    keepalive: float
    drain_timeout: float
    engine: str
    echo_seconds: float
    log_format: str


@dataclass(frozen=True)
class Resolved:
    tables: tuple[Table, ...]
    values: dict[str, Any]  # by name; None where there is none
    sources: dict[str, str]  # by name: "flag", "PENSIEVE_…", the file, or "default"
    written: dict[str, str]  # settings as they were written; what is not given is missing

    @property
    def settings(self) -> Settings:
        return Settings(**{each.name: self.values[each.name] for each in SETTINGS})

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
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    written: dict[str, str] = {}
    for setting in (each for table in tables for each in table):
        if (text := flags.get(setting.name)) is not None:
            source = "flag"
        elif setting.variable in environ:
            text, source = environ[setting.variable], setting.variable
        elif setting.name in in_file:
            text, source = in_file[setting.name], str(file)
        else:
            text, source = setting.default, "default"
        named = setting.flag if source in ("flag", "default") else f"{setting.name} ({source})"
        try:
            values[setting.name] = setting.parse(text) if text else None
        except ValueError as error:
            raise ConfigError(f"{named} {error}, not {text!r}") from None
        sources[setting.name] = source
        if text and setting in SETTINGS:
            written[setting.name] = text
    for name, default in (("model", ""), ("data", default_data_folder(environ))):
        if name in values:
            values[name] = values[name] or default
    return Resolved(tables, values, sources, written)


def print_settings(resolved: Resolved) -> None:
    """Print each setting, its value and where it comes from; of a secret, only whether it is set."""
    for setting in (each for table in resolved.tables for each in table):
        value = resolved.values[setting.name]
        shown = "" if value is None else "(set)" if setting.secret else value
        print(f"{setting.name} = {shown}  # {resolved.sources[setting.name]}")


def _read(file: Path) -> dict[str, str]:
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from error
    known = {setting.name for each in TABLES for setting in each}
    for name, value in table.items():
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
