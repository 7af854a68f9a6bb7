"""The path of a daemon's local socket, which only its owner may open, and its address for gRPC."""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path
from urllib.parse import quote

from pensieve.errors import ConfigError

SOCKET_BYTES_MAX = 107  # of a UNIX socket's path


def socket_path(data: Path) -> Path:
    """Return DATA/admin.sock, or a name in XDG_RUNTIME_DIR if that path cannot be a socket's."""
    path = data.absolute() / "admin.sock"
    if (problem := _problem(path)) is None:
        return path
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if not runtime:
        raise ConfigError(f"{path} {problem}; set XDG_RUNTIME_DIR or another --data")
    name = hashlib.sha256(os.fsencode(data.absolute())).hexdigest()[:16]
    return Path(runtime) / f"pensieve-{name}.sock"


def socket_address(path: Path) -> str:
    """Return the URI that gRPC listens on and connects to; most characters of the path are encoded."""
    return f"unix:{quote(os.fsencode(path.absolute()))}"


def is_listened_to(path: Path) -> bool:
    """Whether a daemon listens on this socket; a daemon that was killed leaves the file behind."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as ours:
            ours.connect(os.fspath(path))
    except (FileNotFoundError, ConnectionRefusedError):
        return False
    except OSError:  # it may not be ours to open: whoever connects to it hears why
        pass
    return True


def _problem(path: Path) -> str | None:
    if len(os.fsencode(path)) > SOCKET_BYTES_MAX:
        return "is too long for a socket"
    if "," in path.as_posix():
        return "has a comma, which parts addresses in gRPC"
    return None
