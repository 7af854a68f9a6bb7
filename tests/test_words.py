"""One word for one thing: the table "Words not to use" of docs/structure.md is kept.

A word is banned in *names* (of files and identifiers), or *everywhere* (comments, texts and the pages of
docs included).  Names are cut into words at underscores and capitals, so `stay_condemned` and
`CondemnedChunk` both hold `condemned`.  What is generated, and what the built-in model learns from or has
learned, is left out.
"""

from __future__ import annotations

import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("pensieve", "scripts", "proto", "csrc")
PAGES = ("docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", ".github")
LEFT_OUT = (
    *("pensieve/v1/*", "pensieve/builtin/*", "scripts/builtin_corpus/*", "*/constraints.txt"),
    "docs/images/*",
)
TABLE = re.compile(r"<!-- words not to use.*?-->(.*?)<!-- end of the words -->", re.DOTALL)
FILE_TREE = re.compile(r"<!-- file tree.*?<!-- end of the file tree -->", re.DOTALL)


class Ban(NamedTuple):
    words: tuple[str, ...]  # one thing, of one word or of several
    instead: str
    everywhere: bool  # else in names only


class Found(NamedTuple):
    path: str
    word: str
    line: int  # 0: the file's own name
    instead: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.word!r}: {self.instead}"


def bans_of(page: str) -> tuple[Ban, ...]:
    table = TABLE.search(page)
    assert table is not None, "docs/structure.md has no table of words"
    bans = []
    for line in table[1].strip().splitlines()[2:]:
        words, instead, where = (cell.strip() for cell in line.strip("|").split("|"))
        assert where in {"names", "everywhere"}, line
        bans.append(Ban(tuple(words.split(", ")), instead, where == "everywhere"))
    return tuple(bans)


BANS = bans_of((ROOT / "docs" / "structure.md").read_text(encoding="utf-8"))
SINGLE = {word: ban for ban in BANS for word in ban.words if " " not in word and "'" not in word}
PHRASES = {word: ban for ban in BANS for word in ban.words if word not in SINGLE}


def words_of(text: str) -> list[str]:
    """`stay_condemned`, `CondemnedChunk` and `two words`: in small letters, one by one."""
    text = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", text)
    return [word.lower() for word in re.findall(r"[A-Za-z]+", text)]


def names_of_python(text: str) -> Iterator[tuple[str, int]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            yield token.string, token.start[0]


def names_of_others(text: str) -> Iterator[tuple[str, int]]:
    """Of C++, CUDA, protos and shell: what is left without comments and strings."""

    def blank(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n")

    code = re.sub(
        r'/\*.*?\*/|//[^\n]*|(?m:^\s*#(?!define).*$)|"(?:\\.|[^"\\\n])*"',
        blank,
        text,
        flags=re.DOTALL,
    )
    for number, line in enumerate(code.splitlines(), 1):
        for name in re.findall(r"[A-Za-z_]\w*", line):
            yield name, number


def banned_in(path: str, text: str) -> Iterator[Found]:
    """What is banned in a source."""
    for word in words_of(path):
        if word in SINGLE:
            yield Found(path, word, 0, SINGLE[word].instead)
    python = path.endswith(".py") or text.startswith("#!/usr/bin/env python")
    for name, line in (names_of_python if python else names_of_others)(text):
        words = words_of(name)
        for word in words:
            if word in SINGLE and not SINGLE[word].everywhere:
                yield Found(path, word, line, SINGLE[word].instead)
    yield from banned_in_prose(path, text)


def banned_in_prose(path: str, text: str) -> Iterator[Found]:
    for number, line in enumerate(text.splitlines(), 1):
        words = words_of(line)
        for word in words:
            if word in SINGLE and SINGLE[word].everywhere:
                yield Found(path, word, number, SINGLE[word].instead)
        spaced = " ".join(re.findall(r"[a-z']+", line.lower().replace("_", " ")))
        for phrase, ban in PHRASES.items():
            if re.search(rf"\b{phrase}\b", spaced):
                yield Found(path, phrase, number, ban.instead)


def tracked(*places: str) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *places],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [path for path in dict.fromkeys(listed.stdout.splitlines()) if (ROOT / path).is_file()]
    return [path for path in paths if not any(fnmatch(path, pattern) for pattern in LEFT_OUT)]


@cache
def found() -> tuple[Found, ...]:
    everything: list[Found] = []
    for path in tracked(*SOURCES):
        everything += banned_in(path, (ROOT / path).read_text(encoding="utf-8"))
    for path in tracked(*PAGES):
        page = (ROOT / path).read_text(encoding="utf-8")
        page = TABLE.sub(lambda m: "\n" * m[0].count("\n"), page)
        page = FILE_TREE.sub(lambda m: "\n" * m[0].count("\n"), page)
        everything += banned_in_prose(path, page)
    return tuple(everything)


def test_no_banned_word_is_used() -> None:
    wrong = [str(each) for each in found()]
    assert not wrong, "\n".join(wrong)


def test_the_table_is_read() -> None:
    assert SINGLE["condemned"].everywhere
    assert not SINGLE["asked"].everywhere
    assert PHRASES["life table"].instead == "return model"
    assert len(SINGLE) > 25


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def stay_condemned(): pass", ["condemned"]),
        ("class CondemnedChunk: pass", ["condemned"]),
        ("# who is condemned goes first", ["condemned"]),
        ("told = run()", ["told"]),
        ("# as told above", []),
        ("x = 'what was said'", []),
        ("# masked, not asked", []),
        ("masked_fill(0)", []),
        ("# a life table, and life_table.py", ["life table"]),
        ("# pages that are nobody's", ["nobody's"]),
    ],
)
def test_words_are_found_where_they_are_banned(source: str, words: list[str]) -> None:
    assert [each.word for each in banned_in("pensieve/x.py", source)] == words


def test_names_of_other_languages_are_found_too() -> None:
    source = (
        '// in this order: asked\nvoid joined(int told); /* said\n */ const char* s = "asked";\n'
    )
    found = [(each.word, each.line) for each in banned_in("csrc/x.h", source)]
    assert found == [("joined", 2), ("told", 2)]
    assert [each.word for each in banned_in("pensieve/ghost.py", "")] == ["ghost"]
