"""The certificate of HTTP, which may be replaced while the daemon runs, as gRPC's (grpc/reload.py).

Files are looked at when a handshake begins.  If they have changed, a new context is made of them, and takes
the place of the one before only if it could be made: a certificate with the key of another would otherwise
be half in force.  Who is connected stays so.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pensieve.errors import ConfigError, whole_line
from pensieve.service.grpc.reload import Watched

log = logging.getLogger("pensieve")


class Certificates:
    def __init__(
        self,
        cert: Path,
        key: Path,
        client_ca: Path | None,
        on_reload: Callable[[str], None] = lambda problem: None,
    ) -> None:
        """`on_reload` is told what was wrong with files that have changed."""
        self._on_reload = on_reload
        self._paths = (cert, key, client_ca)
        self._files = Watched(*(path for path in self._paths if path is not None))
        self._files.has_changed()
        self._in_force = self._read()
        self.context = _of_the_moment(self._current)

    def _current(self) -> ssl.SSLContext:
        if self._files.has_changed():
            try:
                self._in_force = self._read()
            except ConfigError as error:
                log.error("the certificate of HTTP stays as it was: %s", error)
                self._on_reload(whole_line(error))
            else:
                log.info("the certificate of HTTP was read again")
                self._on_reload("")
        return self._in_force

    def _read(self) -> ssl.SSLContext:
        cert, key, client_ca = self._paths
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(cert, key, _no_password)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot use {cert} with its key: {_reason(error)}") from error
        if client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(client_ca)
            except (OSError, ValueError) as error:
                raise ConfigError(f"cannot use {client_ca}: {_reason(error)}") from error
        return context


def _no_password() -> str:
    """Nobody is there to type that of a key."""
    return ""


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _of_the_moment(current: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    class Context(ssl.SSLContext):
        """Each handshake has the context that is in force when it begins."""

        def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
            return current().wrap_bio(*args, **kwargs)

    return Context(ssl.PROTOCOL_TLS_SERVER)
