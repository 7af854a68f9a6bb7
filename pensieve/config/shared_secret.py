"""The file with the secret that the daemons of a cluster share.

It is its owner's alone; one of root's may be read by its group, too: so Kubernetes gives a secret to a
container whose user is not root.
"""

from __future__ import annotations

from pathlib import Path

from pensieve.errors import ConfigError

SECRET_CHARACTERS_MIN = 16


def read_secret(path: Path | None) -> str:
    """The first line of the file; ConfigError if it is no secret."""
    if path is None:
        return ""
    try:
        status, text = path.stat(), path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError(f"--history-secret {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"--history-secret {path} is not ASCII") from None
    if status.st_mode & (0o037 if status.st_uid == 0 else 0o077):
        raise ConfigError(f"--history-secret {path} can be read by others: `chmod 600` it")
    if len(text) < SECRET_CHARACTERS_MIN or not text.isprintable():
        raise ConfigError(
            f"--history-secret {path} has no secret of at least {SECRET_CHARACTERS_MIN} characters"
        )
    return text
