"""Takes each protection out and shows that its test notices; `scripts/check_protections` runs it.

A *protection* is what makes a row of docs/reliability.md true.  Here each has a name, a small change of the
code that takes it out (an exact text, found exactly once, and what stands there instead), and the tests that
must fail then; `NOTHING_TO_TAKE_OUT` says so of a row for which taking something out would mean nothing.

    table      which protections there are: in a file for each room, and those of tenants and of backups
    rows       what the rows of docs/reliability.md name
    taken_out  a copy of the tree, in which they are taken out one after the other

test_protections.py checks in the ordinary suite that every change still applies, that every test exists,
and that each row has its protection; so a change of the code that moves one is noticed at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Change:
    """In this file, this text (which is there once) becomes that one."""

    file: str
    old: str
    new: str

    def apply(self, root: Path) -> None:
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has {text.count(self.old)} times: {self.old!r}")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


@dataclass(frozen=True)
class Protection:
    """What is taken out, by which changes, and the tests that notice, as `room/test_file.py::test_name`."""

    name: str
    changes: tuple[Change, ...]
    tests: tuple[str, ...]


def protection(name: str, file: str, old: str, new: str, *tests: str) -> Protection:
    """One that is a single change; `file` lies in pensieve/."""
    return Protection(name, (Change(f"pensieve/{file}", old, new),), tests)
