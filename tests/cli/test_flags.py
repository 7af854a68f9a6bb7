"""A flag has an effect or is refused; no flag is silently ignored."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pensieve.cli.main import main
from pensieve.client import Client
from tests.client.test_loading import loading
from tests.conversations.rig_daemon import ECHO, DaemonRig, ServeProcess

CERTS = Path(__file__).parent.parent / "guard" / "certs"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    process = ServeProcess(tmp_path_factory.mktemp("serve") / "data")
    process.start()
    yield process
    assert process.stop() == 0


@pytest.fixture(autouse=True)
def own_data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PENSIEVE_DATA", str(tmp_path / "own"))


def asked(daemon: ServeProcess, conversation: str) -> list[str]:
    with Client(daemon.address) as client:
        messages = client.conversation(conversation).messages()
        return [each.text for each in messages if each.role == "user"]


# -- what a running daemon has already decided --


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["Qwen/Qwen3-0.6B"], "MODEL"),
        (["--device-cache", "2GiB"], "--device-cache"),
        (["some/model", "--dtype", "float32"], "MODEL, --dtype"),
    ],
)
def test_a_model_is_refused_for_a_daemon_that_already_has_one(
    daemon: ServeProcess, flags: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", "--address", daemon.address, *flags, "-q", "Hello."]) == 2
    told = capsys.readouterr()
    assert told.err.startswith(f"pensieve: {named}: the daemon at {daemon.address} has its own")
    assert told.out == ""


def test_a_model_from_the_environment_is_not_refused(
    daemon: ServeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSIEVE_MODEL", "some/model")
    assert main(["chat", "--address", daemon.address, "-q", "Hello.", "--max-tokens", "3"]) == 0


def test_chat_uses_the_daemon_that_holds_its_data_folder(
    daemon: ServeProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["chat", "--data", str(daemon.data), "--conversation", "beside", "--max-tokens", "3"]
    assert main([*common, "-q", "Hello there."]) == 0
    said = (
        f"using pensieve serve, pid {daemon.process.pid}, which has the data folder {daemon.data}"
    )
    assert said in capsys.readouterr().err
    assert asked(daemon, "beside") == ["Hello there."]
    assert main([*common, "some/model", "-q", "Hello."]) == 2
    assert "MODEL: the daemon at unix:" in capsys.readouterr().err


def test_naming_the_daemons_own_model_is_accepted(
    daemon: ServeProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["chat", "--data", str(daemon.data), "--conversation", "named", "--max-tokens", "3"]
    with Client(daemon.address) as client:
        model = client.server_info().model
    assert main([*common, model, "-q", "Hello there."]) == 0
    assert main([*common, model, "--policy", "lru", "-q", "Hello there."]) == 2
    assert "--policy: the daemon at unix:" in capsys.readouterr().err


@pytest.mark.parametrize("has_daemon", [True, False])
def test_tls_and_token_require_an_address(
    daemon: ServeProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str], has_daemon: bool
) -> None:
    data = daemon.data if has_daemon else tmp_path
    assert main(["chat", "--data", str(data), "--tls", "--token", "x", "-q", "Hello."]) == 2
    assert "--token, --tls: of no use without --address" in capsys.readouterr().err


def test_clients_wait_for_a_daemon_that_loads_its_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with loading(tmp_path / "data") as (rig, let_go):
        threading.Timer(1.0, let_go).start()
        common = ["chat", "--address", rig.server.address, "--max-tokens", "3"]
        assert main([*common, "-q", "Hello."]) == 0
    assert "is not ready; retrying" in capsys.readouterr().err


def test_stats_are_never_taken_from_another_daemon(daemon: ServeProcess, tmp_path: Path) -> None:
    """The other daemon's socket is in the default data folder."""
    with DaemonRig(tmp_path / "data", program=ECHO) as rig:
        given = subprocess.run(
            [sys.executable, "-m", "pensieve", "chat", "--address", rig.server.address],
            input="/stats\n",
            env={**os.environ, "PENSIEVE_DATA": str(daemon.data)},
            capture_output=True,
            text=True,
            check=False,
        )
    assert "\ndaemon        its figures need an admin token" in given.stdout
    assert "device cache" not in given.stdout


def test_the_socket_of_a_killed_daemon_is_ignored(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSIEVE_ENGINE", "echo")
    process = ServeProcess(tmp_path / "data")
    process.start()
    process.kill()
    assert (process.data / "admin.sock").exists()
    flags = ["--device-cache", "2000t", "--host-cache", "0t", "--max-tokens", "3"]
    assert main(["chat", "--data", str(process.data), *flags, "-q", "Hello."]) == 0
    assert "which has the data folder" not in capfd.readouterr().err


def test_a_journal_is_refused_for_an_engine_without_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSIEVE_ENGINE", "echo")
    journal = tmp_path / "journal"
    data = ["--data", str(tmp_path / "data"), "--address", "127.0.0.1:0"]
    assert main(["serve", *data, "--journal", str(journal)]) == 2
    assert "journal: the echo engine writes no journal" in capfd.readouterr().err
    assert not journal.exists()


# -- messages --


def test_a_dash_reads_the_message_from_standard_input(
    daemon: ServeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ["chat", "--address", daemon.address, "--max-tokens", "3"]
    text = "Two lines,\nGrüße.\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert main([*common, "--conversation", "piped", "-q", "-"]) == 0
    assert asked(daemon, "piped") == ["Two lines,\nGrüße."]


@pytest.mark.parametrize(
    ("given", "flags", "problem"),
    [
        (b"\xff", ["-q", "-"], "standard input is not UTF-8"),
        (b"x", ["-q", "-", "-q", "-"], "only one message can be read from standard input"),
        (b"", ["-q", "-"], "must not be empty"),
    ],
)
def test_invalid_standard_input_is_refused(
    daemon: ServeProcess,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    given: bytes,
    flags: list[str],
    problem: str,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
    assert main(["chat", "--address", daemon.address, *flags]) == 2
    assert problem in capsys.readouterr().err


def test_several_messages_are_sent_in_their_order(
    daemon: ServeProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["chat", "--address", daemon.address, "--max-tokens", "3"]
    assert main([*common, "--conversation", "both", "-q", "First.", "-q", "Second."]) == 0
    assert asked(daemon, "both") == ["First.", "Second."]
    with Client(daemon.address) as client:
        messages = client.conversation("both").messages()
        replies = [each.text for each in messages if each.role == "assistant"]
    assert capsys.readouterr().out == "".join(f"{reply}\n" for reply in replies)


def test_piped_lines_print_only_the_replies(
    daemon: ServeProcess,
) -> None:
    talk = ["--address", daemon.address, "--conversation", "lines", "--max-tokens", "3"]
    told = subprocess.run(
        [sys.executable, "-m", "pensieve", "chat", *talk],
        input="First.\nSecond.\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ},
    )
    with Client(daemon.address) as client:
        messages = client.conversation("lines").messages()
        replies = [each.text for each in messages if each.role == "assistant"]
    assert len(replies) == 2
    assert told.stdout == "".join(f"{reply}\n" for reply in replies)


def test_a_system_prompt_is_refused_for_a_conversation_with_another_one(
    daemon: ServeProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["chat", "--address", daemon.address, "--max-tokens", "3", "--conversation", "told"]
    assert main([*common, "--system", "Be brief.", "-q", "Hello.", "-q", "Again."]) == 0
    with Client(daemon.address) as client:
        first, *_ = client.conversation("told").messages()
    assert (first.role, first.text) == ("system", "Be brief.")
    assert main([*common, "--system", "Be brief.", "-q", "More."]) == 0
    capsys.readouterr()
    assert main([*common, "--system", "Be long.", "-q", "Hello."]) == 2
    told = capsys.readouterr().err
    assert "--system: the conversation told exists already, with another system prompt" in told
    assert asked(daemon, "told") == ["Hello.", "Again.", "More."]


# -- how a daemon is reached --


def test_unknown_and_missing_tokens_have_different_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tokens.toml"
    assert main(["token", "--file", str(file)]) == 0
    process = ServeProcess(tmp_path / "data", "--token-file", str(file))
    common = ["chat", "--address", process.start(), "-q", "Hello."]
    capsys.readouterr()
    for flags, problem in (
        (
            ["--token", "guess"],
            "pensieve: the token is not known to this daemon. Pass the client's token with "
            "--token, or set PENSIEVE_TOKEN\n",
        ),
        (
            [],
            "pensieve: a token is needed. Pass the client's token with --token, or set "
            "PENSIEVE_TOKEN\n",
        ),
    ):
        assert main([*common, *flags]) == 1
        assert capsys.readouterr().err == problem
    assert process.stop() == 0


def test_a_tls_mismatch_is_explained(
    daemon: ServeProcess, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pem, key = CERTS / "server.pem", CERTS / "server.key"
    secure = ServeProcess(tmp_path / "data", "--tls-cert", str(pem), "--tls-key", str(key))
    ports = {
        "tls": secure.start().rsplit(":", 1)[1],
        "plain": daemon.address.rsplit(":", 1)[1],
    }
    trusted = ["--tls-ca", str(CERTS / "ca.pem")]
    for place, flags, problem in (
        ("tls", [], "closed the connection at once. Perhaps the daemon requires TLS"),
        ("plain", trusted, "does not speak TLS"),
        ("plain", ["--tls"], "does not speak TLS"),
        ("tls", ["--tls"], "is not trusted"),
    ):
        address = f"localhost:{ports[place]}"
        assert main(["chat", "--address", address, *flags, "-q", "Hello."]) == 1
        told = capfd.readouterr().err.splitlines()[-1]
        assert told.startswith(f"pensieve: no daemon can be reached at {address}: ")
        assert problem in told
    address = f"localhost:{ports['tls']}"
    assert main(["chat", "--address", address, *trusted, "-q", "Hello.", "--max-tokens", "3"]) == 0
    assert secure.stop() == 0


def test_an_address_without_a_daemon_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--address", "127.0.0.1:1", "-q", "Hello."]) == 1
    told = capsys.readouterr().err
    assert "nothing listens at 127.0.0.1:1" in told
    assert "Start a daemon with `pensieve serve`" in told


def test_the_unix_socket_ignores_tls_settings(
    daemon: ServeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSIEVE_TLS_CA", str(CERTS / "ca.pem"))
    assert main(["admin", "stats", "--data", str(daemon.data)]) == 0
