"""Path and gRPC address of the daemon's admin socket, which only the owner of the data folder may open."""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path
from urllib.parse import quote

from pensieve.errors import ConfigError

SOCKET_BYTES_MAX = 107  # maximum length of a UNIX socket's path


def socket_path(data: Path) -> Path:
    """Return DATA/admin.sock. If this path is too long for a socket, return one in XDG_RUNTIME_DIR."""
    path = data.absolute() / "admin.sock"
    if (problem := _problem(path)) is None:
        return path
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if not runtime:
        raise ConfigError(f"{path} {problem}; set XDG_RUNTIME_DIR or another --data")
    name = hashlib.sha256(os.fsencode(data.absolute())).hexdigest()[:16]
    return Path(runtime) / f"pensieve-{name}.sock"


def socket_address(path: Path) -> str:
    """Return the URI of the socket for gRPC, with a percent-encoded path."""
    return f"unix:{quote(os.fsencode(path.absolute()))}"


def is_listened_to(path: Path) -> bool:
    """Return whether a daemon listens on the socket. A killed daemon leaves the file behind."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.connect(os.fspath(path))
    except (FileNotFoundError, ConnectionRefusedError):
        return False
    except OSError:  # for example, no permission; the caller sees the reason when it connects
        pass
    return True


def _problem(path: Path) -> str | None:
    if len(os.fsencode(path)) > SOCKET_BYTES_MAX:
        return "is too long for a socket"
    if "," in path.as_posix():
        return "contains a comma, which gRPC reads as a separator between addresses"
    return None
