"""Run command lines of the docs like a reader: in an empty home, with what `scripts/run` installs.

`scripts/run` and `pensieve` both mean `python -m pensieve` in that environment (plain.py). Installing it is
not tested here. Other differences from the written lines: absolute folders are moved into a folder of the
test, ports are replaced by free ports, and named models by the built-in one. Daemons use the echo engine,
unless the row says otherwise. A daemon that several lines need is started once, by the docs' own line.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pensieve.builtin import MODEL_PATH
from pensieve.client import Client
from tests import fork_server
from tests.conversations.rig_daemon import wait_for
from tests.doc_commands.collect import REDIRECTIONS, ROOT
from tests.doc_commands.plain import plain_environment
from tests.newcomer import free_port

CERTS = ROOT / "tests" / "guard" / "certs"
READY = "ready grpc://"
SECONDS = 120.0
NIGHTLY_SECONDS = 3600.0
PLACES = ("/var/lib", "/var/log", "/var/drill", "/srv")
MODELS = ("Qwen/Qwen3-0.6B", "mistralai/Mistral-7B-v0.1", "smollm2", "MODEL")
# Daemons that several lines need, each with the line that starts the daemon.
DAEMONS = {
    "shared": "scripts/run serve",
    "http": "scripts/run serve smollm2 --http 8000",
    "drill": "pensieve serve --data /var/lib/pensieve --backup /srv/backup --address 127.0.0.1:50061",
    "guarded": "pensieve serve --token-file tokens.toml --audit-log /var/log/pensieve/audit.jsonl",
    "restored": "pensieve serve --data /var/drill --address 127.0.0.1:50062",
    "replica_a": "pensieve serve --replica a --data /var/lib/a --address 127.0.0.1:50071",
    "replica_b": "pensieve serve --replica b --data /var/lib/b --address 127.0.0.1:50072",
}
RESTORE = "pensieve restore /srv/backup --data /var/drill"
FIT = "pensieve simulate --journal run.jsonl --fit cost.json"
# A file in OpenAI's Batch format.
REQUESTS = "".join(
    f'{{"custom_id": "a-{number}", "method": "POST", "url": "/v1/completions",'
    ' "body": {"model": "echo (arithmetic instead of a model)", "prompt": "Once upon a time",'
    ' "max_tokens": 5}}\n'
    for number in range(3)
)
# The chat template of the built-in model.
TEMPLATE = """{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


@dataclass(frozen=True)
class Row:
    """How a line is run, and the expected result."""

    line: str
    expects: tuple[str, ...] = ()  # patterns of its output
    needs: tuple[str, ...] = ()  # methods of World to call before
    instead: Mapping[str, str] = field(default_factory=dict)  # word of the line -> replacement
    more: tuple[str, ...] = ()  # words to append
    stdin: str = ""
    code: int = 0
    until: str = ""  # the command does not end by itself: press Ctrl-C after this output
    serves: bool = False  # a daemon: send SIGTERM when it is ready
    starts: str = ""  # a daemon that keeps running, under this name
    alone: bool = False  # use a home in which no daemon runs
    beside: str = "home"  # use the home of this daemon
    model: bool = False  # use the built-in model instead of the echo engine
    developing: bool = False  # needs the development environment
    nightly: bool = False  # slow, so only at night


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


class World:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._plain = plain_environment(folder / "plain")
        fork_server.preload({**os.environ, **self._plain})
        self._ports: dict[str, int] = {}
        self._done: set[str] = set()
        self._num_homes = 0
        self._daemons: dict[str, tuple[subprocess.Popen[str], Path]] = {}
        for place in ("var/lib", "var/log/pensieve", "srv"):
            (folder / place).mkdir(parents=True)
        self.desk = folder / "desk"  # the reader's working folder, with some files
        self.desk.mkdir()
        (self.desk / "notes.txt").write_text("The lighthouse stands on a rock.\n")
        (self.desk / "requests.jsonl").write_text(REQUESTS)
        (self.desk / "pensieve.toml").write_text('policy = "lru"\n')
        (self.desk / "mistral.jinja").write_text(TEMPLATE)
        shutil.copy(CERTS / "server.pem", self.desk / "chain.pem")
        shutil.copy(CERTS / "server.key", self.desk / "key.pem")

    # -- requirements of lines --

    def need(self, name: str) -> None:
        if name not in self._done:
            make: Callable[[], None] = getattr(self, name)
            make()
            self._done.add(name)

    def shared(self) -> None:
        """Start a daemon in the default folder, with a conversation and a declared prefix."""
        self._start("shared")
        with Client(self._address("50051")) as client:
            client.prefix("rules").create(system_prompt="Answer in one sentence.")
            client.conversation("trip-42").ask("Hello.", max_tokens=20)

    def http(self) -> None:
        """Start a daemon with the built-in model and both ports."""
        address = self._start("http", home="http", model=True)
        self._ports["grpc beside http"] = int(address.rpartition(":")[2])
        with Client(address) as client:
            self._model_name = client.server_info().model

    def replica_a(self) -> None:
        """Start a daemon with a conversation, and write the file that names it and replica_b."""
        address = self._start("replica_a")
        with Client(address) as client:
            client.conversation("trip-42").ask("Hello.", max_tokens=20)
        named = (f"{name}=unix:{self.folder}/var/lib/{name}/admin.sock" for name in "ab")
        (self.desk / "cluster.toml").write_text(f'replicas = "{",".join(named)}"\n')

    def replica_b(self) -> None:
        """Start the second replica."""
        self._start("replica_b")

    def drill(self) -> None:
        """Start a daemon whose backup has everything that was written to it."""
        self._start("drill")
        with Client(self._address("50061")) as client:
            client.conversation("drill").ask("Remember this.", max_tokens=20)
        self._stop(*self._daemons.pop("drill"))  # a stop writes a backup at once
        self._start("drill")

    def restored(self) -> None:
        """Start a daemon with a restored history."""
        self.need("drill")
        if not self._moved("/var/drill").exists():
            assert self.run(Row(RESTORE)).code == 0
        self._start("restored")

    def tokens(self) -> None:
        """Make a token, and a file with its entry."""
        made = self.run(Row("pensieve token --tenant acme --file tokens.toml"))
        assert made.code == 0, made.err
        self._token = made.out.strip()

    def guarded(self) -> None:
        """Start a daemon that requires tokens, with a conversation of a tenant."""
        self.need("tokens")
        address = self._start("guarded", home="guarded")
        with Client(address, token=self._token) as client:
            client.conversation("trip-42").ask("Hello.", max_tokens=20)

    def journal(self) -> None:
        """Record a journal of a daemon that serves some turns."""
        row = Row("pensieve serve --journal run.jsonl", alone=True, model=True)
        daemon, log, address = self._serve(row)
        with Client(address) as client:
            talks = [client.conversation(f"talk-{number}") for number in range(4)]
            for turn in range(3):
                for talk in talks:
                    talk.ask("Where shall we go? " * (10 + 60 * turn), max_tokens=30)
        self._stop(daemon, log)

    def cost(self) -> None:
        """Fit costs to the iterations of that journal."""
        self.need("journal")
        if not (self.desk / "cost.json").exists():
            fitted = self.run(Row(FIT))
            assert fitted.code == 0, fitted.err

    # -- lines --

    def run(self, row: Row) -> Ended:
        """Run the line to its end."""
        words, source, target = self._words(row)
        process = self._popen(words, row)
        if row.until:
            return self._until(process, row.until)
        given = (self.desk / source).read_text() if source else row.stdin
        try:
            out, err = process.communicate(given, NIGHTLY_SECONDS if row.nightly else SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
        if target:
            with (self.desk / target).open("a") as file:
                file.write(out)
        return Ended(process.returncode, out, err)

    def run_python(self, code: str) -> Ended:
        """Run a Python code block, with the daemon `http`."""
        self.need("http")
        grpc = f"127.0.0.1:{self._ports['grpc beside http']}"
        code = re.sub(r"(127\.0\.0\.1|gpu1):50051", grpc, code)
        code = re.sub(r"gpu(\d):50051", r"127.0.0.1:\1", code)  # daemons that do not exist
        code = code.replace("127.0.0.1:8000", self._address("8000"))
        code = code.replace('"smollm2"', repr(self._model_name))
        ended = subprocess.run(
            [sys.executable, "-c", code],
            cwd=self.desk,
            env=self._environment(Row("", developing=True), {}),
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
        )
        return Ended(ended.returncode, ended.stdout, ended.stderr)

    def serve(self, row: Row) -> Ended:
        """Start a daemon, and stop it when it is ready."""
        daemon, log, address = self._serve(row)
        assert address
        return self._stop(daemon, log)

    def close(self) -> list[Ended]:
        """Stop all daemons that are still running."""
        return [self._stop(daemon, log) for daemon, log in self._daemons.values()]

    def _words(self, row: Row) -> tuple[list[str], str, str]:
        """Return the words of the line on this machine, the input file, and the output file."""
        words, files = [], {"<": "", ">": "", ">>": ""}
        given = iter(shlex.split(row.line))
        for word in given:
            if word in REDIRECTIONS:
                files[word] = next(given)
            else:
                words.append(row.instead.get(word) or self._moved_word(word))
        if words[0] in ("pensieve", "scripts/run"):
            words = [sys.executable, "-m", "pensieve", *(words[1:] or ["chat"])]
        elif words[0] == "python":
            words[0] = sys.executable
        elif words[0].startswith("scripts/"):
            words[0] = str(ROOT / words[0])
        words = [str(ROOT / word) if word.startswith("docs/examples/") else word for word in words]
        words += [self._moved_word(word) for word in row.more]
        return words, files["<"], files[">>"] or files[">"]

    def _moved_word(self, word: str) -> str:
        if word in MODELS:
            return str(MODEL_PATH)
        if found := re.fullmatch(r"127\.0\.0\.1:(\d+)", word):
            return self._address(found[1])
        if word == "8000" or word.startswith("http://127.0.0.1:8000/"):
            return word.replace("8000", self._address("8000").rpartition(":")[2])
        if word.startswith("sqlite:///"):
            path = self._moved(word.removeprefix("sqlite://"))
            path.parent.mkdir(parents=True, exist_ok=True)
            return f"sqlite://{path}"
        if word.startswith("0.0.0.0:"):
            return f"127.0.0.1:{free_port()}"
        return str(self._moved(word)) if word.startswith(PLACES) else word

    def _moved(self, place: str) -> Path:
        return self.folder / place.lstrip("/")

    def _address(self, port: str) -> str:
        return f"127.0.0.1:{self._ports.setdefault(port, free_port())}"

    def _environment(self, row: Row, given: Mapping[str, str]) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PENSIEVE_", "PYTEST_", "GRPC_", "XDG_"))
        }
        home = self.folder / row.beside
        if row.alone:
            self._num_homes += 1
            home = self.folder / f"home-{self._num_homes}"
        changed = {
            "HF_HUB_OFFLINE": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PENSIEVE_ENGINE": "model" if row.model else "echo",
            "XDG_DATA_HOME": str(home),
            "XDG_RUNTIME_DIR": str(self.folder / "plain"),
        }
        there = {"PYTHONPATH": str(ROOT)} if row.developing else self._plain
        return {**kept, **changed, **there, **given}

    def _popen(
        self, words: list[str], row: Row, log: Path | None = None, **given: str
    ) -> subprocess.Popen[str]:
        written = log.open("w") if log else subprocess.PIPE
        try:
            return subprocess.Popen(
                words,
                cwd=ROOT if row.developing and "-m" in words else self.desk,
                env=self._environment(row, given),
                stdin=subprocess.DEVNULL if log else subprocess.PIPE,
                stdout=written,
                stderr=written,
                text=True,
            )
        finally:
            if log:
                written.close()  # type: ignore[union-attr]

    def _until(self, process: subprocess.Popen[str], text: str) -> Ended:
        out = ""
        assert process.stdout is not None
        while text not in out and (read := os.read(process.stdout.fileno(), 65536)):
            out += read.decode(errors="replace")
        assert text in out, f"the command did not print {text!r}: {out!r}"
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=SECONDS)
        return Ended(process.returncode, out + rest, err)

    # -- daemons --

    def _start(self, name: str, home: str = "home", model: bool = False, **given: str) -> str:
        if name == "shared":
            given["PENSIEVE_ADDRESS"] = self._address("50051")
        daemon, log, address = self._serve(Row(DAEMONS[name], beside=home, model=model), **given)
        self._daemons[name] = daemon, log
        return address

    def _serve(self, row: Row, **given: str) -> tuple[subprocess.Popen[str], Path, str]:
        """Start a daemon and wait until it is ready. Return the process, its log and its address."""
        given.setdefault("PENSIEVE_ADDRESS", f"127.0.0.1:{free_port()}")
        log = self.folder / f"serve-{free_port()}.log"
        daemon = self._popen(self._words(row)[0], row, log, **given)
        wait_for(lambda: re.search(READY, log.read_text()) or daemon.poll() is not None)
        found = re.search(READY + r"([\w.:]+)", log.read_text())
        assert found is not None, log.read_text()
        return daemon, log, found[1]

    def _stop(self, daemon: subprocess.Popen[str], log: Path) -> Ended:
        if daemon.poll() is None:
            daemon.send_signal(signal.SIGTERM)
        return Ended(daemon.wait(SECONDS), "", log.read_text())
