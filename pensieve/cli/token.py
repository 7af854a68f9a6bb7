"""`pensieve token`: create a token for a client, and its entry for the daemon's token file.

Without --file, the entry is printed to standard output and the token to standard error, so that
`>> tokens.toml` works. With --file, the entry is appended to the file, and only the token is printed to
standard output."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pensieve.config.values import number, parse_tier_size, whole
from pensieve.core.turn import PRIORITY_MAX, PRIORITY_MIN
from pensieve.errors import ConfigError, InvalidArgument


def _bytes(text: str) -> int:
    size = parse_tier_size(text)
    if size.unit != "bytes" or size.amount < 1:
        raise ValueError
    return int(size.amount)


LIMIT_FLAGS: dict[str, tuple[Callable[[str], float], str, str]] = {
    "--turns-max": (whole(1, 1 << 31), "N", "maximum turns of the tenant in flight"),
    "--tokens-per-second": (
        number(0.001, 1e12),
        "X",
        "maximum new and output tokens per second, on average",
    ),
    "--requests-per-second": (number(0.001, 1e12), "X", "maximum requests per second, on average"),
    "--calls-max": (whole(1, 1 << 31), "N", "maximum concurrent calls, including streams"),
    "--storage-bytes": (
        _bytes,
        "SIZE",
        "maximum size of the tenant's conversations, such as 10GiB",
    ),
    "--unread-bytes": (
        _bytes,
        "SIZE",
        "maximum size of answers that clients have not read, such as 64MiB",
    ),
    "--prefixes-max": (
        whole(1, 1 << 31),
        "N",
        "maximum number of declared prefixes (default: 256)",
    ),
    "--weight": (
        number(0.001, 1e6),
        "X",
        "the tenant's share of the engine when turns wait, relative to other tenants (default: 1)",
    ),
    "--priority-max": (
        whole(PRIORITY_MIN, PRIORITY_MAX),
        "N",
        "maximum priority of turns with this token; higher priorities are lowered to N",
    ),
}


def add_parser(commands: Any) -> None:
    tokens = commands.add_parser(
        "token",
        help="make a token for a client",
        description="Make a token for a client, and an entry for the file of `pensieve serve --token-file`. "
        "The entry has only the token's SHA-256. With --file, the entry is appended to the file and the "
        "token is printed. Without --file, the entry is printed and the token goes to standard error. "
        "The token is shown only once.",
    )
    tokens.add_argument(
        "--file",
        type=Path,
        metavar="FILE",
        help="append the entry to this token file; a new file is readable only by its owner",
    )
    tokens.add_argument(
        "--tenant",
        default="",
        metavar="NAME",
        help="tenant whose conversations the client may use",
    )
    tokens.add_argument(
        "--name", default="", metavar="NAME", help="name of the token in the audit log"
    )
    tokens.add_argument("--admin", action="store_true", help="let the client use `pensieve admin`")
    for flag, (parse, metavar, text) in LIMIT_FLAGS.items():
        tokens.add_argument(flag, type=parse, metavar=metavar, help=text)
    tokens.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from pensieve.guard.callers import new_token
    from pensieve.store.records import ID_PATTERN

    for name in ("tenant", "name"):
        word = getattr(arguments, name)
        if word and not ID_PATTERN.fullmatch(word):
            raise InvalidArgument(
                f"--{name}", "must have 1 to 128 characters of A-Z a-z 0-9 . _ ~ -"
            )
    names = [flag.removeprefix("--").replace("-", "_") for flag in LIMIT_FLAGS]
    limits = {name: getattr(arguments, name) for name in names}
    token, entry = new_token(arguments.tenant, arguments.admin, arguments.name, **limits)
    if arguments.file is not None:
        _append(arguments.file, entry)
        print("for the client (shown once):", file=sys.stderr)
        print(token)
        return 0
    print(entry, end="", flush=True)
    print(f"for the client (shown once): {token}", file=sys.stderr)
    return 0


def _append(path: Path, entry: str) -> None:
    """Append an entry in one write, because the daemon may read the file at any time.

    Raises ConfigError if the daemon would reject the resulting file.
    """
    from pensieve.guard.callers import check_mode, limits_of, tokens_of

    try:
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(file, "r+b", buffering=0) as opened:
            check_mode(path, os.fstat(file).st_mode)
            before = opened.read()
            line_break = b"" if before.endswith(b"\n") or not before else b"\n"
            added = line_break + entry.encode()
            limits_of(tokens_of(path, before + added))
            opened.write(added)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
