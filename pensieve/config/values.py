"""What the texts of settings mean: each function makes a value, or raises ValueError with what it wants."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

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


def names(text: str) -> tuple[str, ...]:
    """Separated by commas."""
    return tuple(filter(None, (each.strip() for each in text.split(","))))


def choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"is one of {', '.join(allowed)}")
        return text

    return parse


def whole(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"-?[0-9]+", text) or not low <= int(text) <= high:
            raise ValueError(f"is a whole number in {low}..{high}")
        return int(text)

    return parse


def number(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:  # NaN fails both comparisons
            raise ValueError(f"is a number in {low:g}..{high:g}")
        return value

    return parse


def automatic(parse: Callable[[str], int]) -> Callable[[str], int]:
    """A number, or `auto`, which is 0."""
    return lambda text: 0 if text == "auto" else parse(text)


def device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", text):
        raise ValueError("is one of auto, cpu, cuda, cuda:N")
    return text


def engine(text: str) -> str:
    if not re.fullmatch(r"model|separate|echo(:[0-9]+(\.[0-9]+)?)?", text):
        raise ValueError("is one of model, echo, echo:SECONDS, separate")
    return text


def switch(text: str) -> bool:
    if (word := text.lower()) not in ("true", "false", "1", "0", "yes", "no", "on", "off"):
        raise ValueError("is true or false")
    return word in ("true", "1", "yes", "on")


def file(text: str) -> Path:
    return Path(text).expanduser()


def replica_name(text: str) -> str:
    """Of one daemon among several: it stands in labels, in flags and in front of an address."""
    if not re.fullmatch(r"[A-Za-z0-9._~-]{1,128}", text):
        raise ValueError("has 1 to 128 of the characters A-Z a-z 0-9 . _ ~ -")
    return text


# Every part is what libpq takes it for, so no piece of a password can get into an error as a host's name.
_WORD = r"[^:@/?#\s,]*"
_HOST = rf"(?:{_WORD}|\[[0-9a-fA-F:.%]*\])(?::[0-9]*)?"
STORE_URL = re.compile(
    rf"postgres(?:ql)?://(?:{_WORD}(?::{_WORD})?@)?{_HOST}(?:,{_HOST})*(?:/{_WORD})?(?:\?[^@#\s]*)?"
)


MOVED_HISTORY = (  # that of a service which daemons shared in earlier versions
    "there is no `pensieve history` any more: daemons open its database themselves. Start each of them with "
    "--store sqlite:///FOLDER/conversations.db, if all are on one host (FOLDER is the data folder that "
    "`pensieve history` had), or with the postgresql://… that it had (docs/cluster.md)"
)
SQLITE_URL = re.compile(r"sqlite://(/[^/?#\s]+)+")


def store_url(text: str) -> str:
    """Of a database, with special letters of names and passwords percent-encoded."""
    if text.startswith("sqlite:////"):  # as SQLAlchemy writes an absolute path
        text = text.replace("////", "///", 1)
    if text.startswith(("history://", "historys://")):
        raise ValueError(f"names a history service: {MOVED_HISTORY}")
    if not any(each.fullmatch(text) for each in (STORE_URL, SQLITE_URL)):
        raise ValueError(
            "is an address such as postgresql://user@host/name, with special letters percent-encoded, or "
            "sqlite:///path/of/a/file"
        )
    return text


def shown_store(url: str) -> str:
    """Where a history is, without user, password and options: the same for all that share it; "" for none."""
    if SQLITE_URL.fullmatch(url):
        return url
    scheme, _, rest = url.partition("://")
    place = rest.partition("?")[0].rpartition("@")[2]
    scheme = "postgresql" if scheme == "postgres" else scheme
    return f"{scheme}://{place}" if url else ""
