"""The file with the secret that the daemons of a cluster share."""

from __future__ import annotations

from pathlib import Path

from pensieve.errors import ConfigError

SECRET_CHARACTERS_MIN = 16


def read_secret(path: Path | None) -> str:
    """The first line of the file; ConfigError if it is no secret."""
    if path is None:
        return ""
    try:
        mode, text = path.stat().st_mode, path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError(f"--history-secret {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"--history-secret {path} is not ASCII") from None
    if mode & 0o077:
        raise ConfigError(f"--history-secret {path} can be read by others: `chmod 600` it")
    if len(text) < SECRET_CHARACTERS_MIN or not text.isprintable():
        raise ConfigError(
            f"--history-secret {path} has no secret of at least {SECRET_CHARACTERS_MIN} characters"
        )
    return text
