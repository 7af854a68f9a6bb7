"""Path and gRPC address of the daemon's local socket, which only the owner of the data folder may open."""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path
from urllib.parse import quote

from pensieve.errors import ConfigError

SOCKET_BYTES_MAX = 107  # maximum length of a UNIX socket's path


def socket_path(data: Path) -> Path:
    """Return DATA/admin.sock, or a path in XDG_RUNTIME_DIR if that is too long for a socket."""
    path = data.absolute() / "admin.sock"
    if (problem := _problem(path)) is None:
        return path
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if not runtime:
        raise ConfigError(f"{path} {problem}; set XDG_RUNTIME_DIR or another --data")
    name = hashlib.sha256(os.fsencode(data.absolute())).hexdigest()[:16]
    return Path(runtime) / f"pensieve-{name}.sock"


def socket_address(path: Path) -> str:
    """Return the URI for gRPC; most characters of the path are percent-encoded."""
    return f"unix:{quote(os.fsencode(path.absolute()))}"


def is_listened_to(path: Path) -> bool:
    """Return whether a daemon listens on the socket; a killed daemon leaves the file behind."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as ours:
            ours.connect(os.fspath(path))
    except (FileNotFoundError, ConnectionRefusedError):
        return False
    except OSError:  # perhaps no permission; connecting to it tells the reason
        pass
    return True


def _problem(path: Path) -> str | None:
    if len(os.fsencode(path)) > SOCKET_BYTES_MAX:
        return "is too long for a socket"
    if "," in path.as_posix():
        return "contains a comma, which gRPC reads as a separator between addresses"
    return None
