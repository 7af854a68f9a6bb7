"""`pensieve token` makes a token for a client, and its entry for the daemon's token file.

The secret is for a person and the entry for the file, so they go different ways: the entry to standard
output, the secret to standard error.  With --file the entry is appended there, and the secret alone is the
output.
"""

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
    "--turns-max": (whole(1, 1 << 31), "N", "most turns that the tenant may run at once"),
    "--tokens-per-second": (number(0.001, 1e12), "X", "most new and output tokens, on average"),
    "--requests-per-second": (number(0.001, 1e12), "X", "most requests of any kind, on average"),
    "--calls-max": (whole(1, 1 << 31), "N", "most calls at once, streams included"),
    "--storage-bytes": (_bytes, "SIZE", "most that its conversations may take (10GiB)"),
    "--unread-bytes": (_bytes, "SIZE", "most of answers that its clients do not take (64MiB)"),
    "--prefixes-max": (whole(1, 1 << 31), "N", "most prefixes that it may declare (default: 256)"),
    "--weight": (
        number(0.001, 1e6),
        "X",
        "its share where turns wait, beside others' (default: 1)",
    ),
    "--priority-max": (
        whole(PRIORITY_MIN, PRIORITY_MAX),
        "N",
        "highest priority of this token's turns; a higher one is lowered to it",
    ),
}


def add_parser(commands: Any) -> None:
    tokens = commands.add_parser(
        "token",
        help="make a token for a client",
        description="Make a token. Its entry, which has only the token's sha256, is for the file of "
        "`pensieve serve --token-file`; it goes to --file, or to standard output (>> tokens.toml). The token "
        "itself is for the client and shown once: on standard output with --file, else on standard error.",
    )
    tokens.add_argument(
        "--file",
        type=Path,
        metavar="FILE",
        help="append the entry to this token file, which is made for its owner alone if it is missing",
    )
    tokens.add_argument(
        "--tenant",
        default="",
        metavar="NAME",
        help="the tenant whose conversations the client may use",
    )
    tokens.add_argument(
        "--name", default="", metavar="NAME", help="what the audit log calls the token"
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
    """In one write, since a daemon may read at any time; nothing if it would refuse the file then."""
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
