"""Child programs of an actor: when they are ready, and how they end or are killed with the actor."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pensieve.cluster.child_process import ChildProcess
from pensieve.errors import Unavailable
from tests.conversations.rig_daemon import wait_for

LINE = "ready grpc://127.0.0.1:7, http://127.0.0.1:8"
READY = f"import sys, time; print({LINE!r}, file=sys.stderr, flush=True); "


def program(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_start_returns_the_childs_addresses_and_stop_ends_it() -> None:
    async def scenario() -> None:
        child = ChildProcess(program(READY + "time.sleep(600)"))
        assert await child.start(60.0) == {"grpc": "127.0.0.1:7", "http": "127.0.0.1:8"}
        child.check()
        await child.stop(60.0)
        assert child.exit_code == -15
        assert not runs(child.pid)

    asyncio.run(scenario())


def test_an_unexpected_end_is_distinguished_from_a_stop() -> None:
    async def scenario() -> None:
        stopped, killed = (ChildProcess(program(READY + "time.sleep(600)")) for _ in range(2))
        for each in (stopped, killed):
            await each.start(60.0)
        ended_unexpectedly = [
            asyncio.create_task(each.ended_unexpectedly()) for each in (stopped, killed)
        ]
        await stopped.stop(60.0)
        os.kill(killed.pid, 9)
        assert await asyncio.wait_for(asyncio.gather(*ended_unexpectedly), 60.0) == [False, True]
        assert killed.end == f"the daemon ended with exit code -9: {LINE}"

    asyncio.run(scenario())


def test_stopping_a_child_twice_sends_one_signal() -> None:
    """A second signal would make a daemon interrupt its turns."""
    code = (
        "import signal; told = []; signal.signal(signal.SIGTERM, lambda *_: told.append(1)); "
        + READY
        + "time.sleep(1.5); time.sleep(1.5); sys.exit(len(told))"
    )

    async def scenario() -> None:
        child = ChildProcess(program(code))
        await child.start(60.0)
        await asyncio.gather(child.stop(60.0), child.stop(60.0))
        assert child.exit_code == 1

    asyncio.run(scenario())


def test_start_raises_the_childs_last_line_if_it_exits() -> None:
    async def scenario() -> None:
        child = ChildProcess(program("raise SystemExit('the disk is full')"))
        with pytest.raises(Unavailable, match="the daemon did not start: the disk is full"):
            await child.start(60.0)

    asyncio.run(scenario())


def test_check_raises_after_the_child_has_ended_by_itself() -> None:
    async def scenario() -> None:
        child = ChildProcess(program(READY + "sys.exit(7)"))
        await child.start(60.0)
        while child.exit_code is None:
            await asyncio.sleep(0.01)
        with pytest.raises(Unavailable, match="the daemon ended with exit code 7"):
            child.check()

    asyncio.run(scenario())


def test_a_child_that_ignores_the_signal_is_killed() -> None:
    async def scenario() -> None:
        code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        child = ChildProcess(program(code + READY + "time.sleep(600)"))
        await child.start(60.0)
        await child.stop(0.1)
        assert child.exit_code == -9

    asyncio.run(scenario())


class FullDisk:
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_the_child_keeps_running_if_its_log_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the thread that started the child ended, the kernel would kill the child."""
    code = "[print('a line', file=sys.stderr, flush=True) for _ in range(3)]; "

    async def scenario() -> None:
        child = ChildProcess(program(READY + code + "time.sleep(600)"))
        monkeypatch.setattr(sys, "stderr", FullDisk())
        await child.start(60.0)
        while len(child._lines) < 3:
            await asyncio.sleep(0.01)
        monkeypatch.undo()
        assert runs(child.pid)
        child.check()
        await child.stop(60.0)
        assert child.exit_code == -15

    asyncio.run(scenario())


def test_start_raises_the_reason_if_the_system_cannot_create_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    async def scenario() -> None:
        child = ChildProcess(program("pass"))
        monkeypatch.setattr(subprocess, "Popen", full)
        with pytest.raises(Unavailable, match=r"did not start: .*temporarily unavailable"):
            await child.start(60.0)
        with pytest.raises(Unavailable):
            child.check()
        await child.stop(0.0)

    asyncio.run(scenario())


def test_the_child_gets_no_ray_token_in_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "let me in")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/somewhere")

    async def scenario() -> None:
        code = "import os; raise SystemExit(str([n for n in os.environ if 'RAY_AUTH' in n]))"
        child = ChildProcess(program(code))
        with pytest.raises(Unavailable, match=r"the daemon did not start: \[\]"):
            await child.start(60.0)

    asyncio.run(scenario())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills a child with its parent")
def test_the_child_is_killed_when_its_parent_dies(tmp_path: Path) -> None:
    code = f"""
import asyncio
from pensieve.cluster.child_process import ChildProcess
async def main():
    child = ChildProcess({program(READY + "time.sleep(600)")!r})
    await child.start(60.0)
    print(child.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    with subprocess.Popen(program(code), stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert runs(pid)
        os.kill(parent.pid, 9)
        wait_for(lambda: not runs(pid))
