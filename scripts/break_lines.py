"""Break random lines of a change, one at a time, and report which breaks a test notices.

scripts/break_lines                  # lines that the last commit and uncommitted changes added
scripts/break_lines main --lines 60  # lines that differ from another commit

The lines are drawn by a seed from the changed lines of pensieve/**.py that do something. Each break is one
small mistake: a negated condition, `<` for `<=`, a number that is one too high, a call left out. The tests
that are nearest by imports run in a copy of the tree with the break, until a test fails. A test that hangs
fails after 90 seconds. A test that fails with the break must pass without it; otherwise nothing is decided.

Exits with 1 if a break survived or nothing was decided about it.
"""

from __future__ import annotations

import argparse
import ast
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from scripts.import_graph import affected_tests

ROOT = Path(__file__).resolve().parent.parent
GENERATED = re.compile(r"\A(#.*\n)*(\"\"\"|#)[^\n]*generated", re.IGNORECASE)
LOGS = re.compile(r"(^|\.)_?(log|logger|logging)\.\w+$|^(warnings\.warn|print)$")
# Keyword arguments that change no behaviour, or only a text.
NO_BEHAVIOUR = (None, "strict", "encoding", "help", "description", "epilog", "metavar", "prog")
OPERATORS = {
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "is": "is not",
    "is not": "is",
    "in": "not in",
    "not in": "in",
    "and": "or",
    "or": "and",
    "+": "-",
    "-": "+",
}
_OPERATOR = re.compile(r"is\s+not\b|not\s+in\b|\b(?:is|in|and|or)\b|[<>!=]=|[<>+-]")
TEST_SECONDS = 90  # per test; some tests set a longer time with `pytest.mark.timeout`
EXIT_SECONDS = 10  # how long a process may live after its tests have ended
PATIENCE_SECONDS = 30  # how long tests wait for an event that never happens
# Python runs this at its start. Without it, the finder of an editable installation, which comes before every
# path, would import the original tree instead of the copy.
IMPORT_FROM_COPY = """
import sys

sys.meta_path[:] = [each for each in sys.meta_path if "_editable_" not in type(each).__module__]
"""
Span = tuple[int, int]  # byte positions in a source
Edit = tuple[Span, str]


@dataclass(frozen=True)
class Break:
    """A mistake in one line of a file: other text at some bytes."""

    path: str
    line: int
    original: bytes
    span: Span
    text: str

    @property
    def source(self) -> str:
        """Return the whole file with the mistake."""
        start, stop = self.span
        return (self.original[:start] + self.text.encode() + self.original[stop:]).decode()

    @property
    def before(self) -> str:
        """Return the original line, or the first line if the break spans several lines."""
        return _shown(self.original.decode(), self.line, self.original[slice(*self.span)].strip())

    @property
    def after(self) -> str:
        return _shown(self.source, self.line, self.text.encode())

    def is_code(self) -> bool:
        try:
            ast.parse(self.source)
        except SyntaxError:
            return False
        return True


def _shown(source: str, line: int, text: bytes) -> str:
    return source.splitlines()[line - 1].strip() + (" …" if b"\n" in text else "")


class Verdict(Enum):
    NOTICED = "noticed"
    SURVIVED = "SURVIVED"
    UNDECIDED = "UNDECIDED"


@dataclass(frozen=True)
class Result:
    broken: Break
    verdict: Verdict
    why: str


# -- choosing lines --


def changed_lines(root: Path, base: str) -> dict[str, set[int]]:
    """Return the lines of pensieve/**.py, by path, that the working tree has and BASE has not."""
    command = ["git", "diff", "--unified=0", "--no-color", "--no-ext-diff", "--no-prefix", base]
    command += ["--", "pensieve/*.py"]
    diff = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    found: dict[str, set[int]] = {}
    path = ""
    for line in diff.splitlines():
        if line.startswith("+++ "):
            path = line[4:]
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(hunk[1]), int(hunk[2] or 1)
            if count:
                found.setdefault(path, set()).update(range(first, first + count))
    return found


def breaks_of(path: str, source: str, lines: Iterable[int]) -> dict[int, list[Break]]:
    """Return every break of these lines, by line. Lines that do nothing have none."""
    if path.startswith("pensieve/v1/") or GENERATED.match(source):
        return {}
    return _Breaker(path, source, set(lines)).breaks()


def drawn(breaks: dict[str, dict[int, list[Break]]], count: int, seed: int) -> list[Break]:
    """Draw one break for each of at most `count` random lines."""
    choose = random.Random(seed)
    lines = [(path, line) for path in sorted(breaks) for line in sorted(breaks[path])]
    chosen = []
    for path, line in sorted(choose.sample(lines, min(count, len(lines)))):
        line_breaks = breaks[path][line]
        shuffled = choose.sample(line_breaks, len(line_breaks))
        chosen += [each for each in shuffled if each.is_code()][:1]
    return chosen


class _Breaker:
    """Find the breaks of one source. Each replaces the text of a syntax node or a part of it."""

    def __init__(self, path: str, source: str, lines: set[int]) -> None:
        self._path, self._lines = path, lines
        self._bytes = source.encode()
        self._tree = ast.parse(source)

    def breaks(self) -> dict[int, list[Break]]:
        found: dict[int, list[Break]] = {}
        for node in self._nodes(self._tree):
            for (start, stop), text in self._edits(node):
                first = stop - len(self._bytes[start:stop].lstrip(b", \n"))
                line = bisect(self._line_starts, first)
                if line in self._lines:
                    broken = Break(self._path, line, self._bytes, (start, stop), text)
                    found.setdefault(line, []).append(broken)
        return found

    # -- where a mistake makes sense --

    def _nodes(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield nodes that run; skip annotations, decorators, assertions, texts, logs and settings."""
        for child in self._children(node):
            if isinstance(child, ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr):
                continue
            if isinstance(child, ast.Assign | ast.AnnAssign) and _is_setting(child):
                continue
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            if isinstance(child, ast.Call) and LOGS.search(ast.unparse(child.func)):
                continue
            yield child
            yield from self._nodes(child)

    def _children(self, node: ast.AST) -> Iterator[ast.AST]:
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list"):
                for each in value if isinstance(value, list) else [value]:
                    if isinstance(each, ast.AST):
                        yield each

    # -- the mistakes --

    def _edits(self, node: ast.AST) -> Iterator[Edit]:
        match node:
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                yield self._negated(test)
            case ast.comprehension(ifs=tests):
                yield from map(self._negated, tests)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield self._span(node), self._text(operand)
            case ast.Compare(left=left, comparators=others):
                yield from self._swapped([left, *others])
            case ast.BoolOp(values=values):
                yield from self._swapped(values[:2])
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
                yield from self._swapped([left, right])
            case ast.Constant(value=bool(value)):
                yield self._span(node), str(not value)
            case ast.Constant(value=int(value)):
                yield self._span(node), str(value + 1)
            case ast.Call(args=arguments, keywords=keywords):
                yield from self._without_keyword(node, [*arguments, *keywords])
            case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
                yield self._span(value), "None"
            case ast.Expr(value=ast.Call() as call) if not LOGS.search(ast.unparse(call.func)):
                yield self._span(node), "pass"
            case ast.Expr(value=ast.Await()) | ast.Delete() | ast.Raise() | ast.AugAssign():
                yield self._span(node), "pass"
            case ast.Continue() | ast.Break() | ast.Return(value=None):
                yield self._span(node), "pass"
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                yield self._span(node), "pass"

    def _negated(self, test: ast.expr) -> Edit:
        return self._span(test), f"(not ({self._text(test)}))"

    def _swapped(self, operands: Sequence[ast.expr]) -> Iterator[Edit]:
        """Yield a replacement of the operator between two of these operands."""
        for one, other in pairwise(operands):
            start, stop = self._span(one)[1], self._span(other)[0]
            if found := _OPERATOR.search(self._bytes[start:stop].decode()):
                swapped = OPERATORS[" ".join(found[0].split())]
                yield (start + found.start(), start + found.end()), swapped

    def _without_keyword(
        self, call: ast.AST, arguments: list[ast.expr | ast.keyword]
    ) -> Iterator[Edit]:
        for index, argument in enumerate(arguments):
            if not isinstance(argument, ast.keyword) or argument.arg in NO_BEHAVIOUR:
                continue
            start, stop = self._span(argument)
            if index:
                start = self._span(arguments[index - 1])[1]
            elif len(arguments) > 1:
                stop = self._span(arguments[1])[0]
            yield (start, stop), ""

    # -- text --

    @cached_property
    def _line_starts(self) -> list[int]:
        starts = [0]
        for line in self._bytes.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        return starts

    def _span(self, node: ast.AST) -> Span:
        assert isinstance(node, ast.expr | ast.stmt | ast.keyword)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        starts = self._line_starts
        start = starts[node.lineno - 1] + node.col_offset
        return start, starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.AST) -> str:
        start, stop = self._span(node)
        return self._bytes[start:stop].decode()


def _is_setting(node: ast.Assign | ast.AnnAssign) -> bool:
    """Return whether this assigns a constant. Constants are not broken: no test is about an exact value."""
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    return isinstance(target, ast.Name) and target.id.isupper()


# -- running the tests --


@dataclass
class Trial:
    """Break lines in copies of a tree, one at a time, and run tests on each."""

    root: Path
    tests_for: Callable[[str], list[str]]  # path -> test files, nearest first
    limit_seconds: float

    def results(self, breaks: Sequence[Break], jobs: int) -> Iterator[Result]:
        with ExitStack() as stack:
            copies = queue.SimpleQueue[Copy]()
            for _ in range(min(jobs, len(breaks))):
                copies.put(stack.enter_context(copy_of_the_tree(self.root)))

            def try_break(broken: Break) -> Result:
                copy = copies.get()
                try:
                    return self.result(broken, copy)
                finally:
                    copies.put(copy)

            with ThreadPoolExecutor(max(jobs, 1)) as pool:
                yield from pool.map(try_break, breaks)

    def result(self, broken: Break, copy: Copy) -> Result:
        tests = [each.removeprefix("tests/") for each in self.tests_for(broken.path)]
        if not tests:
            return Result(broken, Verdict.SURVIVED, "no test imports it")
        file = copy.root / broken.path
        before = file.read_bytes()
        file.write_text(broken.source, encoding="utf-8")
        try:
            run = copy.run(tests, "-x", limit_seconds=self.limit_seconds)
        finally:
            file.write_bytes(before)
        if not run.in_time:
            return Result(broken, Verdict.UNDECIDED, f"not done after {self.limit_seconds:.0f} s")
        if not run.failed:
            return Result(broken, Verdict.SURVIVED, f"{len(tests)} test files: {' '.join(tests)}")
        noticed = run.failed
        if copy.run(noticed, limit_seconds=self.limit_seconds).failed:
            return Result(broken, Verdict.UNDECIDED, f"{noticed[0]} fails without the break, too")
        return Result(broken, Verdict.NOTICED, f"by {noticed[0]}")


class TestRun(NamedTuple):
    # Tests such as `conversations/test_a.py::test_one`, or a file that could not be imported.
    failed: list[str]
    in_time: bool = True  # False: stopped before the last test


class Copy:
    """A copy of a tree. Its tests import the code of the copy."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def run(self, tests: Sequence[str], *options: str, limit_seconds: float) -> TestRun:
        """Run tests, each a path below tests/. If no report appears, the first test counts as failed."""
        report = self.root / "report.xml"
        report.unlink(missing_ok=True)
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"),
            *(f"--timeout={TEST_SECONDS}", f"--junitxml={report}", *options),
            *(f"tests/{each}" for each in tests),
        ]
        output, in_time = self._run_command(command, report, limit_seconds)
        if report.exists():
            cases = list(ElementTree.parse(report).getroot().iter("testcase"))
            failed = [
                _test_of(each) for each in cases if {"failure", "error"} & {e.tag for e in each}
            ]
            existing = [each for each in failed if self._has(each)]
            return TestRun(existing or ([] if cases and not failed else list(tests[:1])))
        # pytest-timeout ends the process before it can write a report.
        timed_out = "Timeout" in "".join(output.splitlines()[-40:])
        return TestRun(list(tests[:1]), in_time or timed_out)

    def imports_from(self) -> Path:
        """Return the folder from which a process in this copy imports its code."""
        program = "import pensieve; print(pensieve.__path__[0])"
        command, environment = [sys.executable, "-c", program], self._environment()
        printed = subprocess.check_output(command, cwd="/", env=environment, text=True)
        return Path(printed.strip()).resolve().parent

    def _has(self, test: str) -> bool:
        return (self.root / "tests" / test.partition("::")[0]).is_file()

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": str(self.root),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PENSIEVE_TEST_PATIENCE": str(PATIENCE_SECONDS),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }

    def _run_command(
        self, command: list[str], report: Path, limit_seconds: float
    ) -> tuple[str, bool]:
        """Run a command; return its output, and whether it ended in time.

        Kills the command and its child processes after `limit_seconds`, or EXIT_SECONDS after the report
        appears, whichever is earlier.
        """
        written = self.root / "output"
        with written.open("w") as output:
            process = subprocess.Popen(
                command,
                cwd=self.root,
                env=self._environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                end = time.monotonic() + limit_seconds
                while process.poll() is None and time.monotonic() < end:
                    time.sleep(0.05)
                    if report.exists():
                        end = min(end, time.monotonic() + EXIT_SECONDS)
                in_time = process.poll() is not None or report.exists()
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return written.read_text(errors="replace"), in_time


@contextmanager
def copy_of_the_tree(tree: Path) -> Iterator[Copy]:
    """Copy every file that git does not ignore to a temporary folder."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.check_output(command, cwd=tree, text=True)
    with tempfile.TemporaryDirectory(prefix="pensieve-copy-") as name:
        root = Path(name)
        for file in filter(None, listed.split("\0")):
            if (tree / file).is_file():
                (root / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(tree / file, root / file)
        (root / "sitecustomize.py").write_text(IMPORT_FROM_COPY)
        copy = Copy(root)
        found = copy.imports_from()
        assert found == root.resolve(), f"the copy would import pensieve from {found}"
        yield copy


def _test_of(case: ElementTree.Element) -> str:
    """Return the test that a case belongs to. A parametrised test fails if one of its cases fails."""
    module, name = case.get("classname", ""), case.get("name", "")
    file = (module or name).removeprefix("tests.").replace(".", "/") + ".py"
    return f"{file}::{name.partition('[')[0]}" if module else file


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/break_lines", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("base", nargs="?", default="HEAD~1", help="a commit (HEAD~1)")
    parser.add_argument("--lines", type=int, default=30, help="how many lines to break (30)")
    parser.add_argument("--seed", type=int, default=0, help="draws the lines and the breaks (0)")
    parser.add_argument("--tests", type=int, default=5, help="test files for each line (5)")
    parser.add_argument("--jobs", type=int, default=1, help="lines at the same time (1)")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for each line (900)")
    parser.add_argument("--list", action="store_true", help="show the breaks and run nothing")
    given = parser.parse_args(arguments)
    breaks = {
        path: breaks_of(path, (root / path).read_text(encoding="utf-8"), lines)
        for path, lines in changed_lines(root, given.base).items()
    }
    chosen = drawn(breaks, given.lines, given.seed)
    num_lines = sum(len(file_breaks) for file_breaks in breaks.values())
    print(f"{len(chosen)} of {num_lines} changed lines that can be broken, seed {given.seed}")
    if given.list:
        for each in chosen:
            print(_described(each))
        return 0

    def tests_for(path: str) -> list[str]:
        return affected_tests([path], at_most=given.tests, root=root)

    found: list[Result] = []
    for result in Trial(root, tests_for, given.limit).results(chosen, given.jobs):
        found.append(result)
        print(f"[{len(found)}/{len(chosen)}] {_described(result.broken)}")
        print(f"    {result.verdict.value} {result.why}", flush=True)
    missed = [each for each in found if each.verdict is not Verdict.NOTICED]
    print(f"{len(found) - len(missed)} of {len(found)} breaks were noticed")
    for result in missed:
        print(f"  {result.verdict.value} {result.broken.path}:{result.broken.line}")
    return 1 if missed else 0


def _described(broken: Break) -> str:
    return f"{broken.path}:{broken.line}\n    - {broken.before}\n    + {broken.after}"


if __name__ == "__main__":
    sys.exit(main())
