"""The HTTP certificate is replaced while the daemon runs: new connections get the new certificate."""

from __future__ import annotations

import http.client
import json
import shutil
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from pensieve.api.http.listener import tls_context
from pensieve.errors import ConfigError
from tests.api.http.rig_http import http_rig
from tests.conversations.rig_daemon import wait_for

CERTS = Path(__file__).parents[2] / "guard" / "certs"


class TlsServer(NamedTuple):
    port: int
    cert: Path
    key: Path
    ca: Path
    audit_log: Path

    def connection(self, name: str = "client") -> http.client.HTTPSConnection:
        context = ssl.create_default_context(cafile=str(CERTS / "ca.pem"))
        context.load_cert_chain(CERTS / f"{name}.pem", CERTS / f"{name}.key")
        return http.client.HTTPSConnection("localhost", self.port, timeout=30, context=context)

    def served_certificate(self) -> bytes:
        """Return the certificate that a new connection gets, after an answered request."""
        connection = self.connection()
        connection.connect()
        assert isinstance(connection.sock, ssl.SSLSocket)
        found = connection.sock.getpeercert(binary_form=True)
        assert found is not None
        assert status(connection) == 200
        connection.close()
        return found

    def outcomes(self) -> list[str]:
        lines = [json.loads(each) for each in self.audit_log.read_text().splitlines()]
        return [each["outcome"] for each in lines if each["event"] == "reload"]


def status(connection: http.client.HTTPConnection) -> int:
    connection.request("GET", "/health")
    answer = connection.getresponse()
    answer.read()
    return answer.status


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TlsServer]:
    cert, key, ca = (tmp_path / name for name in ("cert.pem", "key.pem", "ca.pem"))
    for source, copy in (("server.pem", cert), ("server.key", key), ("ca.pem", ca)):
        shutil.copy(CERTS / source, copy)
    audit_log = tmp_path / "audit.jsonl"
    tls = {"tls_cert": cert, "tls_key": key, "tls_client_ca": ca, "audit_log": audit_log}
    with http_rig(tmp_path / "data", http=tls) as rig:
        port = int(rig.url.rpartition(":")[2])
        yield TlsServer(port, cert, key, ca, audit_log)


def test_new_connections_get_the_current_certificate(server: TlsServer) -> None:
    before = server.served_certificate()
    connected = server.connection()
    assert status(connected) == 200
    shutil.copy(CERTS / "client.pem", server.cert)  # for a moment, the key does not match
    assert server.served_certificate() == before
    shutil.copy(CERTS / "client.key", server.key)
    after = server.served_certificate()
    assert after == ssl.PEM_cert_to_DER_cert((CERTS / "client.pem").read_text())
    assert after != before
    assert status(connected) == 200
    connected.close()
    server.cert.unlink()
    assert server.served_certificate() == after
    wait_for(lambda: len(server.outcomes()) == 3)
    first, second, third = server.outcomes()
    assert first.startswith("cannot use ")
    assert second == "OK"
    assert third.startswith("cannot use ")


def test_client_certificates_are_checked_with_the_current_ca(server: TlsServer) -> None:
    shown = server.served_certificate()
    server.ca.write_text("no certificate")
    assert server.served_certificate() == shown
    shutil.copy(CERTS / "server.pem", server.ca)  # did not sign the client's certificate
    with pytest.raises((ssl.SSLError, ConnectionError)):
        server.served_certificate()
    shutil.copy(CERTS / "ca.pem", server.ca)
    assert server.served_certificate() == shown


@pytest.mark.parametrize("broken", ["cert", "key", "ca"])
def test_unusable_certificate_files_are_refused_at_start(tmp_path: Path, broken: str) -> None:
    paths = {"cert": CERTS / "server.pem", "key": CERTS / "server.key", "ca": CERTS / "ca.pem"}
    tls_context(paths["cert"], paths["key"], paths["ca"])
    paths[broken] = tmp_path / "broken.pem"
    for text in (None, "no certificate"):
        if text is not None:
            paths[broken].write_text(text)
        with pytest.raises(ConfigError, match="cannot use"):
            tls_context(paths["cert"], paths["key"], paths["ca"])
