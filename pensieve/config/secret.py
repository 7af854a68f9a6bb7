"""The secret that the processes of a cluster share, and the environment of one that is to know none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pensieve.config.settings import ALL
from pensieve.errors import ConfigError

SECRET_CHARACTERS_MIN = 16
OF_LIBPQ = ("PGPASSWORD", "PGPASSFILE", "PGSERVICEFILE", "PGSSLKEY")
SECRETS = frozenset({*OF_LIBPQ, *(each.variable for each in ALL if each.secret)})


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """For the engine's process, which computes for whoever asks, from files that others made.

    It needs neither the history nor a token, so it gets no variable of a secret setting, and none by which
    PostgreSQL's library finds a password.
    """
    return {name: value for name, value in environ.items() if name not in SECRETS}


def read_secret(path: Path | None) -> str:
    """The first line of the file; ConfigError if it is no secret.

    Only its owner may read it, or, if that is root, its group too: so Kubernetes gives a secret to a
    container whose user is not root.
    """
    if path is None:
        return ""
    try:
        status, text = path.stat(), path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError(f"--cluster-secret {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"--cluster-secret {path} is not ASCII") from None
    if status.st_mode & (0o037 if status.st_uid == 0 else 0o077):
        raise ConfigError(f"--cluster-secret {path} can be read by others: `chmod 600` it")
    if len(text) < SECRET_CHARACTERS_MIN or not text.isprintable():
        raise ConfigError(
            f"--cluster-secret {path} has no secret of at least {SECRET_CHARACTERS_MIN} characters "
            f"(`openssl rand -hex 32 > {path}` makes one)"
        )
    return text
