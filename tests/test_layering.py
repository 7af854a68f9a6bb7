"""What may import what, and what nobody may do."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "pensieve"
TORCH = {"torch", "transformers", "safetensors", "cupy", "huggingface_hub"}
# Room: (rooms of ours it may import, packages of others).
LAW: dict[str, tuple[set[str], set[str]]] = {
    "core": ({"core", "errors"}, set()),
    "engine": ({"core", "engine", "errors"}, set()),
    "text": ({"text", "errors"}, {"tokenizers", "jinja2"}),
    "store": ({"store", "errors"}, {"sqlite_utils", "pysqlite3"}),
    "kernels": ({"kernels", "errors"}, {"torch", "cupy"}),
    "model": ({"model", "core", "kernels", "text", "config", "errors"}, TORCH),
    "service": ({"service", "core", "engine", "store", "text", "config", "errors", "v1"}, {"grpc"}),
    "builtin": ({"builtin"}, set()),
    "errors": (set(), set()),
    "config": ({"errors"}, set()),
}
FORBIDDEN_IN_CORE = {"time", "threading", "logging", "random", "asyncio", "multiprocessing"}
FORBIDDEN_WORDS = (
    r"\bpickle\b",
    r"(?<![\w.])eval\(",
    r"(?<![\w.])exec\(",
    r"torch\.load\b",
    r"trust_remote_code\s*=\s*True",
    r"shell\s*=\s*True",
)


def imports(path: Path, *, module_level: bool = False) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = _unguarded(tree.body) if module_level else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where things come from"
            assert node.module is not None
            yield node.module
            if node.module == "pensieve":
                yield from (f"pensieve.{alias.name}" for alias in node.names)


def _unguarded(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when the module is imported."""
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield node


MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "v1" not in path.parts)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_imports_only_what_it_may(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if room in LAW:
        ours, others = LAW[room]
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "pensieve":
                assert len(parts) == 1 or parts[1] in ours, f"{room} imports {name}"
            else:
                allowed = parts[0] in others or parts[0] in sys.stdlib_module_names
                assert allowed, f"{room} imports {name}"
            if room == "core":
                assert parts[0] not in FORBIDDEN_IN_CORE, f"core imports {name}"
    if room == "cli":
        for name in imports(path, module_level=True):
            assert name.split(".")[0] not in TORCH | {"grpc", "rich"}, (
                f"{path} imports {name} at once"
            )
            assert not name.startswith(("pensieve.model", "pensieve.kernels")), f"{path}: {name}"


def test_the_law_is_not_empty() -> None:
    assert {path.relative_to(PACKAGE).parts[0] for path in MODULES} >= {"core", "engine", "store"}


@pytest.mark.parametrize("word", FORBIDDEN_WORDS)
def test_nobody_runs_data_as_code(word: str) -> None:
    for path in MODULES:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            code = line.split("#")[0]
            assert not re.search(word, code), f"{path}:{number}: {line.strip()}"
