"""Parse the texts of settings. Each function raises ValueError, whose message says what is valid."""

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
    unit: str  # "bytes", "tokens", "share", or "auto", which is resolved when the device is known

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
    """Parse `6GiB`, `512MiB`, `20000t` (tokens), `60%` (of the available memory) or `auto`."""
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
    raise ValueError(
        "must be a size such as 6GiB, 512MiB, 20000t (tokens), 60% (at most 95%), or auto"
    )


def names(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of names."""
    return tuple(filter(None, (each.strip() for each in text.split(","))))


def choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}")
        return text

    return parse


def whole(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"-?[0-9]+", text) or not low <= int(text) <= high:
            raise ValueError(f"must be a whole number in {low}..{high}")
        return int(text)

    return parse


def number(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:  # NaN fails both comparisons
            raise ValueError(f"must be a number in {low:g}..{high:g}")
        return value

    return parse


def automatic(parse: Callable[[str], int]) -> Callable[[str], int]:
    """Parse a number, or `auto` as 0."""
    return lambda text: 0 if text == "auto" else parse(text)


def device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", text):
        raise ValueError("must be one of auto, cpu, cuda, cuda:N")
    return text


def engine(text: str) -> str:
    if not re.fullmatch(r"model|separate|echo(:[0-9]+(\.[0-9]+)?)?", text):
        raise ValueError("must be one of model, echo, echo:SECONDS, separate")
    return text


def switch(text: str) -> bool:
    if (word := text.lower()) not in ("true", "false", "1", "0", "yes", "no", "on", "off"):
        raise ValueError("must be true or false")
    return word in ("true", "1", "yes", "on")


def file(text: str) -> Path:
    return Path(text).expanduser()


def replica_name(text: str) -> str:
    """Parse the name of a daemon. It must be valid in labels, in flags and before an address."""
    if not re.fullmatch(r"[A-Za-z0-9._~-]{1,128}", text):
        raise ValueError("must have 1 to 128 characters of A-Z a-z 0-9 . _ ~ -")
    return text


# Each part of the pattern matches exactly what libpq reads as this part. With a looser pattern, an error
# could show a piece of a password as a host name.
_WORD = r"[^:@/?#\s,]*"
_HOST = rf"(?:{_WORD}|\[[0-9a-fA-F:.%]*\])(?::[0-9]*)?"
STORE_URL = re.compile(
    rf"postgres(?:ql)?://(?:{_WORD}(?::{_WORD})?@)?{_HOST}(?:,{_HOST})*(?:/{_WORD})?(?:\?[^@#\s]*)?"
)


MOVED_HISTORY = (  # for users of the history service of an earlier version
    "`pensieve history` was removed: daemons now open the shared database themselves. Start each daemon with "
    "--store sqlite:///FOLDER/conversations.db if all are on one host (FOLDER is the data folder of "
    "`pensieve history`), or with the postgresql:// address that it used (docs/cluster.md)"
)
SQLITE_URL = re.compile(r"sqlite://(/[^/?#\s]+)+")


def store_url(text: str) -> str:
    """Parse the address of a database."""
    if text.startswith("sqlite:////"):  # SQLAlchemy's form of an absolute path
        text = text.replace("////", "///", 1)
    if text.startswith(("history://", "historys://")):
        raise ValueError(f"names a history service: {MOVED_HISTORY}")
    if not any(each.fullmatch(text) for each in (STORE_URL, SQLITE_URL)):
        raise ValueError(
            "must be an address such as postgresql://user@host/name, with special characters escaped (%40), "
            "or sqlite:///path/of/a/file"
        )
    return text


def shown_store(url: str) -> str:
    """Return the URL of a history without user, password and options, or "" if the URL is empty.

    The result is the same for all daemons that share a history.
    """
    if SQLITE_URL.fullmatch(url):
        return url
    scheme, _, rest = url.partition("://")
    place = rest.partition("?")[0].rpartition("@")[2]
    scheme = "postgresql" if scheme == "postgres" else scheme
    return f"{scheme}://{place}" if url else ""
