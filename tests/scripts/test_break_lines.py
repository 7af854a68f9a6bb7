"""scripts/break_lines plants small mistakes, and tells which of them the tests notice and which survive."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts.break_lines import breaks_of, changed_lines, drawn, main

SUMS = """
from __future__ import annotations

import logging

LONG = 400
_log = logging.getLogger(__name__)


def least(numbers: list[int], below: int = 7) -> int | None:
    \"\"\"Return the least number, if there is one.\"\"\"
    found: int | None
    _log.debug("of %d numbers", len(numbers))
    if not numbers:
        return None
    assert len(numbers) < 100
    numbers.sort(key=abs, reverse=False)
    found = numbers[0]
    for number in [each for each in numbers if each >= 0]:
        if number < below and number != 3:
            found = number + 1
            break
    return found
"""


def breaks(text: str, source: str = SUMS) -> list[str]:
    """Return the broken versions of the line with this text."""
    line = source.splitlines().index(text) + 1
    found = breaks_of("pensieve/sums.py", source, [line]).get(line, [])
    for each in found:
        assert each.is_code()
        assert each.before.removesuffix(" …") == text.strip()
    return [each.after for each in found]


def test_each_break_is_one_small_mistake() -> None:
    assert breaks("    if not numbers:") == ["if (not (not numbers)):", "if numbers:"]
    assert breaks("        return None") == []
    assert breaks("    return found") == ["return None"]
    assert breaks("            break") == ["pass"]
    assert breaks("            found = number + 1") == [
        "found = number - 1",
        "found = number + 2",
    ]
    assert breaks("    numbers.sort(key=abs, reverse=False)") == [
        "pass",
        "numbers.sort(reverse=False)",
        "numbers.sort(key=abs)",
        "numbers.sort(key=abs, reverse=True)",
    ]
    assert breaks("        if number < below and number != 3:") == [
        "if (not (number < below and number != 3)):",
        "if number < below or number != 3:",
        "if number <= below and number != 3:",
        "if number < below and number == 3:",
        "if number < below and number != 4:",
    ]
    assert breaks("    for number in [each for each in numbers if each >= 0]:") == [
        "for number in [each for each in numbers if (not (each >= 0))]:",
        "for number in [each for each in numbers if each > 0]:",
        "for number in [each for each in numbers if each >= 1]:",
    ]
    assert breaks("def least(numbers: list[int], below: int = 7) -> int | None:") == [
        "def least(numbers: list[int], below: int = 8) -> int | None:"
    ]


@pytest.mark.parametrize(
    "text",
    [
        "import logging",
        "LONG = 400",
        '    """Return the least number, if there is one."""',
        "    found: int | None",
        '    _log.debug("of %d numbers", len(numbers))',
        "    assert len(numbers) < 100",
    ],
)
def test_lines_without_an_effect_on_tests_are_not_broken(text: str) -> None:
    assert breaks(text) == []


def test_generated_files_are_not_broken() -> None:
    assert breaks_of("pensieve/v1/a_pb2.py", "x = 1\n", [1]) == {}
    assert breaks_of("pensieve/client/a.py", '"""Generated from b.py."""\nx = 1\n', [2]) == {}
    assert breaks_of("pensieve/client/a.py", "x = 1\n", [1]) != {}


def test_a_multi_line_statement_is_removed_whole_and_a_keyword_argument_with_its_line() -> None:
    source = 'print("ä")\ncall(\n    1,\n    first=1,\n    second="ö",\n)\n'
    found = breaks_of("pensieve/a.py", source, range(1, 7))
    assert [each.source for each in found[2]] == ['print("ä")\npass\n']
    assert [each.before for each in found[2]] == ["call( …"]
    without = 'print("ä")\ncall(\n    1,\n    second="ö",\n)\n'
    assert without in [each.source for each in found[4]]
    assert 1 not in found


def test_a_seed_draws_the_same_breaks_again() -> None:
    found = {"pensieve/sums.py": breaks_of("pensieve/sums.py", SUMS, range(1, 99))}
    once = drawn(found, 4, 7)
    assert once == drawn(found, 4, 7) != drawn(found, 4, 8)
    assert len({each.line for each in once}) == 4
    assert len(drawn(found, 99, 7)) == len(found["pensieve/sums.py"])


class Repository:
    """A tiny repository: one module, one test of it, and a last commit that changed two lines."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("pensieve/__init__.py", "")
        self.write("pensieve/limits.py", "HIGH = 5\n\n\ndef ok(n: int) -> bool:\n    return True\n")
        self.git("init", "--quiet")
        self.commit()
        self.write(
            "pensieve/limits.py",
            "HIGH = 5\n\n\ndef ok(n: int) -> bool:\n    str(n)\n    return not n > HIGH\n",
        )
        self.write(
            "tests/test_limits.py",
            "from pensieve.limits import ok\n\n\ndef test_ok() -> None:\n    assert ok(5) and not ok(6)\n",
        )
        self.commit()

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(exist_ok=True)
        (self.root / path).write_text(text)

    def git(self, *arguments: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *who, *arguments], cwd=self.root, check=True)

    def commit(self) -> None:
        self.git("add", ".")
        self.git("commit", "--quiet", "-m", "a step")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    # Loading this project's plugins would take much longer than these tests.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p pytest_timeout")
    return Repository(tmp_path)


def test_changed_lines_are_the_lines_missing_in_the_base(repository: Repository) -> None:
    assert changed_lines(repository.root, "HEAD~1") == {"pensieve/limits.py": {5, 6}}
    assert changed_lines(repository.root, "HEAD") == {}
    repository.write("pensieve/more.py", "x = 1\n")
    repository.git("add", "--intent-to-add", "pensieve/more.py")
    assert changed_lines(repository.root, "HEAD") == {"pensieve/more.py": {1}}


def test_list_runs_no_tests(repository: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--lines", "1", "--seed", "1"], repository.root) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("1 of 2 changed lines that can be broken, seed 1\n")
    assert "\n    + " in printed


def test_breaks_are_reported_as_noticed_or_surviving(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (repository.root / "pensieve/limits.py").read_text()
    assert main(["--seed", "0"], repository.root) == 1
    printed = capsys.readouterr().out
    assert "pensieve/limits.py:5\n" in printed
    assert "    SURVIVED 1 test files: test_limits.py\n" in printed
    assert "    noticed by test_limits.py::test_ok\n" in printed
    assert "1 of 2 breaks were noticed\n  SURVIVED pensieve/limits.py:5\n" in printed
    assert (repository.root / "pensieve/limits.py").read_text() == before


def test_a_break_is_undecided_if_a_test_fails_without_it(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.write(
        "tests/test_limits.py", "import pensieve.limits\n\n\ndef test_ok():\n    raise OSError\n"
    )
    assert main(["--lines", "1"], repository.root) == 1
    assert (
        "UNDECIDED test_limits.py::test_ok fails without the break, too" in capsys.readouterr().out
    )
