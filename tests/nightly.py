"""The nightly run: the same searches as in the test suite, each for longer.

    scripts/nightly FOLDER                            # everything: some hours
    scripts/nightly FOLDER --only faults,bytes        # some parts
    scripts/nightly FOLDER --share 0.01               # a hundredth of each part, as a trial
    scripts/nightly FOLDER --resume                   # leave out parts that this commit has already passed

FOLDER keeps the results. results.jsonl has a line for each part: the commit, the machine, the amount of work,
the failures and the time. The output of each part is in a separate file. An interrupted part adds a line,
too. Each night continues after the previous one, with new seeds, mutations and moments for kills.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.selection import EXPENSIVE, EXPENSIVE_TOGETHER

ROOT = Path(__file__).resolve().parents[1]
SLICE_SEEDS = 500  # seeds of the fault search that one process runs
REPORT_SECONDS = 60.0
TEST_SECONDS = 4 * 3600  # limit for a test without its own timeout


@dataclass
class Night:
    """The folder for results, the amount of work, and the results of earlier nights."""

    folder: Path
    share: float
    number: int  # number of earlier nights
    done: list[Mapping[str, Any]]  # the lines of results.jsonl

    def amount(self, whole: int) -> int:
        return max(round(whole * self.share), 1)


@dataclass
class Outcome:
    counts: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)


Part = Callable[[Night, Path, Outcome], None]  # fills in the outcome while it runs


def faults(night: Night, log: Path, outcome: Outcome) -> None:
    """Run 100,000 worlds of the fault search that no earlier night has run."""
    first = max((line.get("next_seed", 0) for line in night.done), default=0) or 1_000
    last = first + night.amount(100_000)
    starts = iter(range(first, last, SLICE_SEEDS))
    running: dict[subprocess.Popen[bytes], tuple[int, int]] = {}
    outcome.counts["seeds"] = 0
    outcome.more |= {"first_seed": first, "next_seed": first}
    slices: dict[int, int] = {}  # finished slices: first seed -> end
    with log.open("wb") as written, ended_with_us(running):
        while True:
            while (
                len(running) < (os.cpu_count() or 1) and (start := next(starts, None)) is not None
            ):
                seeds = (start, min(start + SLICE_SEEDS, last))
                command = [
                    sys.executable,
                    "-m",
                    "tests.faults",
                    "--seeds",
                    f"{seeds[0]}..{seeds[1]}",
                ]
                process = subprocess.Popen(command, cwd=ROOT, stdout=written, stderr=written)
                running[process] = seeds
            if not running:
                return
            for process in [each for each in running if each.poll() is not None]:
                start, stop = running.pop(process)
                slices[start] = stop
                outcome.counts["seeds"] += stop - start
                if process.returncode:
                    outcome.failures.append(f"seeds {start}..{stop}: see the log")
                while (at := outcome.more["next_seed"]) in slices:
                    outcome.more["next_seed"] = slices[at]
                say(f"faults: {outcome.counts['seeds']:,} of {last - first:,} seeds")
            time.sleep(0.2)


SCALED: set[str] = set()  # test files of all scaled parts
DIVIDED = sorted(
    {each.partition("::")[0].removeprefix("tests/") for each in (*EXPENSIVE, *EXPENSIVE_TOGETHER)}
)


def scaled(*files: str, whole: int, unit: str = "", per_scale: int = 1) -> Part:
    """Return a part that runs test files, at the scale at which they do `whole` units of work."""
    SCALED.update(files)

    def part(night: Night, log: Path, outcome: Outcome) -> None:
        scale = max(night.amount(whole) // per_scale, 1)
        report = log.with_suffix(".xml")
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-s", f"--junitxml={report}"),
            *("-o", f"timeout={TEST_SECONDS}"),
            *(f"tests/{file}" for file in files),
        ]
        given = {"PENSIEVE_TEST_SCALE": str(scale), "PENSIEVE_TEST_SEED": str(night.number)}
        status = run(command, log, given)
        if unit:
            outcome.counts[unit] = scale * per_scale
        outcome.failures += failures_of(report)
        outcome.counts["tests"] = count_of(report)
        if status and not outcome.failures:
            outcome.failures.append(f"pytest ended with {status}: see the log")

    return part


def newcomer(night: Night, log: Path, outcome: Outcome) -> None:
    """Run the commands of README and docs in an empty folder."""
    with tempfile.TemporaryDirectory(prefix="newcomer-") as folder:
        words = () if night.share >= 1 else ("--quick",)
        status = run([sys.executable, "tests/newcomer.py", folder, *words], log)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    outcome.counts["steps"] = sum(line.startswith(("ok ", "BAD")) for line in lines)
    outcome.failures += [line.strip() for line in lines if line.startswith("      ")]
    if status and not outcome.failures:
        outcome.failures.append(f"it ended with {status}: see the log")


def clients(night: Night, log: Path, outcome: Outcome) -> None:
    """Run all scenes of all clients, with the versions on the package index."""
    results = log.with_suffix(".json")
    names = () if night.share >= 1 else ("open-webui",)  # this client needs no installation
    status = run([sys.executable, "-m", "tests.clients", "--results", str(results), *names], log)
    with contextlib.suppress(FileNotFoundError):
        found = json.loads(results.read_text(encoding="utf-8"))
        outcome.counts |= {"clients": len(found), "scenes": sum(len(e["scenes"]) for e in found)}
        outcome.failures += [failure for each in found for failure in each["failures"]]
    if status and not outcome.failures:
        outcome.failures.append(f"it ended with {status}: see the log")


def real_model(night: Night, log: Path, outcome: Outcome) -> None:
    """Check exactness with smollm2, which comes from the package index."""
    results = log.with_suffix(".json")
    turns = str(night.amount(12))
    status = run(
        [sys.executable, "-m", "tests.real_model", "--turns", turns, "--results", str(results)], log
    )
    with contextlib.suppress(FileNotFoundError):
        found = json.loads(results.read_text(encoding="utf-8"))
        outcome.counts |= found["counts"]
        outcome.failures += found["failures"]
    if status and not outcome.failures:
        outcome.failures.append(f"it ended with {status}: see the log")


def papers(night: Night, log: Path, outcome: Outcome) -> None:
    """Compute all tables and figures of the papers, and count their verdicts."""
    results = log.with_suffix(".json")
    words = () if night.share >= 1 else ("--quick",)
    command = [sys.executable, "-m", "scripts.papers", "all", "--json", str(results), *words]
    status = run(command, log)
    with contextlib.suppress(FileNotFoundError):
        for row in json.loads(results.read_text(encoding="utf-8")):
            outcome.counts[row["verdict"]] = outcome.counts.get(row["verdict"], 0) + 1
    if status:
        outcome.failures.append(f"it ended with {status}: see the log")


def nemesis(night: Night, log: Path, outcome: Outcome) -> None:
    """Run storms of three minutes: on SQLite and on PostgreSQL, with a short and a long lease."""
    number, folder = night.amount(8), log.with_suffix("")
    for store, lease in itertools.product(("", "postgresql"), ("2", "10")):
        first = 10_000 * (night.number + 1)
        seeds = f"{first}..{first + (number + 3) // 4 - 1}"
        seconds = str(180 if night.share >= 0.1 else 20)
        name = f"{store or 'sqlite'}-{lease}"
        command = [sys.executable, "-m", "tests.cluster.nemesis", str(folder / name)]
        more = ["--seeds", seeds, "--lease", lease, "--seconds", seconds, "--store", store]
        status = run([*command, *more], log.with_suffix(f".{name}.log"))
        results = folder / name / "results.jsonl"
        lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
        found = [json.loads(line) for line in lines]
        outcome.counts["storms"] = outcome.counts.get("storms", 0) + len(found)
        outcome.counts["turns"] = outcome.counts.get("turns", 0) + sum(
            e["num_turns"] for e in found
        )
        for each in found:
            outcome.failures += [
                f"{name}, seed {each['seed']}: {text}" for text in each["problems"]
            ]
        if status and not outcome.failures:
            outcome.failures.append(f"it ended with {status}: see the log")


PARTS: Mapping[str, Part] = {
    "faults": faults,
    "bytes": scaled("api/grpc/test_fuzz.py", whole=1_000_000, unit="messages", per_scale=20_000),
    "values": scaled(
        "api/grpc/test_structured_fuzz.py", whole=1_000_000, unit="messages", per_scale=3_000
    ),
    "crashes": scaled(
        *("conversations/test_crashes.py", "store/test_crash.py", "store/test_power_loss.py"),
        whole=500,
        unit="kills",
        per_scale=16,
    ),
    "postgres": scaled("store/test_postgres_crash.py", whole=40, unit="kills", per_scale=3),
    "traffic": scaled(
        *("core/test_traffic.py", "core/test_small_worlds.py"),
        *("sim/test_shifts.py", "conversations/test_chaos.py"),
        whole=20,
    ),
    "ctrl-c": scaled("cli/test_ctrl_c.py", whole=1000, unit="double presses", per_scale=10),
    "commands": scaled("doc_commands", whole=1),
    "kernels": scaled("kernels", whole=1),
    "ranks": scaled("model/parallel", "launch/test_remote_rank.py", whole=1),
    "ray": scaled("cluster/test_ray_nemesis.py", whole=2),
    "browser": scaled("api/http/test_page_browser.py", whole=1),
    "thirds": scaled(*DIVIDED, whole=1),  # of these tests, a day runs only a third
    "nemesis": nemesis,
    "options": scaled("conversations/test_option_pairs.py", whole=10),
    "timing": scaled("conversations/test_timing_probe.py", whole=2),
    "newcomer": newcomer,
    "clients": clients,
    "real-model": real_model,
    "papers": papers,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/nightly",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="where results are kept")
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument(
        "--share", type=float, default=1.0, help="fraction of each part's normal amount of work"
    )
    parser.add_argument("--resume", action="store_true", help="leave out what was passed already")
    given = parser.parse_args()
    wanted = given.only.split(",")
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"there is no part {sorted(unknown)[0]!r}")
    if given.share <= 0:
        parser.error("--share is above 0")
    given.folder.mkdir(parents=True, exist_ok=True)
    results = given.folder / "results.jsonl"
    done = (
        [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    )
    night = Night(given.folder, given.share, len({line["night"] for line in done}), done)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began, commit = stamp(), commit_of_the_tree()
    has_failed, seconds = False, 0.0
    for name in wanted:
        before = [line for line in done if passed(line, name, commit, given.share)]
        if given.resume and before:
            say(f"{name}: passed before")
            seconds += before[-1]["seconds"]
            continue
        line = run_part(name, night, began, commit)
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        has_failed |= bool(line["failures"])
        seconds += line["seconds"]
        if line["interrupted"]:
            return 130
    if not has_failed and set(wanted) == set(PARTS) and given.share >= 1:
        date = datetime.now(UTC).date()
        say(f"for CONTRIBUTING.md: last green run: {date}, {commit}, {seconds / 3600:.1f} hours")
    return 1 if has_failed else 0


def run_part(name: str, night: Night, began: str, commit: str) -> dict[str, Any]:
    """Run a part. Return its line for results.jsonl."""
    log = night.folder / f"{began}-{name}.log"
    say(f"{name}: begins, and writes {log}")
    outcome, start, interrupted = Outcome(), time.monotonic(), False
    try:
        PARTS[name](night, log, outcome)
    except (KeyboardInterrupt, SystemExit):
        interrupted = True
    except Exception as error:  # a bug of this program is recorded like any other failure
        outcome.failures.append(f"{type(error).__name__}: {error}")
    seconds = time.monotonic() - start
    counts = ", ".join(f"{count:,} {what}" for what, count in outcome.counts.items())
    say(f"{name}: {counts}; {len(outcome.failures)} failures in {seconds:,.0f} s")
    for each in outcome.failures:
        say(f"    {each}")
    return {
        "part": name,
        "night": began,
        "commit": commit,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "python": platform.python_version(),
        "share": night.share,
        "counts": outcome.counts,
        "failures": outcome.failures,
        "seconds": round(seconds, 1),
        "interrupted": interrupted,
        **outcome.more,
    }


def passed(line: Mapping[str, Any], name: str, commit: str, share: float) -> bool:
    same = line["part"] == name and line["commit"] == commit and line["share"] >= share
    return same and not line["failures"] and not line["interrupted"]


def run(command: Sequence[str], log: Path, given: Mapping[str, str] | None = None) -> int:
    """Run a command to its end. From time to time, print the last line of its output."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("wb") as written:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment | dict(given or {}), stdout=written, stderr=written
        )
        with ended_with_us({process: (0, 0)}):
            while True:
                try:
                    return process.wait(REPORT_SECONDS)
                except subprocess.TimeoutExpired:
                    lines = log.read_text(errors="replace").split("\n")[-3:]
                    say(f"    … {' '.join(lines).strip()[-100:]}")


@contextlib.contextmanager
def ended_with_us(running: Mapping[subprocess.Popen[bytes], Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()


def failures_of(report: Path) -> list[str]:
    if not report.exists():
        return []
    return [
        f"{case.get('classname')}::{case.get('name')}: {str(found.get('message'))[:200]}"
        for case in ElementTree.parse(report).getroot().iter("testcase")
        for found in [*case.findall("failure"), *case.findall("error")]
    ]


def count_of(report: Path) -> int:
    if not report.exists():
        return 0
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    return sum(case.find("skipped") is None for case in cases)


def commit_of_the_tree() -> str:
    """Return the commit, followed by "+" if the tree has uncommitted changes."""

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()

    return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain") else "")


def stamp() -> str:
    return re.sub("[:.].*", "", datetime.now(UTC).strftime("%Y%m%d-%H%M%S"))


def say(line: str) -> None:
    print(f"{datetime.now(UTC):%H:%M:%S} {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
