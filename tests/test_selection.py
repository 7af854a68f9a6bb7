"""Which tests run: one third of the expensive tests, and none that needs something this machine lacks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import selection

pytest_plugins = ["pytester"]
TESTS = """
from pytest import mark

@mark.parametrize("number", range(9))
def test_expensive(number): pass

@mark.parametrize("number", range(3))
@mark.full
def test_of_the_night(number): pass

@mark.needs("gpu")
def test_on_a_gpu(): pass
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setattr(selection, "EXPENSIVE", ("test_storm.py",))
    lacks = {"gpu": lambda: "no GPU", "browser": lambda: "no Chromium"}
    monkeypatch.setattr(selection, "LACKS", lacks)
    pytester.makeini("[pytest]\nmarkers =\n  needs(what)\n  full\n")
    pytester.makepyfile(test_storm=TESTS, test_cheap="def test_cheap(): pass")
    return pytester


def run(project: pytest.Pytester, *arguments: str) -> set[str]:
    """Run the tests of the project, and return those that passed."""
    result = project.inline_run("-p", "tests.selection", *arguments)
    passed, skipped, failed = result.listoutcomes()
    assert (skipped, failed) == ([], [])
    return {each.nodeid for each in passed}


def test_the_parts_cover_everything_once_and_are_equal(project: pytest.Pytester) -> None:
    parts = [run(project, "--part", part) for part in ("1", "2", "3")]
    assert [len(part) for part in parts] == [1 + 3 + 1] * 3
    assert set.intersection(*parts) == {"test_cheap.py::test_cheap"}
    assert set.union(*parts) == run(project) == run(project, "--part", "all")


def test_the_part_of_a_test_does_not_depend_on_other_selections(project: pytest.Pytester) -> None:
    day = {name for name in run(project, "--part", "2") if "test_expensive" in name}
    assert run(project, "--part", "2", "-m", "not full", "-k", "expensive") == day


def test_tests_of_a_file_with_a_shared_start_stay_in_one_part(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ("test_rig.py", "test_another.py", "test_third.py")
    monkeypatch.setattr(selection, "EXPENSIVE_TOGETHER", files)
    source = "def test_one(): pass\ndef test_two(): pass"
    project.makepyfile(**{name.removesuffix(".py"): source for name in files})
    for part, name in enumerate(files, start=1):
        ran = run(project, "--part", str(part))
        assert {each for each in ran if each.partition("::")[0] in files} == {
            f"{name}::test_one",
            f"{name}::test_two",
        }


def test_the_summary_has_one_line_about_tests_left_out(project: pytest.Pytester) -> None:
    output = project.runpytest_inprocess("-p", "tests.selection", "--part", "2").stdout.str()
    assert "expensive sets: part 2 of 3" in output
    assert re.findall("^left out: .*$", output, re.MULTILINE) == [
        "left out: 1 no GPU; 8 of other parts of the expensive sets (this is part 2)"
    ]
    assert "5 passed, 9 deselected" in output


def test_every_expensive_set_exists() -> None:
    root = Path(__file__).parents[1]
    for each in (*selection.EXPENSIVE, *selection.EXPENSIVE_TOGETHER):
        path, _, test = each.partition("::")
        assert (root / path).exists()
        assert not test or f"def {test}" in (root / path).read_text()
