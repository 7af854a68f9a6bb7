"""List the files of pensieve/ that a plain turn enters, in the service and in the engine process.

A daemon with the echo engine answers two turns of a conversation through each API: gRPC, chat completions and
responses. A profile hook in both processes notes every file with a function that runs during the second turn.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pensieve.bench.bench_daemon import serving
from pensieve.client.client import Client

# The text of `sitecustomize.py`, which Python imports at the start of each process that has its folder on the
# path. It records files while the file `on` exists. Each process writes its list when `on` is removed.
HOOK = """
import json, os, sys, threading, time
folder = {folder!r}
entered = set()

def hook(frame, event, _):
    if event == "call":
        entered.add(frame.f_code.co_filename)

def watch():
    was_on = False
    while True:
        is_on = os.path.exists(folder + "/on")
        if is_on and not was_on:
            entered.clear()
            open(f"{{folder}}/{{os.getpid()}}.begun", "w").close()
        if was_on and not is_on:
            names = json.dumps(sorted(entered))
            with open(f"{{folder}}/{{os.getpid()}}.part", "w") as file:
                file.write(names)
            os.rename(f"{{folder}}/{{os.getpid()}}.part", f"{{folder}}/{{os.getpid()}}.json")
        was_on = is_on
        time.sleep(0.02)

threading.Thread(target=watch, daemon=True).start()
threading.setprofile(hook)
sys.setprofile(hook)
"""
NUM_PROCESSES = 2  # the service and the engine
SETTLE_SECONDS = 1.0
WAIT_SECONDS = 30.0


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="scripts/measure files_entered", description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the names of the files")
    arguments = parser.parse_args(given)
    for name, files in files_by_turn_kind().items():
        print(f"{name}: {len(files)} files")
        if arguments.list:
            print("".join(f"    {file}\n" for file in sorted(files)), end="")


def files_by_turn_kind() -> dict[str, set[str]]:
    """Return the files with functions that ran, by the kind of turn."""
    with tempfile.TemporaryDirectory(prefix="pensieve-entered-") as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(HOOK.format(folder=name))
        path = os.pathsep.join(filter(None, (name, os.environ.get("PYTHONPATH"))))
        variables = {"PENSIEVE_ENGINE": "echo", "PYTHONPATH": path}
        http = f"127.0.0.1:{_free_port()}"
        with serving(["--http", http], variables) as daemon, Client(daemon.address) as client:
            conversation, url = client.conversation("entered"), f"http://{http}"
            model = client.server_info().model
            kinds: dict[str, Callable[[], object]] = {
                "gRPC SendMessage": lambda: conversation.ask("one two three", max_tokens=4),
                "HTTP chat completions": _Chat(f"{url}/v1/chat/completions", model),
                "HTTP responses": _Responses(f"{url}/v1/responses", model),
            }
            return {kind: _files_of_second_turn(folder, turn) for kind, turn in kinds.items()}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class _Chat:
    def __init__(self, url: str, model: str) -> None:
        self._url, self._model = url, model
        self._messages: list[dict[str, Any]] = []

    def __call__(self) -> None:
        self._messages.append({"role": "user", "content": "one two three"})
        body = {"model": self._model, "messages": self._messages, "max_tokens": 4}
        self._messages.append(_post(self._url, body)["choices"][0]["message"])


class _Responses:
    def __init__(self, url: str, model: str) -> None:
        self._url, self._model = url, model
        self._before: dict[str, str] = {}

    def __call__(self) -> None:
        body = {
            "model": self._model,
            "input": "one two three",
            "max_output_tokens": 4,
            **self._before,
        }
        self._before = {"previous_response_id": _post(self._url, body)["id"]}


def _post(url: str, body: dict[str, Any]) -> Any:
    head = {"content-type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(url, json.dumps(body).encode(), head)
    ) as answer:
        return json.load(answer)


def _files_of_second_turn(folder: Path, turn: Callable[[], object]) -> set[str]:
    turn()
    time.sleep(SETTLE_SECONDS)  # for work after the end of the first turn
    (folder / "on").touch()
    _wait_for_files(folder, "*.begun")
    turn()
    time.sleep(SETTLE_SECONDS)
    (folder / "on").unlink()
    entered: set[str] = set()
    for path in _wait_for_files(folder, "*.json"):
        for name in json.loads(path.read_text()):
            if "/pensieve/" in name and "/pensieve/v1/" not in name:
                entered.add(name.rpartition("/pensieve/")[2])
        path.unlink()
    for path in folder.glob("*.begun"):
        path.unlink()
    return entered


def _wait_for_files(folder: Path, pattern: str) -> list[Path]:
    """Wait until each process has written a file of this pattern; return the files."""
    deadline = time.monotonic() + WAIT_SECONDS
    while len(found := list(folder.glob(pattern))) < NUM_PROCESSES:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(found)} processes reported; {NUM_PROCESSES} should")
        time.sleep(0.02)
    return found


if __name__ == "__main__":
    main()
