"""The path of a daemon's local socket, which only its owner may open."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from pensieve.errors import ConfigError

SOCKET_BYTES_MAX = 107  # of a UNIX socket's path


def socket_path(data: Path) -> Path:
    """DATA/admin.sock, or a name in XDG_RUNTIME_DIR where that path is too long for a socket."""
    path = data / "admin.sock"
    if len(os.fsencode(path)) <= SOCKET_BYTES_MAX:
        return path
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if not runtime:
        raise ConfigError(
            f"{path} is too long for a socket; set XDG_RUNTIME_DIR or a shorter --data"
        )
    name = hashlib.sha256(os.fsencode(data.absolute())).hexdigest()[:16]
    return Path(runtime) / f"pensieve-{name}.sock"
