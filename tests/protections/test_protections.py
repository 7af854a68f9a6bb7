"""Every protection can still be taken out, by a change that applies, and every row has one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.protections import ROOT, Change, Protection
from tests.protections.rows import exists, read_rows
from tests.protections.table import NOTHING_TO_TAKE_OUT, PROTECTIONS
from tests.protections.taken_out import Copy, Verdict

TESTED = {test for each in PROTECTIONS for test in each.tests}


def test_every_change_applies_and_gives_code() -> None:
    for protection in PROTECTIONS:
        contents: dict[str, str] = {}
        for change in protection.changes:
            text = contents.get(change.file) or (ROOT / change.file).read_text(encoding="utf-8")
            assert text.count(change.old) == 1, f"{protection.name}: {change.file} has changed"
            contents[change.file] = text.replace(change.old, change.new)
        for file, text in contents.items():
            if file.endswith(".py"):
                compile(text, file, "exec")


def test_every_protection_has_a_name_of_its_own_and_tests_that_exist() -> None:
    names = [each.name for each in PROTECTIONS]
    assert len(set(names)) == len(names)
    for protection in PROTECTIONS:
        assert protection.tests, protection.name
        for test in protection.tests:
            assert exists(test), f"{protection.name}: there is no {test}"


def test_every_row_names_its_tests() -> None:
    rows = read_rows()
    assert len(rows) > 50
    for row in rows:
        assert row.tests, f"no test shows what happens: {row.what_comes}"
        assert not row.unnamed, f"which tests of {row.unnamed}? {row.what_comes}"
        for test in row.tests:
            assert exists(test), f"there is no {test}: {row.what_comes}"


def test_every_row_has_a_protection_that_its_tests_notice() -> None:
    for row in read_rows():
        held = TESTED & set(row.tests)
        excused = set(NOTHING_TO_TAKE_OUT) & set(row.tests)
        assert held or excused, f"what of this row can be taken out? {row.what_comes}"
        assert not (held and excused), f"something can be taken out: {row.what_comes}"


def test_what_needs_no_protection_is_in_a_row() -> None:
    named = {test for row in read_rows() for test in row.tests}
    assert set(NOTHING_TO_TAKE_OUT) <= named


@pytest.mark.parametrize(
    ("new", "verdict"),
    [
        ("if False:", Verdict.NOTICED),
        ("if value < -1:", Verdict.MISSED),
        ("if value < unheard_of:", Verdict.BROKEN),
        ("if value <", Verdict.BROKEN),
    ],
)
def test_only_a_test_that_ran_and_failed_has_noticed(
    tmp_path: Path, new: str, verdict: Verdict
) -> None:
    (tmp_path / "tests").mkdir()
    code, test = tmp_path / "guarded.py", tmp_path / "tests" / "test_guarded.py"
    code.write_text(
        "def root(value):\n    if value < 0:\n        raise ValueError(value)\n    return value\n"
    )
    test.write_text(
        "import pytest\nfrom guarded import root\n\n\ndef test_it():\n"
        "    with pytest.raises(ValueError):\n        root(-9)\n"
    )
    before = code.read_text()
    protection = Protection(
        "a guard", (Change("guarded.py", "if value < 0:", new),), ("test_guarded.py::test_it",)
    )
    copy = Copy(tmp_path)
    if verdict is Verdict.MISSED:
        assert copy.run(protection.tests).failures == {"test_guarded.py::test_it": None}
    assert copy.take_out(protection).verdict is verdict
    assert code.read_text() == before
