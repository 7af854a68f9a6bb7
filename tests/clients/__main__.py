"""Run clients from the package index, each in its own environment, against `pensieve serve --http`.

    scripts/try_clients                     # all clients, at the versions listed here
    scripts/try_clients openai-2 litellm    # some clients
    scripts/try_clients --newest            # at their newest versions

The model follows a script (tests/conversations/scripted_engine.py), because tests of tools need a model that
calls them. Daemon, store, scheduler and cache are real. Each environment is created once, in .clients.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.conversations.rig import write_model
from tests.conversations.rig_daemon import wait_for
from tests.conversations.scripted_engine import write_script
from tests.newcomer import free_port
from tests.text.families import QWEN_3

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".clients"
SECONDS = 600.0  # limit for all scenes of a client


@dataclass(frozen=True)
class Client:
    module: str  # module with its scenes
    packages: tuple[str, ...]  # with the versions that docs/http.md names
    newest: tuple[str, ...]


CLIENTS: Mapping[str, Client] = {
    "openai-3": Client("with_openai", ("openai==3.54.0",), ("openai>=3,<4",)),
    "openai-2": Client("with_openai", ("openai==2.54.0",), ("openai>=2,<3",)),
    "anthropic": Client("with_anthropic", ("anthropic==2.12.0",), ("anthropic",)),
    "langchain": Client("with_langchain", ("langchain-openai==1.7.3",), ("langchain-openai",)),
    "litellm": Client("with_litellm", ("litellm==1.106.2", "mcp==2.3.0"), ("litellm", "mcp")),
    "llama-index": Client(
        "with_llama_index",
        ("llama-index-llms-openai-like==0.8.1",),
        ("llama-index-llms-openai-like",),
    ),
    "pydantic-ai": Client(
        "with_pydantic_ai",
        ("pydantic-ai-slim[openai,anthropic]==2.68.0",),
        ("pydantic-ai-slim[openai,anthropic]",),
    ),
    "openai-agents": Client("with_openai_agents", ("openai-agents==0.24.0",), ("openai-agents",)),
    "open-webui": Client("with_open_webui", (), ()),  # only its requests; it is not installed
}


@dataclass
class ClientResult:
    """The result of a client's scenes."""

    name: str
    versions: Mapping[str, str] = field(default_factory=dict)
    scenes: list[tuple[str, str]] = field(default_factory=list)  # name, problem
    problem: str = ""  # a problem outside the scenes

    @property
    def failures(self) -> list[str]:
        found = [f"{self.name}: {what}: {problem}" for what, problem in self.scenes if problem]
        return found + ([f"{self.name}: {self.problem}"] if self.problem else [])


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/try_clients",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(CLIENTS)}")
    parser.add_argument(
        "--newest", action="store_true", help="use the newest versions, not the listed ones"
    )
    parser.add_argument("--results", type=Path, help="write the results to this JSON file")
    given = parser.parse_args()
    if unknown := set(given.names) - set(CLIENTS):
        parser.error(f"there is no client {sorted(unknown)[0]!r}")
    found = [run_client(name, newest=given.newest) for name in given.names or CLIENTS]
    if given.results is not None:
        lines = [{**vars(each), "failures": each.failures} for each in found]
        given.results.write_text(json.dumps(lines, indent=1), encoding="utf-8")
    failures = [failure for each in found for failure in each.failures]
    count = sum(len(each.scenes) for each in found)
    print(f"{len(found)} clients, {count} scenes, {len(failures)} failures")
    return 1 if failures else 0


def run_client(name: str, *, newest: bool = False) -> ClientResult:
    """Run a client's scenes with a new daemon."""
    client, found = CLIENTS[name], ClientResult(name)
    try:
        python = environment(name, client.newest if newest else client.packages)
    except subprocess.CalledProcessError as error:
        found.problem = f"cannot be installed: {error.stderr[-300:]}"
        print(f"BAD  {name}: {found.problem}", flush=True)
        return found
    with tempfile.TemporaryDirectory(prefix="client-") as folder, serving(Path(folder)) as at:
        command = [str(python), "-m", f"tests.clients.{client.module}", *at]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        late = threading.Timer(SECONDS, process.kill)  # this ends the loop below
        late.start()
        for line in process.stdout:
            entry = json.loads(line) if line.startswith("{") else {}
            if "versions" in entry:
                found.versions = entry["versions"]
            elif "what" in entry:
                found.scenes.append((entry["what"], entry["problem"]))
                mark = "BAD " if entry["problem"] else "ok  "
                version = " ".join(f"{k} {v}" for k, v in found.versions.items())
                print(f"{mark} {name:13}  {version:24}  {entry['what']}", flush=True)
                if entry["problem"]:
                    print(f"         {entry['problem']}", flush=True)
        late.cancel()
        if process.wait() or not found.scenes:
            found.problem = f"its scenes ended with {process.returncode}"
    return found


def environment(name: str, packages: Sequence[str]) -> Path:
    """Create an environment with only these packages, and return its Python."""
    folder = FOLDER / name
    python, ready = folder / "bin" / "python", folder / "packages"
    wanted = "\n".join(packages)
    if ready.exists() and ready.read_text() == wanted:
        return python
    print(f"     {name}: installing {' '.join(packages) or 'nothing'}", flush=True)
    commands = [[sys.executable, "-m", "venv", "--clear", str(folder)]]
    if packages:
        commands.append([str(python), "-m", "pip", "install", "--quiet", *packages])
    for command in commands:
        subprocess.run(command, check=True, capture_output=True, text=True)
    ready.write_text(wanted)
    return python


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Start a daemon. Yield its URL, the script of the model's replies, and its log."""
    model = write_model(folder / "model", QWEN_3)
    script, log, ready = folder / "script.json", folder / "log", folder / "ready"
    write_script(script, [])
    port = free_port()
    command = [
        *(sys.executable, "-m", "tests.clients.serve", str(script), str(model)),
        *("--data", str(folder / "data"), "--address", "127.0.0.1:0", "--http", str(port)),
        *("--ready-file", str(ready), "--log-format", "json"),
    ]
    with log.open("ab") as written:
        process = subprocess.Popen(command, cwd=ROOT, stdout=written, stderr=written)
    try:
        wait_for(lambda: ready.exists() or process.poll() is not None)
        assert ready.exists(), log.read_text()
        yield f"http://127.0.0.1:{port}", str(script), str(log)
    finally:
        process.terminate()
        process.wait(60)


if __name__ == "__main__":
    sys.exit(main())
