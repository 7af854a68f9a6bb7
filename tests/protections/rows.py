"""What the table of docs/reliability.md says: a fault in each row, and the tests that show what happens.

The last cell of a row names files below tests/, each with its tests in brackets:

    service/test_a.py (`test_one`, `test_two`), store/test_b.py (`test_three`)
"""

from __future__ import annotations

import ast
import re
from functools import cache
from typing import NamedTuple

from tests.protections import ROOT

PAGE = ROOT / "docs" / "reliability.md"
HEAD = "| fault | what happens | tests |"
NAMED = re.compile(r"([\w/]+\.py)(?: \(([^)]*)\))?")


class Row(NamedTuple):
    what_comes: str
    tests: tuple[str, ...]  # as `room/test_file.py::test_name`
    unnamed: tuple[str, ...]  # files without the names of their tests


def read_rows() -> list[Row]:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = []
    for line in lines[lines.index(HEAD) + 2 :]:
        if not line.startswith("|"):
            break
        what_comes, _, shown_by = (cell.strip() for cell in line.strip("|").split(" | "))
        tests: list[str] = []
        unnamed = []
        for file, names in NAMED.findall(shown_by):
            found = re.findall(r"`(\w+)`", names)
            tests += [f"{file}::{name}" for name in found]
            if not found:
                unnamed.append(file)
        rows.append(Row(what_comes, tuple(tests), tuple(unnamed)))
    return rows


@cache
def tests_in(file: str) -> frozenset[str]:
    """The names of the tests in a file below tests/; none if there is no such file."""
    path = ROOT / "tests" / file
    if not path.is_file():
        return frozenset()
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    found = (
        each.name
        for each in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(each, functions)
    )
    return frozenset(name for name in found if name.startswith("test_"))


def exists(test: str) -> bool:
    file, _, name = test.partition("::")
    return name in tests_in(file)
