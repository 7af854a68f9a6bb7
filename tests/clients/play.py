"""Tools for the scenes of a client: the server's address, the model's next replies, and the turns that ran.

This runs in the client's environment (`python -m tests.clients.with_NAME URL SCRIPT LOG`), so it imports only
the standard library. A scene is a function marked with `scene`. `run_scenes` runs the scenes one after
another, and prints a line of JSON for each.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import inspect
import itertools
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODEL = "model"
TURNS = 30  # turns of an agent
CALL = '<tool_call>\n{{"name": "{0}", "arguments": {1}}}\n</tool_call>'
SCENES: list[tuple[str, Callable[[], Any]]] = []
PATIENCE_SECONDS = 30.0

_, URL, _script, _log = sys.argv if len(sys.argv) == 4 else ("", "", "", "")
SCRIPT, LOG = Path(_script), Path(_log)


def scene(what: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def marked(function: Callable[[], Any]) -> Callable[[], Any]:
        SCENES.append((what, function))
        return function

    return marked


def says(*replies: str) -> None:
    """Set the model's replies in the next turns."""
    new = SCRIPT.with_suffix(".new")
    new.write_text(json.dumps(replies))
    new.replace(SCRIPT)


def call(name: str, /, **arguments: Any) -> str:
    """Return a tool call in this model's format."""
    return CALL.format(name, json.dumps(arguments))


def agent_replies(tool: str = "look") -> list[str]:
    """Return replies that think, and call the tool with a different place each time."""
    calls = [
        f"<think>\nRoom {turn} is next.\n</think>\n\nI look." + call(tool, place=f"room {turn}")
        for turn in range(TURNS)
    ]
    return [*calls, "<think>\nAll seen.\n</think>\n\nDone."]


class Turns:
    """The turns that ended since this object was created, from the daemon's log."""

    def __init__(self) -> None:
        self._size = LOG.stat().st_size

    def all(self, count: int) -> list[dict[str, Any]]:
        """Wait for this many turns, and return them."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(found := self._found()) < count and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(found) == count, f"{len(found)} turns, not {count}"
        return found

    def one_conversation(self, count: int) -> list[dict[str, Any]]:
        """Check that the turns are one conversation, and nothing was computed twice."""
        found = self.all(count)
        names = {each["conversation_id"] for each in found}
        assert len(names) == 1, f"{len(names)} conversations"
        recomputed = [each["recomputed_tokens"] for each in found]
        assert not any(recomputed), f"computed again: {recomputed}"
        for before, after in itertools.pairwise(found):
            cached = after["device_tokens"] + after["host_tokens"]
            known = before["device_tokens"] + before["host_tokens"] + before["new_tokens"]
            # All tokens before must be cached, except the reply's last token, which had no KV yet.
            assert cached >= known + before["output_tokens"] - 1, (before, after)
        return found

    def _found(self) -> list[dict[str, Any]]:
        with LOG.open("rb") as file:
            file.seek(self._size)
            whole, _, _ = file.read().rpartition(b"\n")
        lines = [json.loads(line) for line in whole.splitlines() if line.startswith(b"{")]
        return [each for each in lines if each["message"] == "turn ended"]


def run_scenes(*distributions: str) -> None:
    """Run all scenes."""
    versions = {each: importlib.metadata.version(each) for each in distributions}
    print(json.dumps({"versions": versions}), flush=True)
    for what, function in SCENES:
        says()
        problem = ""
        try:
            found = function()
            if inspect.iscoroutine(found):
                asyncio.run(found)
        except Exception as error:
            traceback.print_exc()
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        print(json.dumps({"what": what, "problem": problem}), flush=True)
