"""Every command line of README, docs and help texts works after an installation as in the docs.

Each line is parsed by the parser of its command. Most lines are run; slow ones run only at night
(`scripts/nightly`, part `commands`). table.py says how each line is run, or why it is not run. A line that is
missing in table.py fails here.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from pensieve.cli.main import parser
from tests.doc_commands.collect import (
    ROOT,
    Shown,
    commands,
    inline,
    lines_of,
    parts,
    python_blocks,
    shown,
)
from tests.doc_commands.plain import hidden, plain_environment
from tests.doc_commands.table import NOT_RUN, ROWS
from tests.doc_commands.world import Row, World

TOP = parser()
LINES = sorted({each.line for each in shown()})
NEVER = re.compile(r"Traceback|Warning|leaked|[Dd]eprecat|^[EWI]\d{4} .*", re.MULTILINE)


def marked(row: Row) -> object:
    marks = (pytest.mark.full, pytest.mark.timeout(4000)) if row.nightly else ()
    return pytest.param(row, id=row.line, marks=marks)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("reader"))
    yield made
    for ended in made.close():
        assert ended.code == 0, ended.err
        assert not NEVER.search(ended.err), ended.err


def test_table_py_has_every_command_line_of_the_docs() -> None:
    rows = [row.line for row in ROWS]
    assert len(set(rows)) == len(rows)
    unknown = {each for each in shown() if each.line not in rows and each.line not in NOT_RUN}
    assert not unknown, f"tests/doc_commands/table.py does not say how to run {unknown}"
    stale = [line for line in (*rows, *NOT_RUN) if line not in LINES]
    assert not stale, f"no page has {stale} any more"
    assert not set(rows) & set(NOT_RUN)


@pytest.mark.parametrize("line", LINES)
def test_the_parser_of_its_command_accepts_the_line(line: str) -> None:
    for words in parts(line):
        program = words[0]
        if program in ("pensieve", "scripts/run"):
            parser().parse_args(words[1:] or ["chat"])
        elif program == "pip":
            check_extras(words)
        elif program.startswith("scripts/"):
            check_script(words)
        elif program == "python" and "-c" in words:
            compile(words[words.index("-c") + 1], line, "exec")
        elif program == "python" and words[1] != "-m":
            assert (ROOT / words[1]).is_file(), line
        else:
            assert program in ("python", "rm", "curl"), f"unknown program {program}"


def check_script(words: list[str]) -> None:
    """Check that the script exists and has these flags. The flags may be in a module that it starts."""
    script = ROOT / words[0]
    assert script.stat().st_mode & 0o111, f"{words[0]} cannot be run"
    source = script.read_text(encoding="utf-8")
    for module in re.findall(r"-m ((?:tests|scripts)[.\w]*)", source):
        folder = ROOT / module.replace(".", "/")
        file = folder / "__main__.py" if folder.is_dir() else folder.with_suffix(".py")
        source += file.read_text(encoding="utf-8")
    for file in re.findall(r"tests/[\w/]*\.py", source):
        source += (ROOT / file).read_text(encoding="utf-8")
    for flag in words[1:]:
        if flag.startswith("-"):
            assert re.search(rf"(?<![\w-]){flag}(?![\w-])", source), f"{words[0]} has no {flag}"


def check_extras(words: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for word in words:
        if found := re.fullmatch(r"\.\[([\w,]+)\]", word):
            assert set(found[1].split(",")) <= set(project["optional-dependencies"])


@pytest.mark.parametrize("row", [marked(row) for row in ROWS])
def test_the_line_runs(row: Row, world: World) -> None:
    if row.starts:
        world.need(row.starts)
        return
    for name in row.needs:
        world.need(name)
    ended = world.serve(row) if row.serves else world.run(row)
    assert ended.code == row.code, ended.out + ended.err
    for expected in row.expects:
        assert re.search(expected, ended.out + ended.err), ended.out + ended.err
    assert not NEVER.search(ended.out + ended.err), ended.out + ended.err
    assert row.serves or ended.out.strip(), "the command wrote nothing"


@pytest.mark.parametrize(
    "block",
    list(python_blocks()),
    ids=lambda block: f"{block.place}: {block.line.splitlines()[-1]}",
)
def test_the_python_code_block_runs(block: Shown, world: World) -> None:
    ended = world.run_python(block.line)
    assert ended.code == 0, ended.err
    assert not NEVER.search(ended.err), ended.err
    assert ended.out.strip() or "print" not in block.line
    if block.place == "README.md":
        assert re.search(r"\(\d+ new tokens, [1-9]\d* cached\)", ended.out), ended.out


def test_flags_named_in_sentences_exist() -> None:
    wrong = [f"{each.place}: {each.line}" for each in inline() if not is_known(each)]
    assert not wrong, "\n".join(wrong)


def is_known(each: Shown) -> bool:
    """Return whether the command has these flags. Placeholder words are ignored."""
    found: argparse.ArgumentParser = TOP
    words = re.split(r"[\s,]+", each.line)[1:]
    for word in words:
        deeper = [
            action for action in found._actions if isinstance(action, argparse._SubParsersAction)
        ]
        if deeper and word in deeper[0].choices:
            found = deeper[0].choices[word]
    flags = {flag.split("=")[0] for flag in words if re.match(r"--?[a-z]", flag)}
    below = {flag for command in commands(found) for flag in command._option_string_actions}
    return flags <= below and (found is not TOP or bool(flags) or "COMMAND" in words)


@pytest.mark.parametrize("command", [each.prog.split()[1:] for each in commands(parser())])
def test_every_command_has_a_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args([*command, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: pensieve")


def test_lines_are_found_only_in_indented_blocks_and_fences() -> None:
    text = (
        '    pensieve chat -q "a # b"   # a comment\n    └── pensieve/\n'
        "Use pensieve chat.\n```python\npensieve = 1\n```\n```sh\n$ pip install x\n```\n"
        "    A_B=1 scripts/run serve\n    pensieve.client  a module\n"
    )
    lines = [each.line for each in lines_of(text, "here")]
    assert lines == ['pensieve chat -q "a # b"', "pip install x", "A_B=1 scripts/run serve"]
    assert list(parts("A=1 pip wheel . && pensieve chat < notes >> out")) == [
        ["pip", "wheel", "."],
        ["pensieve", "chat"],
    ]


def test_the_plain_environment_hides_packages_that_only_developers_have(tmp_path: Path) -> None:
    """Otherwise a line could pass here, and fail for a reader."""
    assert {"matplotlib", "hypothesis", "pytest"} <= hidden().keys()
    assert not {"torch", "grpc", "rich", "numpy", "pensieve"} & hidden().keys()
    environment = plain_environment(tmp_path / "plain")
    tried = "import importlib.util as u; print([u.find_spec(n) is not None for n in ('matplotlib', 'rich')])"

    def run(*words: str) -> str:
        return subprocess.run(
            words, env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()

    assert run(sys.executable, "-c", tried) == "[False, True]"
    run(environment["PENSIEVE_ADD_EXTRA"], "bench")
    assert run(sys.executable, "-c", tried) == "[True, True]"
