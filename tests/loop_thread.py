"""An event loop in its own thread, for tests that block in theirs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

WORK_SECONDS = 300.0


class LoopThread:
    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(WORK_SECONDS)

    def do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in the loop."""

        async def call() -> Any:
            return function(*arguments)

        return self.run(call())

    def close(self) -> None:
        """Close the loop after tasks that are about to end, such as reset connections."""
        self.run(self._rest())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _rest(self) -> None:
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others, timeout=5.0)
