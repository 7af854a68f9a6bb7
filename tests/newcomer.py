"""Run the commands of README and docs as a new user would, and report everything unexpected.

    scripts/newcomer FOLDER           # from a clone in an empty folder; needs git, Python and a package index
    scripts/newcomer FOLDER --quick   # in the present environment, without slow steps

Each command is a line of the docs. Only folders, ports and sizes are replaced (`Walk.words`). Each command
runs in its own terminal and must print what its step expects. On its error output, only lines in QUIET are
allowed. This program uses only the standard library, because nothing else is installed at the start.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pty
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 60.0  # seconds that a step may wait
# Lines that a command may print to its error output.
QUIET = [
    r"pensieve: (creating|updating|[123] of 3|the environment is ready).*",
    r"pensieve: (creating|updating|installing) [\w ]+, \d+ s.*",  # one line while pip runs
    r"pensieve: (--plot needs 'matplotlib|smollm2 needs 'gguf).*'; installing it once",
    r"pensieve: installing the extra \w+: .*",
    r"smollm2: (fetching|fetched|llama,) .*",
    r"converting smollm2: \d+ %",
    r"pensieve: waiting for .*",
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ INFO .*",  # the daemon's log
    r"[\d:, -]+ WARNING the event loop stalled for .*",  # the machine is slow
    r"(Looking in|Processing|Collecting|Using cached|Downloading|Requirement already|Obtaining) .*",
    r"(Installing|Preparing|Getting|Building|Created|Stored|Successfully|Saved|Checking|Attempting) .*",
    r"(Found existing|Uninstalling|Would install|Can't uninstall|Not uninstalling) .*",
    r"WARNING: Location .* is ignored.*",  # from pip, if the package index is a folder
    r"\S* ?[━╸╺ ]+ .*(B/s|eta|MB).*",
    r"[⠀-⣿] .*",  # the spinner of a start
    r"KV pools: .*",
    r"for the client \(shown once\):",
    r"restoring generation \d+, \d+ segments",
    r"checking the restored history",
    r"(assumed|costs|limits|load): .*",
    r"\d+ s  .* (a second|a second each)(: .*)?",  # what a capacity plan has tried
    r"making random weights, .*",  # for a benchmark
    r"(importing (torch|transformers)|loading /tmp/.*|probing its attention|starting the scheduler)",
    r"the engine started in .*",
    r"[\w ]*[\d.]+ s(, [\w ]+ [\d.]+ s)*",  # the rest of that line, wrapped: slow machines list more stages
    r"\w+: [\d.]+ M parameters, .*",
    r"layers in (C\+\+ \(\w+\)|torch: .*)",
    r"torch \S+, threads \d+, .*",
    r"an iteration has \d+ tokens, not \d+: .*",
    r"\w+: building [\d,]+ conversations …",
    r"drawn: .*",
    r"\d+ of \d+.*",
]
NEVER = re.compile(r"Traceback|Warning|leaked|[Dd]eprecat|Exception|^E\d{4} |^[IW]\d{4} ")


@dataclass(frozen=True)
class Step:
    """A line of the docs, without its comment, and the expected result."""

    line: str
    expects: tuple[str, ...] = ()
    instead: Mapping[str, str] = field(default_factory=dict)  # word -> quicker replacement
    code: int = 0
    types: tuple[str, ...] = ()  # typed on the terminal, each at a prompt
    serves: str = ""  # a daemon: it is ready when it prints this, and runs until the walk stops it
    quick: bool = True
    minutes: float = 1.0  # time limit


PROMPT = "> "


class Stuck(Exception):
    """The expected output or end did not come."""


class Terminal:
    """A command on a terminal. Its error output is a second terminal."""

    def __init__(self, words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        self.words = words
        self.out, self.err = "", ""
        self.first_at: float | None = None  # when the command printed its first text
        self._seen = 0
        self._changed = threading.Condition()
        ours, theirs = pty.openpty()
        ours_err, theirs_err = pty.openpty()
        for terminal in (theirs, theirs_err):
            termios.tcsetwinsize(terminal, (40, 200))
        self.process = subprocess.Popen(
            words,
            cwd=folder,
            env=dict(environment),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs_err,
            start_new_session=True,
        )
        os.close(theirs)
        os.close(theirs_err)
        self._terminal = ours
        self._readers = [
            threading.Thread(target=self._read, args=(descriptor, name), daemon=True)
            for descriptor, name in ((ours, "out"), (ours_err, "err"))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, descriptor: int, name: str) -> None:
        while True:
            try:
                data = os.read(descriptor, 65536)
            except OSError:  # no process has the other side open
                data = b""
            with self._changed:
                text = data.decode(errors="replace").replace("\r\n", "\n")
                setattr(self, name, getattr(self, name) + text)
                if name == "out" and text.strip() and self.first_at is None:
                    self.first_at = time.monotonic()
                self._changed.notify_all()
            if not data:
                os.close(descriptor)
                return

    def until(self, text: str, seconds: float | None = None) -> None:
        """Wait for this text on either output, after the text of the previous wait."""
        deadline = time.monotonic() + (seconds or PATIENCE)
        with self._changed:
            while True:
                at = self.out.find(text, self._seen)
                if at >= 0:
                    self._seen = at + len(text)
                    return
                if text in self.err:
                    return
                left = deadline - time.monotonic()
                if left <= 0 or (self.process.poll() is not None and not self._alive()):
                    raise Stuck(
                        f"{text!r} did not come; the end was {(self.out + self.err)[-300:]!r}"
                    )
                self._changed.wait(min(left, 0.2))

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def end(self, seconds: float | None = None) -> int:
        try:
            code = self.process.wait(seconds or PATIENCE)
        except subprocess.TimeoutExpired:
            self.kill()
            raise Stuck(f"it did not end; the end was {(self.out + self.err)[-300:]!r}") from None
        for reader in self._readers:
            reader.join(10.0)
        return code

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _alive(self) -> bool:
        return any(reader.is_alive() for reader in self._readers)


class Walk:
    """One run through the docs. `problems` lists what would stop a new user."""

    def __init__(self, folder: Path, repository: Path, quick: bool) -> None:
        self.folder = folder
        self.quick = quick
        self.problems: list[str] = []
        self.clone = repository if quick else folder / "pensieve"
        self.ports: dict[str, int] = {}
        self.environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("PENSIEVE_", "PYTEST_", "GRPC_", "COLUMNS"))
            },
            "XDG_DATA_HOME": str(folder / "share"),
            "HF_HUB_OFFLINE": "1",
            "TERM": "xterm",
        }
        if quick:
            self.environment["PENSIEVE_VENV"] = sys.prefix
        self.environment["PENSIEVE_ADDRESS"] = self.address("50051")  # the default may be in use
        self.daemons: list[tuple[Terminal, Step]] = []
        self.began = time.monotonic()
        self.repository = repository

    def words(self, step: Step) -> list[str]:
        """Return the words of the line for this machine: other folders, free ports, smaller sizes."""
        line = step.line
        for place in ("/var/lib", "/srv", "/var/log", "/var/drill"):
            line = re.sub(rf"(?<![\w/]){place}", f"{self.folder}{place}", line)
        line = re.sub(
            r"(127\.0\.0\.1|0\.0\.0\.0):(\d+)", lambda found: self.address(found[2]), line
        )
        words = [step.instead.get(word, word) for word in shlex.split(line)]
        if words[0] == "pensieve":
            words[0] = "scripts/run"
        if words[0] == "scripts/run":
            words[0] = str(self.clone / "scripts" / "run")
        return [word for word in words if word]

    def address(self, port: str) -> str:
        """Return the local address that replaces this port of the docs."""
        return f"127.0.0.1:{self.ports.setdefault(port, free_port())}"

    def take(self, step: Step) -> str:
        """Run the step, note everything unexpected, and return its output."""
        began = time.monotonic()
        before = len(self.problems)
        terminal = Terminal(self.words(step), self.folder, self.environment)
        try:
            for text in step.types:
                terminal.until(PROMPT)
                terminal.type(text)
            if step.serves:
                terminal.until(step.serves)
                self.daemons.append((terminal, step))
            elif (code := terminal.end(60 * step.minutes)) != step.code:
                self.problem(
                    step, f"exit code {code} instead of {step.code}: {terminal.err[-300:]!r}"
                )
            if not step.serves:
                self.look(step, terminal)
        except Stuck as error:
            terminal.kill()
            self.problem(step, str(error))
        self._say(step.line, began, before)
        return terminal.out

    def look(self, step: Step, terminal: Terminal) -> None:
        for expected in step.expects:
            if not re.search(expected, terminal.out + terminal.err, re.MULTILINE):
                self.problem(step, f"nothing like {expected!r} in {terminal.out[-500:]!r}")
        for line in re.split(r"[\n\r]+", without_colours(terminal.err)):
            known = any(re.fullmatch(each, line.strip()) for each in QUIET)
            known |= any(re.search(expected, line) for expected in step.expects)
            if line.strip() and not known:
                self.problem(step, f"an unexpected line: {line.strip()!r}")
        for line in terminal.out.splitlines():
            if NEVER.search(line):
                self.problem(step, f"an unexpected line: {line.strip()!r}")

    def problem(self, step: Step, text: str) -> None:
        self.problems.append(f"{step.line}: {text}")

    def _say(self, name: str, began: float, before: int) -> None:
        verdict = "ok " if len(self.problems) == before else "BAD"
        print(f"{verdict} {time.monotonic() - began:6.1f} s  {name}", flush=True)
        for problem in self.problems[before:]:
            print(f"      {problem}", flush=True)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[Step]:
        """Run something that is not a single line of the docs, as a named step."""
        began, before, step = time.monotonic(), len(self.problems), Step(name)
        try:
            yield step
        except (Stuck, subprocess.CalledProcessError, AssertionError, OSError) as error:
            said = getattr(error, "stderr", None) or ""
            self.problem(step, f"{error} {said[-500:]}")
        self._say(name, began, before)

    @contextlib.contextmanager
    def arithmetic(self) -> Iterator[None]:
        """In a quick walk, use the echo engine inside the block, because its daemons start at once."""
        if self.quick:
            self.environment["PENSIEVE_ENGINE"] = "echo"
        yield
        self.environment.pop("PENSIEVE_ENGINE", None)

    def stop_daemons(self) -> None:
        """Stop all daemons. Each must end with code 0 in time, and print nothing unexpected."""
        while self.daemons:
            terminal, step = self.daemons.pop()
            with self.part(f"the end of {step.line}"):
                terminal.process.send_signal(signal.SIGTERM)
                code = terminal.end(60.0)
                assert code == 0, f"exit code {code}"
                self.look(step, terminal)

    def python(self) -> Path:
        venv = self.environment.get("PENSIEVE_VENV") or self.clone / ".venv"
        return Path(venv) / "bin" / "python"

    def run(self, *words: str | Path, cwd: Path | None = None) -> str:
        """Run a helper command and return its output."""
        return subprocess.run(
            [str(word) for word in words],
            cwd=cwd or self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=900,
        ).stdout


# -- the steps --

TALK = (
    Step(
        'pensieve chat smollm2 -q "What is the capital of France?" --stats',
        (r"\w+ \w+", r"tokens"),  # the reply is sampled, so its words differ
        quick=False,
        minutes=5,
    ),
    Step("scripts/run", (r"Hello",), types=("Hello.\n", "/help\n", "/bye\n")),
    Step("scripts/run chat", types=("/bye\n",), quick=False),
    Step('pensieve chat -q "Hello there." --stats', (r"\w+", r"tokens")),
    Step("pensieve doctor", (r"python +3\.", r"cpu kernels")),
)
SERVE = Step("scripts/run serve", serves="ready grpc://")
REMOTE = (
    Step("pensieve chat --address 127.0.0.1:50051", types=("Hello.\n", "/bye\n")),
    Step("scripts/run chat", (r"using pensieve serve",), types=("/list\n", "/exit\n")),
)
ADMIN = (
    Step("pensieve admin info", (r"built-in",)),
    Step("pensieve admin stats --json", (r'"turns_running": 0',)),
    Step("pensieve admin watch", serves="history from"),
    Step("pensieve admin conversations --least-valuable", (r"trip-42",)),
    Step("pensieve admin explain trip-42", (r"^chunks ",)),
    Step("pensieve admin tenants", (r"tenant",)),
    Step("pensieve admin tenants --json"),
    Step("pensieve admin evict trip-42 --to-host"),
    Step("pensieve admin check"),
)
DRAIN = Step("pensieve admin drain")
BACKUP = (
    Step(
        "pensieve serve --data /var/lib/pensieve --backup /srv/backup --address 127.0.0.1:50061",
        serves="ready grpc://",
    ),
    Step(
        'pensieve chat --address 127.0.0.1:50061 --conversation drill -q "Remember this."', (r"\w",)
    ),
    Step("pensieve backup /srv/copy --data /var/lib/pensieve", (r"the copy was checked",)),
)
RESTORE = (
    Step("pensieve restore /srv/backup --list", (r"generation 1",)),
    Step("pensieve restore /srv/backup --data /var/drill", (r"restored 1 conversations",)),
    Step(
        "pensieve restore /srv/backup --data /var/lib/restored --at 2026-11-22T03:18",
        (r"restored 1 conversations",),
        {"2026-11-22T03:18": "2999-01-01T00:00"},
    ),
    Step("pensieve serve --data /var/drill --address 127.0.0.1:50062", serves="ready grpc://"),
    Step("pensieve admin check --data /var/drill"),
    Step(
        'pensieve chat --address 127.0.0.1:50062 --conversation drill -q "What was it?"', (r"\w",)
    ),
)
JOURNAL = Step("pensieve serve --journal run.jsonl", serves="ready grpc://")
FITTED = (
    Step("pensieve simulate --journal run.jsonl"),
    Step("pensieve simulate --journal run.jsonl --fit cost.json"),
    Step(
        "pensieve simulate --workload sharegpt --cost cost.json --device-tokens 60k --host-tokens 0",
        quick=False,
    ),
)
SIMULATE = (
    Step(
        "pensieve simulate --workload sharegpt --rate 1,2,4 --policy return --seed 0,1,2 --plot figures",
        (r"figures",),
        {"1,2,4": "1", "0,1,2": "0"},
        quick=False,
    ),
    Step(
        "pensieve simulate --workload assistant --hardware instant --device-tokens 500k --host-tokens 0",
        (r"return",),
        quick=False,
        minutes=5,
    ),
)
BENCH = (
    Step(
        "pensieve bench attention --context 512,4096 --dtype bfloat16",
        (),
        {"512,4096": "512"},
        quick=False,
        minutes=10,
    ),
    Step("pensieve bench step --batch 1,16 --weights int8", quick=False, minutes=10),
    Step("pensieve bench step --batch 16 --parts", (r"GB/s of weights",), quick=False, minutes=10),
)
TOKEN = Step("pensieve token --tenant acme --file tokens.toml", (r"^\S{32,}$",))
GUARDED = Step(
    "pensieve serve --token-file tokens.toml --address 0.0.0.0:50051 "
    "--tls-cert chain.pem --tls-key key.pem",
    serves="ready grpc",
)
STEPS = (
    *(*TALK, SERVE, *REMOTE, *ADMIN, DRAIN, *BACKUP, *RESTORE, TOKEN, GUARDED),
    *(JOURNAL, *FITTED, *SIMULATE, *BENCH),
)


def walk(folder: Path, repository: Path, quick: bool) -> list[str]:
    """Run all steps and return the problems."""
    found = Walk(folder, repository, quick)
    try:
        if not quick:
            clone(found)
        for step in chosen(found, TALK):
            found.take(step)
        serve(found)
        with found.arithmetic():
            for step in chosen(found, (*BACKUP, *RESTORE)):
                if step is RESTORE[0]:
                    found.stop_daemons()
                found.take(step)
            found.stop_daemons()
            guarded(found)
        found.take(JOURNAL)
        with found.part("the example of the README, with a journal"):
            for _ in range(3):  # enough iterations to fit costs to
                example(found, "50051")
        found.stop_daemons()
        for step in chosen(found, (*FITTED, *SIMULATE, *BENCH)):
            found.take(step)
        if not quick:
            wheel(found)
    finally:
        for terminal, _ in found.daemons:
            terminal.kill()
    return found.problems


def chosen(found: Walk, steps: Sequence[Step]) -> list[Step]:
    return [step for step in steps if step.quick or not found.quick]


def clone(found: Walk) -> None:
    with found.part("git clone, and the first word of `scripts/run chat`") as step:
        found.run("git", "clone", "--quiet", found.repository, found.clone)
        terminal = Terminal(
            [str(found.clone / "scripts" / "run"), "chat", "-q", "Hello."],
            found.folder,
            found.environment,
        )
        code = terminal.end(900.0)
        assert code == 0, f"exit code {code}: {terminal.err[-500:]}"
        found.look(step, terminal)
        assert terminal.first_at is not None, "the command wrote nothing"
        seconds = terminal.first_at - found.began
        print(f"   {seconds:6.1f} s  from the clone to the first word", flush=True)
        for stage in ("1 of 3", "2 of 3", "3 of 3"):
            assert stage in terminal.err, f"stage {stage} was not shown"


def serve(found: Walk) -> None:
    """The daemon in its usual folder, the SDK, and the operator's commands. `drain` ends the daemon."""
    found.take(SERVE)
    for step in REMOTE:
        found.take(step)
    with found.part("the example of the README"):
        said = example(found, "50051")
        assert re.search(r"\(\d+ new tokens, [1-9]\d* cached\)", said), said
    with found.part("the SDK alone, in an environment of its own"):
        client_alone(found)
    for step in ADMIN:
        found.take(step)
        if step.serves:
            terminal, _ = found.daemons.pop()
            terminal.process.send_signal(signal.SIGINT)
            with found.part(f"Ctrl-C in {step.line}"):
                code = terminal.end(30.0)
                assert code == 130, f"exit code {code}"
    found.take(DRAIN)
    terminal, step = found.daemons.pop()
    with found.part("the end of the daemon that was drained"):
        code = terminal.end(60.0)
        assert code == 0, f"exit code {code}"
        found.look(step, terminal)


def guarded(found: Walk) -> None:
    """A daemon that requires TLS and tokens. Clients without them are told what is missing."""
    certificates = found.repository / "tests" / "guard" / "certs"
    for name, place in (
        ("server.pem", "chain.pem"),
        ("server.key", "key.pem"),
        ("ca.pem", "ca.pem"),
    ):
        (found.folder / place).write_bytes((certificates / name).read_bytes())
    token = found.take(TOKEN).strip()
    found.take(GUARDED)
    chat = 'pensieve chat --address 127.0.0.1:50051 -q "Hello." '
    found.environment["PENSIEVE_TOKEN"] = token
    found.take(Step(chat + "--tls-ca ca.pem", (r"\w",)))
    found.take(Step(chat, (r"TLS",), code=1))
    found.take(Step(chat + "--tls", (r"certificate",), code=1))
    found.environment["PENSIEVE_TOKEN"] = token[::-1]
    found.take(Step(chat + "--tls-ca ca.pem", (r"token",), code=1))
    del found.environment["PENSIEVE_TOKEN"]
    found.take(Step(chat + "--tls-ca ca.pem", (r"token",), code=1))
    found.stop_daemons()


def example(found: Walk, port: str) -> str:
    """Return the Python example of the README, with the daemon on this port."""
    readme = (found.clone / "README.md").read_text(encoding="utf-8")
    code = readme.split("```python")[1].split("```")[0]
    return found.run(found.python(), "-c", code.replace("127.0.0.1:50051", found.address(port)))


def client_alone(found: Walk) -> None:
    dist = found.folder / "dist"
    built = found.run(found.clone / "scripts" / "build_client", dist).strip()
    code = (
        "import sys; from pensieve.client import Client\n"
        "with Client(sys.argv[1]) as client:\n"
        "    print(client.conversation('alone').ask('Hello.', max_tokens=3).text)"
    )
    if found.quick:
        return  # tests/scripts/test_build_client.py tests this
    alone = found.folder / "alone"
    found.run(sys.executable, "-m", "venv", alone)
    found.run(alone / "bin" / "pip", "install", "--quiet", built)
    assert found.run(alone / "bin" / "python", "-c", code, found.address("50051")).strip()


def wheel(found: Walk) -> None:
    """Simulate another machine: a new environment with the wheel, and torch."""
    with found.part("pip wheel --no-deps --wheel-dir dist ."):
        dist, venv = found.folder / "wheels", found.folder / "other"
        constraints = found.clone / "scripts" / "constraints.txt"
        found.run(
            *(found.python(), "-m", "pip", "wheel", "--quiet", "--no-deps"),
            *("--wheel-dir", dist, found.clone),
        )
        (built,) = dist.iterdir()
        found.run(sys.executable, "-m", "venv", venv)
        found.run(
            venv / "bin" / "pip", "install", "--quiet", "--constraint", constraints, "torch", built
        )
        said = found.run(
            venv / "bin" / "pensieve", "chat", "-q", "Hello.", "--data", found.folder / "w"
        )
        assert said.strip()
        assert (
            "plain"
            not in found.run(venv / "bin" / "pensieve", "doctor")
            .split("cpu kernels")[1]
            .split("\n")[0]
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/newcomer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="made if missing; must be empty")
    parser.add_argument(
        "--quick", action="store_true", help="no clone, and nothing that takes long"
    )
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    if any(given.folder.iterdir()):
        parser.error(f"{given.folder} is not empty")
    problems = walk(given.folder.absolute(), ROOT, given.quick)
    print(f"{len(problems)} problems" if problems else "nothing to stop at")
    return 1 if problems else 0


def free_port() -> int:
    """Return a port that is free now, outside the range that the system assigns by itself."""
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port


def without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


if __name__ == "__main__":
    sys.exit(main())
