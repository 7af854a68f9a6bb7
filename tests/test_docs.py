"""The README and the help texts tell the truth about what there is."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from pensieve.cli.main import parser

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from commands(command)


def test_every_option_of_every_command_has_a_help_text():
    for command in commands(parser()):
        assert "usage: pensieve" in command.format_help()
        bare = [action.dest for action in command._actions if not action.help]
        allowed = {"temperature", "top_p", "top_k", "seed", "policy", "command", "kind"}
        assert set(bare) <= allowed, f"{command.prog}: {bare}"


def test_every_command_is_in_the_readme():
    for command in commands(parser()):
        words = command.prog.split()[1:]
        if words:
            assert " ".join(words) in README, f"the README does not mention {command.prog}"


def test_the_file_tree_names_every_module_and_script():
    tree = README[README.index("## Files") : README.index("## Licence")]
    for path in sorted((ROOT / "pensieve").rglob("*.py")):
        if path.name not in ("__init__.py", "__main__.py") and path.parent.name != "v1":
            assert re.search(rf"\b{re.escape(path.name)}\b", tree), f"{path} is not in the tree"
    for path in sorted((ROOT / "scripts").iterdir()):
        if path.is_file():
            assert path.name in tree, f"{path} is not in the tree"


def test_the_file_tree_names_nothing_that_is_gone():
    tree = README[README.index("## Files") : README.index("## Licence")]
    names = set(re.findall(r"^ +([\w./]+\.(?:py|toml|txt|md))", tree, re.MULTILINE))
    present = {path.name for path in ROOT.rglob("*") if ".venv" not in path.parts}
    missing = {name for name in names if Path(name).name not in present}
    assert not missing, f"the tree names files that do not exist: {missing}"
