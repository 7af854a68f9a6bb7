"""`pensieve serve`, `admin` and `chat --address` as programs."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from pensieve.api.grpc.admin_socket import socket_path
from pensieve.cli.main import main
from pensieve.client import Client, Conversation, Retry
from pensieve.errors import ConfigError, NotFound, PermissionDenied, QueueFull, Unauthenticated
from pensieve.guard import callers
from pensieve.launch import systemd
from tests.conversations.rig_daemon import ServeProcess, wait_for

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    process = ServeProcess(tmp_path_factory.mktemp("serve") / "data", engine="echo:0.002")
    process.start()
    yield process
    assert process.stop() == 0


def run(*arguments: str) -> int:
    return main(list(arguments))


def test_chat_talks_to_a_daemon(daemon: ServeProcess, capsys: pytest.CaptureFixture[str]) -> None:
    common = ("chat", "--address", daemon.address, "--conversation", "talk", "--max-tokens", "9")
    assert run(*common, "-q", "Hello there.") == 0
    first = capsys.readouterr().out
    assert run(*common, "-q", "And now?", "--stats") == 0
    told = capsys.readouterr()
    assert "0 recomputed" in told.err
    with Client(daemon.address) as client:
        texts = [message.text for message in client.conversation("talk").messages()]
    assert [texts[1] + "\n", texts[3] + "\n"] == [first, told.out]


def test_a_session_with_a_daemon(daemon: ServeProcess) -> None:
    lines = ("/new a", "Hello there.", "/stats", "/fork b", "/undo", "/list", "/delete", "/bye")
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "pensieve",
            "chat",
            "--data",
            str(daemon.data),
            "--max-tokens",
            "6",
        ],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "PENSIEVE_DATA": str(daemon.data)},
    )
    assert process.returncode == 0, process.stderr
    assert "conversation b" in process.stdout
    assert "the last turn is removed" in process.stdout
    assert "\nlast reply " in process.stdout
    with Client(daemon.address) as client:
        names = {state.conversation_id for state in client.conversations()}
    assert "a" in names
    assert "b" not in names


def test_ctrl_c_ends_the_turn_and_not_the_program(daemon: ServeProcess) -> None:
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "pensieve", "chat", "--address", daemon.address),
            *("--conversation", "stopped", "--max-tokens", "1000000"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PENSIEVE_DATA": str(daemon.data)},
    )
    assert process.stdin is not None
    # The echo engine's replies have random lengths. Find a prompt whose reply is long enough.
    with Client(daemon.address) as client:
        probe = client.conversation()
        text = next(
            text
            for number in range(200)
            if len(probe.ask(text := f"say {number}", max_tokens=99).token_ids) == 99
            or probe.rewind(0) is None
        )
    process.stdin.write(text + "\n")
    process.stdin.flush()
    with Client(daemon.address) as client:
        conversation = client.conversation("stopped")

        def running() -> bool:
            return "stopped" in {each.conversation_id for each in client.conversations()} and bool(
                conversation.get().running_turn_id
            )

        wait_for(lambda: running() or _said(conversation))
        process.send_signal(signal.SIGINT)
        wait_for(lambda: _said(conversation))
    out, err = process.communicate("/bye\n", timeout=120)
    assert process.returncode == 0, err
    assert "> " not in out  # no prompt, because input is not a terminal


def _said(conversation: Conversation) -> bool:
    try:
        return len(list(conversation.messages())) == 2
    except NotFound:  # its first message has not arrived yet
        return False


def test_admin_shows_figures(daemon: ServeProcess, capsys: pytest.CaptureFixture[str]) -> None:
    with Client(daemon.address) as client:
        client.conversation("shown").ask("hello", max_tokens=100, ignore_eos=True)
    where = ("--data", str(daemon.data))
    assert run("admin", "stats", *where, "--json") == 0
    stats = json.loads(capsys.readouterr().out)
    assert stats["serving"] is True
    assert stats["device"]["pages_used"] > 0
    assert run("admin", "stats", *where) == 0
    assert "serving, up" in capsys.readouterr().out
    assert run("admin", "conversations", *where, "--limit", "1000", "--json") == 0
    listed = json.loads(capsys.readouterr().out)["conversations"]
    assert "shown" in [each["conversation_id"] for each in listed]
    assert run("admin", "conversations", *where, "--least-valuable") == 0
    assert "shown" in capsys.readouterr().out
    assert run("admin", "evict", "shown", *where) == 0
    assert capsys.readouterr().out == "4 chunks dropped\n"
    assert run("admin", "explain", "shown", *where) == 0
    told = capsys.readouterr().out
    assert "nothing is cached; the next turn" in told
    assert "4 chunks, 0 to 3, dropped on request" in told
    assert run("admin", "check", *where) == 0
    assert capsys.readouterr().out == "nothing is wrong\n"
    assert run("admin", "explain", "nobody", *where) == 1
    assert "there is no conversation" in capsys.readouterr().err


def test_socket_and_data_folder_are_private_to_their_user(daemon: ServeProcess) -> None:
    assert stat.S_IMODE((daemon.data / "admin.sock").stat().st_mode) == 0o600
    assert stat.S_IMODE(daemon.data.stat().st_mode) == 0o700


def test_a_second_daemon_is_refused_the_folder_and_the_port(
    daemon: ServeProcess, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("serve", "--data", str(daemon.data), "--address", "127.0.0.1:0") == 3
    assert "pensieve serve" in capfd.readouterr().err
    arguments = ("--data", str(tmp_path / "other"))
    assert run("serve", *arguments, "--address", daemon.address) == 5
    assert "cannot listen on" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (("--address", "0.0.0.0:0"), 3, "is reachable from other machines"),
        (("--address", "nonsense"), 3, "is not HOST:PORT"),
        (("--token-file", "/nonexistent"), 3, "cannot read /nonexistent"),
        (("/nonexistent/model",), 4, "there is no model folder"),
        (("--device-cache", "1t"), 3, "4 are needed"),
    ],
)
def test_invalid_serve_arguments_give_a_one_line_error(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    code: int,
    problem: str,
) -> None:
    given = [] if "--address" in arguments else ["--address", "127.0.0.1:0"]
    assert run("serve", "--data", str(tmp_path / "data"), *given, *arguments) == code
    line = capfd.readouterr().err.strip().splitlines()[-1]
    assert problem in line
    assert line.startswith("pensieve: ")


def test_sigterm_drains_and_a_second_sigterm_stops_at_once(tmp_path: Path) -> None:
    process = ServeProcess(tmp_path / "data", "--drain-timeout", "60", engine="echo:0.01")
    address = process.start()
    with Client(address, retry=Retry(retries=0)) as client:
        turn = client.conversation("c").send("hi", max_tokens=50, ignore_eos=True)
        events = iter(turn)
        next(events)
        process.process.send_signal(signal.SIGTERM)
        assert list(events)  # the running turn ends normally, in any number of pieces
        assert len(turn.reply.token_ids) == 50
    assert process.process.wait(120) == 0
    process.start()
    with Client(process.address, retry=Retry(retries=0)) as client:
        events = iter(client.conversation("d").send("hi", max_tokens=10**6, ignore_eos=True))
        next(events)
        process.process.send_signal(signal.SIGTERM)
        wait_for(lambda: process.log.read_text().count("draining") == 2)  # once in each of its runs
        process.process.send_signal(signal.SIGTERM)
        assert process.process.wait(120) == 0
    process.start()
    with Client(process.address) as client:
        assert len(list(client.conversation("c").messages())) == 2
        assert list(client.conversation("d").messages()) == []
    assert process.stop() == 0


def test_tokens_keep_tenants_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens: dict[str, str] = {}
    file = tmp_path / "tokens.toml"
    for name, flags in {
        "a": ("--tenant", "a"),
        "b": ("--tenant", "b"),
        "root": ("--admin",),
    }.items():
        assert run("token", *flags, "--file", str(file)) == 0
        tokens[name] = capsys.readouterr().out.strip()
    process = ServeProcess(tmp_path / "data", "--token-file", str(file))
    address = process.start()
    with (
        Client(address, token=tokens["a"]) as a,
        Client(address, token=tokens["b"]) as b,
        Client(address) as stranger,
        Client(address, token="guess") as guesser,
    ):
        a.conversation("same").ask("the secret of a", max_tokens=5)
        b.conversation("same").ask("the secret of b", max_tokens=5)
        assert next(m.text for m in a.conversation("same").messages()) == "the secret of a"
        assert next(m.text for m in b.conversation("same").messages()) == "the secret of b"
        assert len(list(a.conversations())) == len(list(b.conversations())) == 1
        for nobody in (stranger, guesser):
            with pytest.raises(Unauthenticated):
                nobody.conversation("same").get()
            assert nobody.healthy()
    from pensieve.client.admin import Admin

    with Admin(address, token=tokens["a"]) as admin, pytest.raises(PermissionDenied):
        admin.stats()
    with Admin(address, token=tokens["root"]) as admin:
        assert {(each.tenant, each.conversation_id) for each in admin.cached()} == {
            ("a", "same"),
            ("b", "same"),
        }
    assert process.stop() == 0
    assert "secret" not in process.log.read_text()


def test_a_token_file_that_others_may_write_to_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text('[[token]]\nsha256 = "' + "0" * 64 + '"\n')
    data = str(tmp_path / "data")
    for mode in (0o646, 0o664):
        file.chmod(mode)
        assert run("serve", "--data", data, "--token-file", str(file)) == 3
        assert "chmod 644" in capfd.readouterr().err


@pytest.mark.parametrize("mode", [0o400, 0o444, 0o600, 0o644])
def test_a_token_file_may_be_read_by_others(tmp_path: Path, mode: int) -> None:
    """The file has only digests. Secrets in containers have mode 0444."""
    file = tmp_path / "tokens.toml"
    file.write_text('[[token]]\nsha256 = "' + "0" * 64 + '"\n')
    file.chmod(mode)
    assert callers.read_tokens(file)


def test_admin_without_a_daemon_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("admin", "stats", "--data", str(tmp_path)) == 3
    assert "no daemon has the data folder" in capsys.readouterr().err


def test_a_long_data_path_has_its_socket_in_the_runtime_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    assert socket_path(tmp_path) == tmp_path / "admin.sock"
    long = Path("/") / ("x" * 120)
    assert str(socket_path(long)).startswith("/run/user/1000/pensieve-")
    assert socket_path(long) != socket_path(long / "y")
    assert str(socket_path(Path("/a,b"))).startswith("/run/user/1000/pensieve-")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    with pytest.raises(ConfigError):
        socket_path(long)


@pytest.mark.executed
def test_systemd_is_notified_of_ready_and_stopping(tmp_path: Path) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(path))
        listener.settimeout(30)
        os.environ["NOTIFY_SOCKET"] = str(path)
        try:
            process = ServeProcess(tmp_path / "data")
            process.start()
        finally:
            del os.environ["NOTIFY_SOCKET"]
        assert listener.recv(100) == b"READY=1"
        assert process.stop() == 0
        assert listener.recv(100) == b"STOPPING=1"


def test_systemd_watchdog_is_notified_while_the_service_answers(tmp_path: Path) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(path))
        listener.settimeout(30)
        told = {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "200000"}
        process = ServeProcess(tmp_path / "data", environment=told)
        heard = []
        with ThreadPoolExecutor() as pool:  # the socket's buffer takes 10 messages without a reader
            starting = pool.submit(process.start)
            while b"READY=1" not in heard:
                heard.append(listener.recv(100))
            starting.result()
        heard += [listener.recv(100) for _ in range(3)]
        assert heard.count(b"READY=1") == 1
        assert set(heard) == {b"READY=1", b"WATCHDOG=1"}
        assert process.stop() == 0
        while (last := listener.recv(100)) == b"WATCHDOG=1":
            pass
        assert last == b"STOPPING=1"


def test_a_service_whose_store_does_not_answer_does_not_notify_systemd(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[str] = []
    monkeypatch.setattr(systemd, "notify", told.append)
    monkeypatch.setenv("WATCHDOG_USEC", "1000")

    async def watch() -> None:
        answering = asyncio.Event()

        async def wait_for_store() -> None:
            await answering.wait()

        watchdog = asyncio.create_task(systemd.keep_watchdog(wait_for_store))
        await asyncio.sleep(0.05)
        assert not told
        answering.set()
        while len(told) < 3:
            await asyncio.sleep(0.001)
        watchdog.cancel()

    asyncio.run(asyncio.wait_for(watch(), 30))
    assert set(told) == {"WATCHDOG=1"}


@pytest.mark.parametrize("variables", [{}, {"WATCHDOG_USEC": "5", "WATCHDOG_PID": "1"}])
def test_no_watchdog_unless_systemd_requests_it_for_this_process(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WATCHDOG_USEC", "WATCHDOG_PID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert systemd.watchdog_seconds() is None


def test_the_doctor_reports_versions_memory_and_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["problems"] == []
    assert {"pensieve", "torch", "sqlite", "memory available", "data folder"} <= set(
        told["findings"]
    )
    assert re.match(
        "compiled for sm_|shipped for|none: |missing: ", told["findings"]["gpu kernels"]
    )
    assert re.fullmatch(
        r"(amx|(avx\d+|neon)(_bf16|_vnni)?|plain), \d+ threads|missing: .*",
        told["findings"]["cpu kernels"],
    )


def test_tls_and_client_certificates(tmp_path: Path) -> None:
    """The certificates in tests/guard/certs are valid only for localhost."""
    certs = ROOT / "tests" / "guard" / "certs"
    server = ("--tls-cert", str(certs / "server.pem"), "--tls-key", str(certs / "server.key"))
    process = ServeProcess(tmp_path / "data", *server)
    port = process.start().rsplit(":", 1)[1]
    with (
        Client(f"localhost:{port}", tls=certs / "ca.pem", timeout=120) as client,
        Client(f"localhost:{port}", retry=Retry(retries=0), timeout=5) as plain,
    ):
        assert client.conversation("c").ask("hello", max_tokens=3).revision == 1
        assert not plain.healthy()
    assert process.stop() == 0

    process = ServeProcess(tmp_path / "data", *server, "--tls-client-ca", str(certs / "ca.pem"))
    port = process.start().rsplit(":", 1)[1]
    ca, key, chain = (
        (certs / name).read_bytes() for name in ("ca.pem", "client.key", "client.pem")
    )
    known = grpc.ssl_channel_credentials(ca, key, chain)
    with (
        Client(f"localhost:{port}", tls=known, timeout=120) as client,
        Client(f"localhost:{port}", tls=certs / "ca.pem", retry=Retry(retries=0)) as stranger,
    ):
        assert next(iter(client.conversation("c").messages())).text == "hello"
        assert not stranger.healthy()
    assert process.stop() == 0


def test_the_limits_of_a_tenant_apply(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tokens.toml"
    limits = ("--turns-max", "1", "--tokens-per-second", "200")
    assert run("token", "--tenant", "a", *limits, "--file", str(file)) == 0
    token = capsys.readouterr().out.strip()
    process = ServeProcess(tmp_path / "data", "--token-file", str(file), engine="echo:0.005")
    address = process.start()
    with Client(address, token=token, retry=Retry(retries=0)) as client:
        running = iter(client.conversation("c").send("hi", max_tokens=10**5, ignore_eos=True))
        next(running)
        with pytest.raises(QueueFull, match="1 turns at once"):
            client.conversation("d").ask("me too")
        client.conversation("c").cancel()
        list(running)
        # The tenant had saved 2000 tokens. The cancelled turn has used few of them. This turn uses more.
        client.conversation("d").ask("hello " * 10_000, max_tokens=1, ignore_eos=True)
        with pytest.raises(QueueFull, match="200 tokens per second") as error:
            client.conversation("d").ask("more")
        assert error.value.retry_after_seconds is not None
        assert error.value.retry_after_seconds > 20
    assert process.stop() == 0
