"""Tokens and certificates are replaced while a daemon runs."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pensieve.client import Client, Retry
from pensieve.errors import ConfigError, Unauthenticated
from pensieve.guard import callers, reload
from pensieve.guard.audit import Audit
from pensieve.guard.exposure import Listening
from tests.conversations.rig_daemon import DaemonRig, ServeProcess, wait_for

CERTS = Path(__file__).with_name("certs")


class Guarded(ServeProcess):
    def __init__(self, folder: Path) -> None:
        self.tokens = folder / "tokens.toml"
        self.cert, self.key = folder / "cert.pem", folder / "key.pem"
        shutil.copy(CERTS / "server.pem", self.cert)
        shutil.copy(CERTS / "server.key", self.key)
        self.first, entry = callers.new_token("a", admin=False)
        self.write(entry)
        tls = ("--tls-cert", str(self.cert), "--tls-key", str(self.key))
        super().__init__(folder / "data", "--token-file", str(self.tokens), *tls)

    def write(self, entries: str) -> None:
        new = self.tokens.with_suffix(".new")
        new.write_text(entries)
        new.chmod(0o600)
        os.replace(new, self.tokens)

    @property
    def port(self) -> str:
        return self.address.rsplit(":", 1)[1]

    def knows(self, token: str) -> bool:
        with Client(
            f"localhost:{self.port}", token=token, tls=CERTS / "ca.pem", retry=Retry(retries=0)
        ) as client:
            try:
                list(client.conversations())
            except Unauthenticated:
                return False
            return True

    def certificate(self) -> bytes:
        """Return the certificate that a new connection gets."""
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection(("127.0.0.1", int(self.port))) as plain,
            context.wrap_socket(plain) as wrapped,
        ):
            shown = wrapped.getpeercert(binary_form=True)
        assert shown is not None
        return shown


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    daemon = Guarded(tmp_path)
    daemon.start()
    yield daemon
    assert daemon.stop() == 0


def test_a_removed_token_is_refused_and_a_new_token_is_accepted(guarded: Guarded) -> None:
    second, entry = callers.new_token("b", admin=False)
    assert guarded.knows(guarded.first)
    assert not guarded.knows(second)
    guarded.write(entry)
    wait_for(lambda: guarded.knows(second), 30)
    assert not guarded.knows(guarded.first)


@pytest.mark.parametrize(
    "entries",
    ["", "[[token]]\nsha256 = 'abc", "two limits", "a = " + "[" * 20_000, "a = " + "9" * 5000],
)
def test_an_invalid_token_file_changes_nothing_and_is_reported(
    guarded: Guarded, entries: str
) -> None:
    if entries == "two limits":
        each = [callers.new_token("a", admin=False, turns_max=number)[1] for number in (1, 2)]
        entries = "".join(each)
    guarded.write(entries)
    wait_for(lambda: "the tokens stay as they were" in guarded.log.read_text(), 30)
    assert guarded.knows(guarded.first)
    second, entry = callers.new_token("b", admin=False)
    guarded.write(entry)
    wait_for(lambda: guarded.knows(second), 30)


def test_a_token_file_that_was_briefly_unreadable_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is read again even if it has not changed since.

    The read may have failed for another reason, such as a lack of file descriptors.
    """
    path = tmp_path / "tokens.toml"
    path.write_text(callers.new_token("a", admin=False)[1])
    path.chmod(0o600)
    used: list[Sequence[callers.Token]] = []
    reports: list[tuple[int, str]] = []
    errors = [
        ConfigError("no file descriptors"),
        ConfigError("no file descriptors"),
        RecursionError("too deep"),
        FileNotFoundError(2, "gone", str(path)),
    ]
    read = callers.read_tokens

    def failing(path: Path) -> tuple[callers.Token, ...]:
        if errors:
            raise errors.pop(0)
        return read(path)

    monkeypatch.setattr(reload, "read_tokens", failing)
    monkeypatch.setattr(reload, "POLL_SECONDS", 0.001)

    async def watch() -> None:
        def tell(number: int, problem: str) -> None:
            reports.append((number, problem))

        task = asyncio.create_task(reload.watch_tokens(path, (), used.append, tell))
        while not used and not task.done():
            await asyncio.sleep(0.001)
        task.cancel()

    asyncio.run(watch())
    assert used == [read(path)]
    assert [problem for _, problem in reports[:-1]] == [
        "no file descriptors",
        "RecursionError: too deep",
        f"FileNotFoundError: [Errno 2] gone: '{path}'",
    ]
    assert reports[-1] == (1, "")


def test_a_token_file_that_vanishes_while_it_is_read_raises_a_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(callers.new_token("a", admin=False)[1])
    read_bytes = Path.read_bytes

    def read_and_delete(path: Path) -> bytes:
        text = read_bytes(path)
        path.unlink()
        return text

    monkeypatch.setattr(Path, "read_bytes", read_and_delete)
    with pytest.raises(ConfigError, match="cannot read"):
        callers.read_tokens(path)


def test_a_daemon_stops_if_its_token_watcher_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(callers.new_token("a", admin=False)[1])
    path.chmod(0o600)

    def fail(*_: object) -> None:
        raise AssertionError("an unexpected error")

    monkeypatch.setattr(Audit, "tokens_reloaded", fail)
    listening = Listening(
        "127.0.0.1:0", tmp_path / "admin.sock", tokens=callers.read_tokens(path), token_file=path
    )
    with DaemonRig(tmp_path / "data", listening=listening) as rig:
        path.write_text("broken")
        wait_for(lambda: rig.server.failure is not None, 30)
        assert rig.server.stopping.is_set()


def test_new_connections_get_the_current_certificate(guarded: Guarded, tmp_path: Path) -> None:
    before = guarded.certificate()
    assert guarded.certificate() == before
    shutil.copy(CERTS / "client.pem", guarded.cert)  # for a moment, the key does not match
    assert guarded.certificate() == before
    shutil.copy(CERTS / "client.key", guarded.key)
    wait_for(lambda: guarded.certificate() != before, 30)
    guarded.cert.unlink()
    assert guarded.certificate() != before
