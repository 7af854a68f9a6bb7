"""A rank on another machine: it connects, computes, is killed in the middle of turns, and connects again."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pensieve.client import Client, Retry
from tests import fork_server
from tests.conversations.rig import Reference, write_model
from tests.conversations.rig_daemon import ServeProcess, wait_for
from tests.newcomer import free_port
from tests.text.families import QWEN_2_5

REPOSITORY = Path(__file__).parents[2]
SIZES = ("--device-cache", "480t", "--host-cache", "480t", "--threads", "1")
LIMITS: dict[str, dict[str, Any]] = {
    "config": {"iteration_seconds_max": 20.0},
    "settings": {"chunk_tokens": "8"},
}
TALKS = 6
NAMESPACE, HERE, THERE = f"pensieve-{os.getpid()}", "10.91.7.1", "10.91.7.2"

pytestmark = pytest.mark.timeout(600)


class RankProcess:
    """`pensieve rank`, started as an operator would, perhaps in another network."""

    def __init__(
        self, folder: Path, leader: str, secret: Path, log: Path, *, within: tuple[str, ...] = ()
    ) -> None:
        self.log = log
        command = [*within, sys.executable, "-m", "pensieve", "rank", str(folder)]
        command += ["--leader", leader, "--cluster-secret", str(secret), "--threads", "1"]
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                command, stderr=file, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}
            )

    def children(self) -> list[int]:
        """Return the processes that compute. `ip netns exec` adds none, because it becomes the command."""
        return fork_server.children_of(self.process.pid)

    def lines(self) -> str:
        return self.log.read_text()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


class Pair:
    """A daemon with one stage in this process's network, and a rank with the other stage."""

    def __init__(self, tmp_path: Path, host: str, within: tuple[str, ...] = ()) -> None:
        self.here = write_model(tmp_path / "model", QWEN_2_5, "deep")
        self.there = tmp_path / "elsewhere"
        shutil.copytree(self.here, self.there)
        self.secret = tmp_path / "secret"
        self.secret.write_text("f00d" * 8)
        self.secret.chmod(0o600)
        self.leader = f"{host}:{free_port()}"
        self.rank = RankProcess(
            self.there, self.leader, self.secret, tmp_path / "rank.log", within=within
        )
        stages = ("--pipeline-stages", "2", "--rank-address", self.leader)
        secret = ("--cluster-secret", str(self.secret))
        self.daemon = ServeProcess(
            tmp_path / "data",
            *(str(self.here), *stages, *secret, *SIZES),
            engine="model",
            parameters=LIMITS,
        )

    def close(self) -> None:
        for process in (self.rank.process, self.daemon.process):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()


@contextlib.contextmanager
def pair(tmp_path: Path, host: str, within: tuple[str, ...] = ()) -> Iterator[Pair]:
    found = Pair(tmp_path, host, within)
    try:
        yield found
    finally:
        found.close()


def talk_and_kill(found: Pair, *signals: signal.Signals) -> None:
    """Run conversations while the computing process there gets these signals. Every token must be right."""
    address = found.daemon.start()
    failures: list[BaseException] = []
    acknowledged = [0] * TALKS
    enough = threading.Event()

    def talk(number: int) -> None:
        try:
            with Client(address, retry=Retry(retries=1000, first_seconds=0.05)) as client:
                conversation = client.conversation(f"t{number}")
                while not enough.is_set() and acknowledged[number] < 6:
                    reply = conversation.ask("Oslo today", max_tokens=18, ignore_eos=True)
                    assert len(reply.token_ids) == 18
                    acknowledged[number] += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(TALKS)]
    for each in threads:
        each.start()
    for kill, number in enumerate(signals):
        before = sum(acknowledged)
        wait_for(lambda before=before: sum(acknowledged) >= before + 4 or failures, 200)
        (pid,) = found.rank.children()
        os.kill(pid, number)
        accepted = kill + 2
        wait_for(lambda accepted=accepted: found.rank.lines().count("accepted") >= accepted, 200)
    for each in threads:
        each.join(300)
        assert not each.is_alive()
    enough.set()
    assert not failures, failures
    reference = Reference(found.here)
    with Client(address) as client:
        counts = [
            reference.wrong_of(
                list(client.conversation(f"t{number}").messages(include_token_ids=True))
            )
            for number in range(TALKS)
        ]
    sampled, wrong, _ = (sum(column) for column in zip(*counts, strict=True))
    assert sampled == 18 * 6 * TALKS
    assert wrong == 0


def test_a_killed_remote_rank_reconnects_and_no_token_is_wrong(tmp_path: Path) -> None:
    """The computing process there ends with the engine, and with the command that has started it."""
    with pair(tmp_path, "127.0.0.1") as found:
        talk_and_kill(found, signal.SIGKILL)
        log = found.daemon.log.read_text()
        assert re.search(r"waiting at 127.0.0.1:\d+ for 1 rank from other machines", log)
        assert len(re.findall(r"connected: 1 of 1", log)) == 2
        assert len(re.findall(r"the engine is ready again", log)) == 1
        (pid,) = found.rank.children()
        found.rank.process.kill()
        found.rank.process.wait()
        wait_for(lambda: not Path(f"/proc/{pid}").exists())
        again = "restarting the engine"  # logged even if no turn runs
        wait_for(lambda: found.daemon.log.read_text().count(again) == 2)


@pytest.fixture
def other_network() -> Iterator[tuple[str, ...]]:
    """Yield the first words of a command that runs in another network namespace, linked to this one."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and iproute2")
    near, far = f"pn{os.getpid() % 100000}", f"pf{os.getpid() % 100000}"
    inside = ("ip", "netns", "exec", NAMESPACE)
    commands = (
        ("ip", "netns", "add", NAMESPACE),
        ("ip", "link", "add", near, "type", "veth", "peer", "name", far),
        ("ip", "link", "set", far, "netns", NAMESPACE),
        ("ip", "addr", "add", f"{HERE}/24", "dev", near),
        ("ip", "link", "set", near, "up"),
        (*inside, "ip", "addr", "add", f"{THERE}/24", "dev", far),
        (*inside, "ip", "link", "set", far, "up"),
        (*inside, "ip", "link", "set", "lo", "up"),
    )
    try:
        for command in commands:
            ran = subprocess.run(command, capture_output=True, text=True, check=False)
            if ran.returncode:
                pytest.skip(f"no network namespaces here: {ran.stderr.strip()}")
        yield inside
    finally:
        subprocess.run(["ip", "netns", "del", NAMESPACE], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", near], capture_output=True, check=False)


@pytest.mark.full
def test_a_rank_in_another_network_computes_the_same_tokens(
    tmp_path: Path, other_network: tuple[str, ...]
) -> None:
    """The rank is killed, or stopped. A stopped rank counts as hanging, and is killed, too."""
    with pair(tmp_path, HERE, other_network) as found:
        talk_and_kill(found, signal.SIGKILL, signal.SIGSTOP)
        assert found.daemon.stop() == 0
        wait_for(lambda: found.rank.lines().count("the engine is gone") == 3)
        assert found.rank.stop() == 0
