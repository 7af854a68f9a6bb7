"""The audit log has one valid line per event, even with hostile names or a failing disk."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pensieve.api.grpc.server import certificates
from pensieve.client import Client, Retry
from pensieve.client.admin import Admin
from pensieve.errors import ConfigError, NotFound, PermissionDenied, Unauthenticated
from pensieve.guard import audit, callers
from pensieve.guard.audit import CHARACTERS_MAX, Audit, AuditLog
from pensieve.guard.exposure import Listening
from pensieve.v1 import conversation_pb2 as pb
from tests.conversations.rig_daemon import DaemonRig, ServeProcess, wait_for

CERTS = Path(__file__).with_name("certs")
SECRET = "the words of a conversation"


def lines(path: Path) -> list[dict[str, Any]]:
    """Return all lines as JSON. A name with a line break must not split a line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def wait_for_events(path: Path, event: str, num: int = 1) -> list[dict[str, Any]]:
    """Wait for this many lines of an event, and return them."""
    wait_for(lambda: sum(each["event"] == event for each in lines(path)) >= num, 30)
    return [each for each in lines(path) if each["event"] == event]


@contextlib.contextmanager
def open_log(path: Path) -> Iterator[AuditLog]:
    log = AuditLog(path, wall_clock=lambda: 7.0)
    try:
        yield log
    finally:
        log.close()


# -- the file --


def test_each_audit_line_is_one_json_object_even_with_hostile_values(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    odd = 'a\nb\r\u2028\x1b[31m"}\n{"event": "forged"}'
    with open_log(path) as log:
        log.write("delete", conversation_id=odd, tenant="", number=3, nothing=None)
        log.write("delete", conversation_id="x" * 5000)
    assert path.read_bytes().count(b"\n") == 2
    assert path.read_bytes().isascii()
    first, second = lines(path)
    assert first == {"time": 7.0, "event": "delete", "conversation_id": odd, "number": 3}
    assert len(second["conversation_id"]) == CHARACTERS_MAX


def test_the_audit_file_is_private_and_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text('{"event": "before"}\n')
    path.chmod(0o644)
    with open_log(path) as log:
        log.write("admin")
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each["event"] for each in lines(path)] == ["before", "admin"]
    with pytest.raises(ConfigError, match="cannot write"):
        AuditLog(tmp_path / "missing" / "audit.jsonl")
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(ConfigError, match="cannot write"):
        AuditLog(tmp_path / "link")


def test_an_audit_file_that_was_moved_away_is_created_again(tmp_path: Path) -> None:
    path, old = tmp_path / "audit.jsonl", tmp_path / "audit.jsonl.1"
    with open_log(path) as log:
        log.write("admin", number=1)
        wait_for_events(path, "admin")
        path.rename(old)
        log.write("admin", number=2)
        wait_for(path.exists)
        assert wait_for_events(path, "admin")[0]["number"] == 2
        path.unlink()
        log.write("admin", number=3)
        wait_for(path.exists)
        assert wait_for_events(path, "admin")[0]["number"] == 3
    assert [each["number"] for each in lines(old)] == [1]
    assert path.stat().st_mode & 0o777 == 0o600


class FullDisk:
    """Replaces `os` for the audit log: writes fail, or are partial."""

    def __init__(self) -> None:
        self.is_full = self.is_short = False

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, file: int, text: bytes) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.write(file, text[: len(text) // 2] if self.is_short else text)


def test_a_full_disk_is_reported_once_and_lost_lines_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk, path = FullDisk(), tmp_path / "audit.jsonl"
    monkeypatch.setattr(audit, "os", disk)
    with open_log(path) as log:
        log.write("admin", number=0)
        wait_for_events(path, "admin")
        for name in ("is_full", "is_short"):
            setattr(disk, name, True)
            before = log.num_lost
            for number in range(10):
                log.write("lost ones", number=number)
            wait_for(lambda before=before: log.num_lost == before + 10)
            setattr(disk, name, False)
        log.write("admin", number=1)
        wait_for_events(path, "admin", 2)
    assert [(each["event"], each.get("lines")) for each in lines(path)] == [
        ("admin", None),
        ("lost", 20),
        ("admin", None),
    ]
    assert log.num_lost == 0
    assert sum("loses lines" in each.message for each in caplog.records) == 1
    assert sum("can be written again; 20 lines" in each.message for each in caplog.records) == 1


def test_a_hanging_disk_delays_no_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "LINES_MAX", 50)
    gate, path, append = threading.Event(), tmp_path / "audit.jsonl", AuditLog._append

    def slow(log: AuditLog, text: bytes) -> None:
        gate.wait(30.0)
        append(log, text)

    monkeypatch.setattr(AuditLog, "_append", slow)
    with open_log(path) as log:
        for number in range(500):
            log.write("admin", number=number)
        assert log.num_lost >= 500 - 50 - audit.BATCH_LINES_MAX
        assert log.num_lost > 0
        gate.set()
        wait_for(lambda: log.num_lost == 0)
    lost = sum(each["lines"] for each in wait_for_events(path, "lost"))
    assert len(wait_for_events(path, "admin")) == 500 - lost


# -- the contents --


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_use_of_a_token_is_logged_once_an_hour_for_each_connection(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "audit.jsonl"
    with open_log(path) as log:
        audit = Audit(log, clock)
        for seconds in (0, 10, 3000, 700, 10):
            clock.now += seconds
            for peer in ("ipv4:1.2.3.4:5", "ipv4:1.2.3.4:6"):
                audit.token_used("laptop", "a", peer)
        audit.token_used("", "", "unix:")
    assert [each["peer"][-1] for each in lines(path)] == ["5", "6", "5", "6"]


def test_audit_lines_about_refused_calls_are_rate_limited(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "audit.jsonl"
    with open_log(path) as log:
        audit = Audit(log, clock)
        for _ in range(100_000):
            audit.refused("/a/B", "ipv4:1.2.3.4:5", "UNAUTHENTICATED", "")
        clock.now += 1.0
        audit.refused("/a/B", "ipv4:1.2.3.4:5", "UNAUTHENTICATED", "")
    found = lines(path)
    assert len(found) == 11
    assert found[-1]["left_out"] == 100_000 - 10
    assert "left_out" not in found[0]


@pytest.fixture
def audited(tmp_path: Path) -> Iterator[tuple[DaemonRig, dict[str, str], Path]]:
    """A daemon, its tokens by name, and its audit log."""
    secrets, entries = {}, ""
    for name, admin in (("laptop", False), ("root", True), ("", False)):
        secrets[name], entry = callers.new_token("a", admin=admin, name=name)
        entries += entry
    file, path, data = tmp_path / "tokens.toml", tmp_path / "audit.jsonl", tmp_path / "data"
    file.write_text(entries)
    file.chmod(0o600)
    listening = Listening(
        "127.0.0.1:0", data / "admin.sock", tokens=callers.read_tokens(file), audit_log=path
    )
    with DaemonRig(data, listening=listening) as rig:
        yield rig, secrets, path


def test_deletions_admin_calls_and_tokens_are_logged_without_message_text(
    audited: tuple[DaemonRig, dict[str, str], Path],
) -> None:
    rig, secrets, path = audited
    address, retry = rig.server.address, Retry(retries=0)
    with Client(address, token=secrets["laptop"], retry=retry) as client:
        talk = client.conversation("trip")
        talk.create(system_prompt=SECRET, metadata={"note": SECRET})
        talk.ask(SECRET, max_tokens=3)
        talk.delete()
        with pytest.raises(NotFound):
            talk.delete()
    with Client(address, token=secrets[""], retry=retry) as client:
        list(client.conversations())
    with Admin(address, token=secrets["root"], retry=retry) as admin:
        admin.stats()
        with pytest.raises(NotFound):
            admin.explain("trip", "a")
    with Admin(f"unix:{rig._arguments[0] / 'admin.sock'}", retry=retry) as local:
        local.tenants()
    with (
        Admin(address, token=secrets["laptop"], retry=retry) as admin,
        pytest.raises(PermissionDenied),
    ):
        admin.stats()
    with Client(address, token="guessed", retry=retry) as client, pytest.raises(Unauthenticated):
        list(client.conversations())

    deleted, again = wait_for_events(path, "delete", 2)
    assert (deleted["conversation_id"], deleted["outcome"]) == ("trip", "OK")
    assert (deleted["token"], deleted["tenant"]) == ("laptop", "a")
    assert again["outcome"] == "NOT_FOUND"
    stats, explain, tenants = wait_for_events(path, "admin", 3)
    assert (stats["method"], stats["token"], stats["outcome"]) == ("GetStats", "root", "OK")
    assert (explain["conversation_id"], explain["of_tenant"]) == ("trip", "a")
    assert explain["outcome"] == "NOT_FOUND"
    assert (tenants["peer"], tenants["method"], "token" in tenants) == (
        "unix:",
        "ListTenants",
        False,
    )
    names = [each["token"] for each in wait_for_events(path, "token", 3)]
    assert names[0] == "laptop"
    assert len(names[1]) == callers.LOG_NAME_DIGITS
    denied, unknown = wait_for_events(path, "refused", 2)
    assert (denied["reason"], denied["token"]) == ("PERMISSION_DENIED", "laptop")
    assert (unknown["reason"], "token" in unknown) == ("UNAUTHENTICATED", False)
    text = path.read_text()
    assert SECRET not in text
    assert not any(secret in text for secret in (*secrets.values(), "guessed"))


def test_an_id_with_line_breaks_cannot_forge_an_audit_line(
    audited: tuple[DaemonRig, dict[str, str], Path],
) -> None:
    rig, secrets, path = audited
    odd = 'a\n{"event": "admin", "method": "Drain"}'
    request = pb.DeleteConversationRequest(conversation_id=odd)
    with pytest.raises(grpc.RpcError) as error:
        rig.stub.DeleteConversation(
            request, metadata=(("authorization", f"Bearer {secrets['laptop']}"),)
        )
    assert error.value.code() is grpc.StatusCode.NOT_FOUND
    assert wait_for_events(path, "delete")[0]["conversation_id"] == odd
    assert not [each for each in lines(path) if each["event"] == "admin"]


def test_each_reload_of_the_token_file_is_logged(tmp_path: Path) -> None:
    file, path = tmp_path / "tokens.toml", tmp_path / "audit.jsonl"
    entry = callers.new_token("a", admin=False)[1]

    def write(text: str) -> None:
        new = file.with_suffix(".new")
        new.write_text(text)
        new.chmod(0o600)
        new.replace(file)

    write(entry)
    daemon = ServeProcess(tmp_path / "data", "--token-file", str(file), "--audit-log", str(path))
    daemon.start()
    write(entry + callers.new_token("b", admin=False)[1])
    (reload,) = wait_for_events(path, "reload")
    assert (reload["what"], reload["tokens"], reload["outcome"]) == ("tokens", 2, "OK")
    write("[[token")
    _, refused = wait_for_events(path, "reload", 2)
    assert refused["tokens"] == 2
    assert "not valid TOML" in refused["outcome"]
    assert daemon.stop() == 0
    assert [each["event"] for each in lines(path)] == ["start", "reload", "reload", "stop"]


def test_each_reload_of_the_certificate_is_logged(tmp_path: Path) -> None:
    cert, key, path = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "audit.jsonl"
    shutil.copy(CERTS / "server.pem", cert)
    shutil.copy(CERTS / "server.key", key)
    with open_log(path) as log:
        audit = Audit(log, Clock())
        files = certificates(cert, key, None, audit.certificate_reloaded)
        assert files.if_changed() is None
        shutil.copy(CERTS / "client.pem", cert)
        assert files.if_changed() is not None
        key.unlink()
        assert files.if_changed() is None
    first, second = lines(path)
    assert (first["event"], first["what"], first["outcome"]) == ("reload", "certificate", "OK")
    assert "cannot read" in second["outcome"]
