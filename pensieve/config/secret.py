"""Read the secret of a cluster, and keep secrets out of the engine's environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pensieve.config.settings import ALL
from pensieve.errors import ConfigError

SECRET_CHARACTERS_MIN = 16
LIBPQ_VARIABLES = ("PGPASSWORD", "PGPASSFILE", "PGSERVICEFILE", "PGSSLKEY")
SECRETS = frozenset({*LIBPQ_VARIABLES, *(each.variable for each in ALL if each.secret)})


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without secrets, for the engine process.

    The engine reads model files of unknown origin, and needs neither the history nor tokens. So the variables
    of secret settings are removed. The variables that give passwords or keys to libpq are removed, too.
    """
    return {name: value for name, value in environ.items() if name not in SECRETS}


def read_secret(path: Path | None) -> str:
    """Return the secret in the file. Raises ConfigError if the secret or the file's mode is not acceptable.

    Only the owner may have permission to read the file. If the owner is root, the group may have it, too:
    Kubernetes mounts secrets in this way for containers that do not run as root.
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
        raise ConfigError(f"--cluster-secret {path} can be read by others: run `chmod 600 {path}`")
    if len(text) < SECRET_CHARACTERS_MIN or not text.isprintable():
        raise ConfigError(
            f"--cluster-secret {path} has no secret of at least {SECRET_CHARACTERS_MIN} characters "
            f"(`openssl rand -hex 32 > {path}` makes one)"
        )
    return text
