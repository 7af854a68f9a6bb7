"""A history service that hangs is killed, so that its actor ends; one that answers anything is not."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pensieve.cluster.child_process import ChildProcess
from pensieve.cluster.locate import channel_to, trusting
from pensieve.cluster.settings import history_command, settings_of
from pensieve.cluster.watchdog import CHECKS_MAX, Watchdog

CERTS = Path(__file__).parent.parent / "guard" / "certs"
TLS = {"tls_cert": str(CERTS / "server.pem"), "tls_key": str(CERTS / "server.key")}


async def started(folder: Path, more: Mapping[str, Any]) -> tuple[ChildProcess, str]:
    settings = settings_of({"history_port": 0, "local": True, "history_serve": more})
    child = ChildProcess(history_command(settings, "localhost", str(folder)))
    ((scheme, place),) = (await child.start(60.0)).items()
    return child, f"{scheme}://{place}"


@pytest.mark.parametrize(("more", "scheme"), [({}, "history"), (TLS, "historys")])
def test_one_that_hangs_is_killed(tmp_path: Path, more: Mapping[str, Any], scheme: str) -> None:
    async def scenario() -> None:
        child, address = await started(tmp_path, more)
        assert address.startswith(f"{scheme}://")
        channel = channel_to(address, lambda: trusting(str(CERTS / "ca.pem")))
        watchdog = Watchdog(child, channel)
        lost = asyncio.create_task(child.lost())
        await watchdog.look(60.0)
        os.kill(child.pid, signal.SIGSTOP)
        for _ in range(CHECKS_MAX - 1):
            await watchdog.look(0.05)
        os.kill(child.pid, signal.SIGCONT)
        await watchdog.look(60.0)  # in time: it begins to count anew
        os.kill(child.pid, signal.SIGSTOP)
        for _ in range(CHECKS_MAX):
            assert child.exit_code is None
            await watchdog.look(0.05)
        assert await asyncio.wait_for(lost, 60.0), "its actor ends, and Ray starts another"
        assert child.exit_code == -signal.SIGKILL
        await channel.close()

    asyncio.run(scenario())


def test_one_that_never_answered_is_left_alone(tmp_path: Path) -> None:
    """The fault may be the checker's: here it does not know the service's authority."""

    async def scenario() -> None:
        child, address = await started(tmp_path, TLS)
        channel = channel_to(address, lambda: trusting(""))
        watchdog = Watchdog(child, channel)
        for _ in range(2 * CHECKS_MAX):
            await watchdog.look(0.2)
        await channel.close()
        await child.stop(60.0)
        assert child.exit_code == 0, "it was killed"

    asyncio.run(scenario())


def test_a_refusal_is_an_answer(tmp_path: Path) -> None:
    """A program that speaks gRPC and knows no health."""
    code = (
        "import grpc, sys; from concurrent.futures import ThreadPoolExecutor; "
        "server = grpc.server(ThreadPoolExecutor(1)); port = server.add_insecure_port('127.0.0.1:0'); "
        "server.start(); print(f'ready history://127.0.0.1:{port}', file=sys.stderr, flush=True); "
        "server.wait_for_termination()"
    )

    async def scenario() -> None:
        child = ChildProcess([sys.executable, "-c", code])
        address = (await child.start(60.0))["history"]
        channel = channel_to(f"history://{address}", lambda: trusting(""))
        watchdog = Watchdog(child, channel)
        for _ in range(CHECKS_MAX - 1):
            await watchdog.look(60.0)
        assert watchdog.has_answered
        await channel.close()
        await child.stop(60.0)

    asyncio.run(scenario())
