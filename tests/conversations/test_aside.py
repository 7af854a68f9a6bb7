"""Calls in a new thread. A cancelled caller and an exiting process do not wait for their end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from pensieve.conversations.threads import in_new_thread


def test_in_new_thread_returns_the_result_or_raises_the_error() -> None:
    async def scenario() -> None:
        assert await in_new_thread(divmod, 7, 2) == (3, 1)
        assert (await in_new_thread(threading.current_thread)) is not threading.current_thread()
        with pytest.raises(ZeroDivisionError):
            await in_new_thread(divmod, 7, 0)

    asyncio.run(scenario())


def test_a_result_after_the_caller_was_cancelled_is_ignored() -> None:
    release = threading.Event()

    async def scenario() -> None:
        waiting = asyncio.create_task(in_new_thread(release.wait, 30.0))
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        release.set()
        await asyncio.sleep(0.05)

    asyncio.run(scenario())


def test_a_process_exits_while_a_call_in_a_new_thread_still_runs() -> None:
    code = """
import asyncio, time
from pensieve.conversations.threads import in_new_thread
async def main():
    asyncio.create_task(in_new_thread(time.sleep, 600))
    await asyncio.sleep(0.1)
asyncio.run(main())
print("ended")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == ("ended\n", "")
