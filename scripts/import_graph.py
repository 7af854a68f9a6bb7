"""Find the tests that a change affects, from the imports of the source. Imports nothing of the project.

`affected_tests(changed)` lists test files, nearest first. The distance of a test file is the number of
imports between it and a changed file: 0 for the file itself, 1 for a test that imports the changed module.
An import counts wherever it stands, also inside a function, but not below `if TYPE_CHECKING`. These count
as imports, too:

    "-m", "pensieve.launch.engine_process"    a module named in a string: a program that is started
    conftest.py                               for every test file in its folder and below
    "page.html", "docs/sdk.md"                a file of another kind, named in a string

Nearly every test reaches nearly every module through the daemon and the command line, so callers should set a
limit. At equal distance, the test files with paths most similar to the changed file come first.

The source is read with regular expressions, which takes one second, where parsing takes ten. The expressions
rely on ruff's formatting.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from itertools import pairwise
from pathlib import Path, PurePath

ROOT = Path(__file__).resolve().parent.parent
MAIN = "main"
# `scripts/test --changed` runs this many test files. After a change of the product it also runs SMOKE.
NEAREST = 20
SMOKE = ("tests/conversations/test_daemon.py", "tests/cli/test_chat.py")
PACKAGES = ("pensieve", "tests", "scripts")
# Changes of these files affect every test.
EVERYTHING = (
    *("pyproject.toml", "scripts/constraints.txt", "scripts/environment", "scripts/test"),
    *("tests/conftest.py", "tests/selection.py"),
)
# Files that tests read by folder, without naming them.
READ_AS_A_FOLDER = {
    "csrc/*": ("tests/kernels/*",),
    "proto/*": ("tests/test_docs.py",),
    "*.md": ("tests/test_docs.py", "tests/doc_commands/*"),
    "pensieve/*.py": ("tests/test_layering.py",),
}

_FOR_CHECKERS = re.compile(r"^( *)if TYPE_CHECKING:\n(?:\1 +.*\n|\n)+", re.MULTILINE)
_DOCSTRING = re.compile(r'^ *r?""".*?"""$', re.MULTILINE | re.DOTALL)
_PACKAGE = "|".join(PACKAGES)
_FROM = re.compile(rf"^ *from ((?:{_PACKAGE})[\w.]*) import (\([^)]*\)|.*)$", re.MULTILINE)
_IMPORT = re.compile(rf"^ *import ((?:{_PACKAGE})[\w.]*)", re.MULTILINE)
_STRING = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
_MODULE = re.compile(rf"\b(?:{_PACKAGE})(?:\.\w+)+")


def affected_tests(
    changed: Iterable[str], *, at_most: int | None = None, root: Path = ROOT
) -> list[str]:
    """Return the test files that a change of these files affects, nearest first.

    Paths are relative to the root. A deleted file affects the tests that still name it.
    """
    return ImportGraph.read(root).affected_tests(changed)[:at_most]


@dataclass(frozen=True)
class ImportGraph:
    """The files of a tree, and the files that name each of them."""

    files: tuple[str, ...]
    importers: dict[str, set[str]]  # file -> the files that name it

    @classmethod
    def read(cls, root: Path) -> ImportGraph:
        """Read every file that git tracks or that is new and not ignored."""
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
        names = Names(tuple(sorted(set(listed.stdout.split("\0")) - {""})))
        importers = defaultdict[str, set[str]](set)
        for path in names.files:
            if (root / path).is_file() and path.endswith(".py"):
                for named in names.in_source(path, (root / path).read_text(encoding="utf-8")):
                    importers[named].add(path)
        return cls(names.files, dict(importers))

    @cached_property
    def tests(self) -> tuple[str, ...]:
        return tuple(path for path in self.files if fnmatch(path, "tests/*test_*.py"))

    def affected_tests(self, changed: Iterable[str]) -> list[str]:
        changed = list(changed)
        distances = self._distances(changed)
        found = [test for test in self.tests if test in distances]
        return sorted(found, key=lambda test: (distances[test], -_likeness(test, changed), test))

    def _distances(self, changed: list[str]) -> dict[str, int]:
        if not set(changed).isdisjoint(EVERYTHING):
            return dict.fromkeys(self.tests, 1)
        distances = dict.fromkeys(changed, 0)
        reached = changed
        for distance in range(1, len(self.files)):
            importers = {each for path in reached for each in self.importers.get(path, ())}
            if distance == 1:
                importers |= {test for path in changed for test in self._readers_of_folder(path)}
            reached = sorted(importers - distances.keys())
            distances |= dict.fromkeys(reached, distance)
        return distances

    def _readers_of_folder(self, path: str) -> Iterator[str]:
        for pattern, readers in READ_AS_A_FOLDER.items():
            if fnmatch(path, pattern):
                yield from (
                    test for test in self.tests if any(fnmatch(test, each) for each in readers)
                )


class Names:
    """Find files by their names in source text."""

    def __init__(self, files: tuple[str, ...]) -> None:
        self.files = files
        self._modules = {
            ".".join(PurePath(path).with_suffix("").parts).removesuffix(".__init__"): path
            for path in files
            if path.endswith(".py")
        }
        self._others = defaultdict[str, list[str]](list)  # by base name
        for path in files:
            if not path.endswith(".py"):
                self._others[os.path.basename(path)].append(path)

    def in_source(self, path: str, source: str) -> Iterator[str]:
        """Yield each file that this source names."""
        source = _DOCSTRING.sub("", _FOR_CHECKERS.sub("", source))
        for module, names in _FROM.findall(source):
            for name in re.findall(r"(\w+)(?: as \w+)?", names):
                yield from self._file_of(f"{module}.{name}")
        for module in _IMPORT.findall(source):
            yield from self._file_of(module)
        texts = _STRING.findall(source)
        for option, program in pairwise(texts):
            if option == "-m":
                yield from self._file_of(f"{program}.__main__")
        for text in texts:
            for module in _MODULE.findall(text):
                yield from self._file_of(module)
            yield from self._others_in(text, "scripts" in texts)
        if fnmatch(path, "tests/*test_*.py"):
            for folder in PurePath(path).parents:
                if (conftest := ".".join((*folder.parts, "conftest"))) in self._modules:
                    yield self._modules[conftest]

    def _file_of(self, dotted: str) -> Iterator[str]:
        """Yield the file of a module, or of the module that defines this name."""
        while dotted and dotted not in self._modules:
            dotted = dotted.rpartition(".")[0]
        if dotted:
            yield self._modules[dotted]

    def _others_in(self, text: str, has_scripts: bool) -> Iterator[str]:
        """Yield files that are not modules. Script names are common words, so their folder must be named."""
        for word in re.findall(r"[\w.-]+", text):
            for path in self._others.get(word, ()):
                if "." in word or ("/" in path and path in text) or (has_scripts and word == text):
                    yield path


def _likeness(test: str, changed: Iterable[str]) -> int:
    """Return how many words the test's path has in common with a changed path."""
    words = set(re.findall(r"[a-z0-9]+", test))
    return max(len(words & set(re.findall(r"[a-z0-9]+", path))) for path in changed)


def main(arguments: list[str]) -> None:
    """Print the test files that `scripts/test --changed [BASE]` runs."""
    changed = changed_paths(arguments[0] if arguments else None)
    tests = affected_tests(changed)
    if set(changed).isdisjoint(EVERYTHING):
        product = any(path.startswith("pensieve/") for path in changed)
        tests = list(dict.fromkeys((*tests[:NEAREST], *(SMOKE if product else ()))))
    print(*(f"{test}\n" for test in tests), sep="", end="")


def changed_paths(base: str | None, root: Path = ROOT) -> list[str]:
    """Return the paths that differ between a commit and the working tree, including untracked files.

    The default commit is where the branch left main; on main, the last commit.
    """
    if base is None:
        branch_point = _git(root, "merge-base", MAIN, "HEAD", check=False)
        base = branch_point[0] if branch_point else "HEAD"
    new = _git(root, "ls-files", "--others", "--exclude-standard")
    return [*_git(root, "diff", "--name-only", "--no-renames", base, "--"), *new]


def _git(root: Path, *arguments: str, check: bool = True) -> list[str]:
    command = ["git", *arguments]
    ran = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=False)
    if ran.returncode and check:
        sys.exit(f"`{' '.join(command)}` failed")
    return ran.stdout.splitlines()


if __name__ == "__main__":
    main(sys.argv[1:])
