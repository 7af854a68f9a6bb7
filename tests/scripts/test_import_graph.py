"""Which tests a change affects: imports in functions, programs, support modules, and other kinds of files."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts import import_graph
from scripts.import_graph import affected_tests, changed_paths

TREE = {
    "pensieve/__init__.py": "",
    "pensieve/__main__.py": "from pensieve.cli.main import main\n",
    "pensieve/core/turn.py": '"""The opposite of pensieve.core.page."""\n',
    "pensieve/core/page.py": "",
    "pensieve/core/cache.py": (
        "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from pensieve.core.page import Page\n"
        "\nfrom pensieve.core.turn import Turn\n"
    ),
    "pensieve/engine/loop.py": "import pensieve.core.cache\n",
    "pensieve/conversations/front.py": 'PAGE = "page.html"\nENGINE = ("-m", "pensieve.engine.loop")\n',
    "pensieve/conversations/page.html": "",
    "pensieve/cli/main.py": (
        "def main():\n    from pensieve.conversations.front import (\n        PAGE,\n    )\n"
    ),
    "tests/conftest.py": "",
    "tests/cli/conftest.py": "from pensieve.core.page import Page\n",
    "tests/core/rig.py": "from pensieve.core.cache import Cache\n",
    "tests/core/test_cache.py": "from tests.core.rig import Rig\n",
    "tests/core/test_turn.py": "from pensieve.core import turn\n",
    "tests/conversations/test_front.py": "from pensieve.conversations import front\n",
    "tests/cli/test_main.py": 'COMMAND = (\n    "-m",\n    "pensieve",\n)\n',
    "tests/test_docs.py": "",
    "docs/structure.md": "",
    "scripts/check": "",
    "tests/scripts/test_check.py": 'SCRIPT = ROOT / "scripts" / "check"\n',
    "tests/core/test_words.py": 'VERB = "check"\n',
    "pyproject.toml": "",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q", "-b", "main", tmp_path], check=True)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("tests/core/test_turn.py", ["core/test_turn.py"]),
        # cli/conftest.py imports it. Imports for type checkers and words in docstrings do not count.
        ("pensieve/core/page.py", ["cli/test_main.py"]),
        (
            "pensieve/core/turn.py",
            [
                "core/test_turn.py",
                "core/test_cache.py",
                "conversations/test_front.py",
                "cli/test_main.py",
            ],
        ),
        ("pensieve/conversations/page.html", ["conversations/test_front.py", "cli/test_main.py"]),
        ("docs/structure.md", ["test_docs.py"]),
        ("scripts/check", ["scripts/test_check.py"]),
    ],
)
def test_the_nearest_tests_come_first(tree: Path, changed: str, tests: list[str]) -> None:
    assert affected_tests([changed], root=tree) == [f"tests/{test}" for test in tests]


def test_files_that_every_test_depends_on_affect_every_test(tree: Path) -> None:
    every = sorted(name for name in TREE if "/test_" in name)
    for changed in ("pyproject.toml", "tests/conftest.py"):
        assert sorted(affected_tests([changed], root=tree)) == every


def test_a_limit_keeps_the_nearest_tests(tree: Path) -> None:
    found = affected_tests(["pensieve/core/turn.py"], at_most=2, root=tree)
    assert found == ["tests/core/test_turn.py", "tests/core/test_cache.py"]


def test_changed_paths_include_the_working_tree_and_the_branch(tree: Path) -> None:
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *who, *arguments], cwd=tree, check=True, capture_output=True)

    git("add", ".")
    git("commit", "-m", "main")
    git("checkout", "-b", "branch")
    (tree / "pensieve/core/turn.py").write_text("A = 1\n")
    git("commit", "-a", "-m", "branch")
    (tree / "pensieve/core/page.py").unlink()
    (tree / "docs/new.md").write_text("")
    assert changed_paths(None, tree) == [
        "pensieve/core/page.py",
        "pensieve/core/turn.py",
        "docs/new.md",
    ]
    assert changed_paths("HEAD", tree) == ["pensieve/core/page.py", "docs/new.md"]
    with pytest.raises(SystemExit, match="diff"):
        changed_paths("no-such-commit", tree)


def test_the_files_of_the_smoke_tests_exist() -> None:
    for test in import_graph.SMOKE:
        assert (import_graph.ROOT / test).is_file()
