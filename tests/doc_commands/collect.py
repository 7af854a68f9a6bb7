"""Collect the command lines in README, docs and help texts, as a reader would copy them."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pensieve.cli.main import parser

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob(".github/**/*.md")])
PROGRAMS = (
    "pensieve|scripts/\\w+|.ci/run|python3?|pip|git|rm|cp|mv|docker|systemctl|buf|grpcurl|curl"
)
COMMAND = re.compile(rf"\s*(?:\$ )?((?:[A-Z_]+=\S+ +)*(?:{PROGRAMS})(?:\s.*)?)$")
MODULES = (
    "tests/nightly.py",
    "tests/newcomer.py",
    "tests/clients/__main__.py",
    "tests/faults/__main__.py",
)
JOINTS = ("&&", "||", ";", "|")
REDIRECTIONS = (">>", ">", "<")


class Shown(NamedTuple):
    """A command line, without its comment, and the page where it is."""

    line: str
    place: str


def shown() -> Iterator[Shown]:
    """Yield all command lines. A line that occurs several times is yielded several times."""
    for page in PAGES:
        yield from lines_of(page.read_text(encoding="utf-8"), str(page.relative_to(ROOT)))
    for module in help_texts():
        text = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or ""
        yield from lines_of(text, f"the help of {module.relative_to(ROOT)}")
    for command in commands(parser()):
        for said in (command.description, command.epilog):
            yield from lines_of(said or "", f"{command.prog} --help")


def help_texts() -> Iterator[Path]:
    """Yield the files whose module docstring is the help of a script."""
    for script in sorted((ROOT / "scripts").iterdir()):
        if script.is_file() and script.read_bytes().startswith(b"#!/usr/bin/env python"):
            yield script
    for module in map(ROOT.joinpath, MODULES):
        if module.exists():
            yield module


def lines_of(text: str, place: str) -> Iterator[Shown]:
    """Yield lines that begin with a program: in shell code blocks, or indented by four spaces."""
    is_shell: bool | None = None  # None: outside code blocks
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            language = line.strip().removeprefix("```")
            is_shell = (
                language in ("", "sh", "bash", "shell", "console") if is_shell is None else None
            )
        elif (is_shell or (is_shell is None and line.startswith("    "))) and (
            found := COMMAND.match(without_comment(line))
        ):
            yield Shown(" ".join(found[1].split()), place)


def without_comment(line: str) -> str:
    for found in re.finditer(r"\s+#(?=\s|$)", line):
        if line[: found.start()].count('"') % 2 == 0:
            return line[: found.start()]
    return line


def python_blocks() -> Iterator[Shown]:
    """Yield the Python code blocks of the pages."""
    for page in PAGES:
        for block in re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
            yield Shown(block, str(page.relative_to(ROOT)))


def inline() -> Iterator[Shown]:
    """Yield commands inside sentences. Most of them are incomplete."""
    for page in PAGES:
        for quoted in re.findall(r"`((?:pensieve|scripts/run) [^`\n]+)`", page.read_text("utf-8")):
            yield Shown(quoted, str(page.relative_to(ROOT)))


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from commands(command)


def parts(line: str) -> Iterator[list[str]]:
    """Yield the words of each program in a line, without redirections."""
    words: list[str] = []
    left_out = False
    for word in shlex.split(line):
        if left_out:
            left_out = False
        elif word in REDIRECTIONS:
            left_out = True
        elif word in JOINTS:
            yield words
            words = []
        elif words or not re.fullmatch(r"[A-Z_]+=.*", word):
            words.append(word)
    yield words
