"""Who can reach a daemon, who counts as its operator, and what errors reveal to clients."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import grpc
import pytest

from pensieve import errors
from pensieve.api.grpc import translate
from pensieve.errors import ConfigError
from pensieve.guard import callers
from pensieve.guard.client_errors import client_text
from pensieve.guard.exposure import Listening, check_exposure
from pensieve.v1 import conversation_pb2 as pb
from tests.conversations.rig_daemon import DaemonRig
from tests.store.faulty import FaultyDriver, writer_of

PEM = Path("some.pem")
TOKENS = (callers.Token(b"x" * 32),)


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:0", "127.8.9.10:50051", "localhost:1", "[::1]:65535", "LocalHost:0", ""],
)
def test_a_loopback_address_needs_no_tls_or_tokens(address: str) -> None:
    check_exposure(Listening(address))


@pytest.mark.parametrize(
    "address",
    [
        *("127.evil.example:1", "127.0.0.1.evil.example:1", "localhost.evil.example:1"),
        *("0.0.0.0:1", "[::]:1", "10.0.0.1:1", "[2001:db8::1]:1", "127.1:1", "localhos:1"),
    ],
)
def test_an_address_reachable_from_other_machines_needs_tls_and_tokens(address: str) -> None:
    with pytest.raises(ConfigError, match="is reachable from other machines"):
        check_exposure(Listening(address))
    check_exposure(Listening(address, insecure=True))
    check_exposure(Listening(address, tls_cert=PEM, tls_key=PEM, tokens=TOKENS))
    check_exposure(Listening(address, tls_cert=PEM, tls_key=PEM, tls_client_ca=PEM))
    with pytest.raises(ConfigError, match="is reachable from other machines"):
        check_exposure(Listening(address, tls_cert=PEM, tls_key=PEM))


@pytest.mark.parametrize("insecure", [False, True])
@pytest.mark.parametrize(
    "address",
    [
        *("unix:1", "unix:/tmp/x:1", "unix:relative:1", "UNIX:1", "unix-abstract:1", "vsock:1"),
        *("unix-abstract:name:1", "ipv4:127.0.0.1:1", "dns:///localhost:1", "[::1:1", "::1:1"),
        *("127.0.0.1", "127.0.0.1:-1", "127.0.0.1:99999", "127.0.0.1:٣", ":1", "a b:1", "[unix]:1"),
    ],
)
def test_an_address_without_a_host_is_refused_even_with_insecure(
    address: str, insecure: bool
) -> None:
    """A peer on a UNIX socket counts as the operator. So only the socket of the data folder is allowed."""
    with pytest.raises(ConfigError, match="is not HOST:PORT"):
        check_exposure(Listening(address, insecure=insecure))


@pytest.mark.parametrize("given", [{"tls_client_ca": PEM}, {"tls_key": PEM}])
@pytest.mark.parametrize("insecure", [False, True])
def test_incomplete_tls_options_are_refused(given: dict[str, Any], insecure: bool) -> None:
    flag = "--" + next(iter(given)).replace("_", "-")
    with pytest.raises(ConfigError, match=f"{flag} needs --tls-cert"):
        check_exposure(Listening("127.0.0.1:0", insecure=insecure, **given))
    with pytest.raises(ConfigError, match="--tls-cert needs --tls-key"):
        check_exposure(Listening("127.0.0.1:0", insecure=insecure, tls_cert=PEM))


@pytest.mark.parametrize(
    "kind",
    [
        *(errors.StoreUnavailable, errors.StoreError, errors.StoreCorrupt, errors.StoreLocked),
        *(errors.ConfigError, errors.ModelError, errors.DeviceError, errors.AddressInUse),
    ],
)
def test_clients_see_no_file_paths_in_errors_of_the_server(kind: type[Any]) -> None:
    error = kind("the history /var/lib/pensieve/history.db: disk I/O error")
    status = translate.status(error)
    assert "/var" not in client_text(error)
    assert b"/var" not in status.SerializeToString()
    assert client_text(error)


def test_a_disk_error_is_reported_without_its_path_and_logged_with_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with DaemonRig(tmp_path / "data") as rig, caplog.at_level(logging.ERROR, "pensieve"):
        rig.ask("c", "hello", sampling=pb.Sampling(max_tokens=4))
        writer = writer_of(rig.daemon.store)
        faults = FaultyDriver(writer.driver, 10, False, True)

        async def plant() -> None:
            def swap() -> None:
                writer.driver = faults
                writer._discard()

            await rig.daemon.threads.in_store("", swap)

        rig.call(plant())
        faults.arm(1)
        with pytest.raises(grpc.RpcError) as error:
            rig.stub.CreateConversation(pb.CreateConversationRequest(conversation_id="d"))
        faults.heal()
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        sent_text = str(error.value.details()) + str(error.value.trailing_metadata())
        assert str(tmp_path) not in sent_text
        assert str(tmp_path) in caplog.text
