"""Allowed imports and forbidden calls, checked in the source without importing anything.

A *room* is a top-level package or module of pensieve. It may import the standard library, itself, `errors`,
`sampling`, and what its row in ROOMS allows. `errors`, `sampling`, `extras` and `config` are single modules.
The command line may import every room, but only inside its functions.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "pensieve"


class Room(NamedTuple):
    rooms: frozenset[str] = frozenset()  # allowed rooms of pensieve
    packages: frozenset[str] = frozenset()  # allowed other packages
    never: frozenset[str] = frozenset()  # forbidden modules of the standard library


def room(rooms: str = "", packages: str = "", never: str = "") -> Room:
    return Room(frozenset(rooms.split()), frozenset(packages.split()), frozenset(never.split()))


ROOMS = {
    "gguf": room("extras", "gguf numpy tokenizers"),
    "core": room(never="time threading logging random sqlite3 asyncio datetime secrets os"),
    "engine": room("core gc_pause", never="sqlite3 asyncio"),
    "sim": room("core engine", never="sqlite3"),
    "cells": room(packages="torch"),
    "text": room("extras", "tokenizers jinja2"),
    "store": room("extras", "sqlite_utils pysqlite3 psycopg"),
    "kernels": room(packages="torch cupy"),
    "model": room(
        "core engine kernels text config extras",
        "torch transformers tokenizers safetensors huggingface_hub",
        never="sqlite3",
    ),
    "guard": room("core store", never="sqlite3"),
    "conversations": room("core engine store text config extras gc_pause guard", never="sqlite3"),
    "api": room(
        "conversations guard core engine store text config extras v1",
        "grpc google",
        never="sqlite3",
    ),
    "jobs": room(
        "api conversations guard core engine store text v1",
        "grpc google",
    ),
    "client": room("v1", "grpc google"),
    "v1": room(packages="grpc google"),
    "builtin": room(),
    "launch": room(
        "core engine text store kernels model conversations api guard jobs client config gc_pause"
        " builtin sim gguf extras v1",
        "grpc torch huggingface_hub",
        never="sqlite3",
    ),
    "cluster": room(
        "config extras v1",
        "ray grpc google aiohttp yarl starlette yaml pydantic",
        never="sqlite3",
    ),
    "bench": room(
        "core engine text store kernels model conversations api guard jobs client config gc_pause"
        " builtin sim launch v1 extras",
        "torch transformers tokenizers safetensors grpc matplotlib rich",
        never="sqlite3",
    ),
    "errors": room(),
    "sampling": room(),
    "extras": room(),
    "gc_pause": room(),
    "config": room(never="threading"),
}
MAY_IMPORT_EVERYTHING = {"cli", "__main__", "__init__"}
HEAVY = {
    "torch",
    "transformers",
    "grpc",
    "tokenizers",
    "safetensors",
    "cupy",
    "numpy",
    "pensieve.model",
}
# Packages of pensieve.api, and packages that they must not import. No API imports another API.
FORBIDDEN_BETWEEN_APIS = {
    "grpc": ("http", "openai", "anthropic"),
    "http": ("grpc",),
    "openai": ("http", "grpc"),
    "anthropic": ("http", "grpc"),
}
CALLS_NEVER = {
    "eval": "runs text as code",
    "exec": "runs text as code",
    "torch.load": "unpickles; safetensors are read instead",
    "os.system": "goes through a shell",
    "os.popen": "goes through a shell",
}
ARGUMENTS_NEVER = {"trust_remote_code", "shell"}
IMPORTS_NEVER = {"pickle", "cPickle", "marshal", "dill", "joblib", "shelve"}


class Import(NamedTuple):
    module: str  # the absolute name
    line: int
    at_module_level: bool


def room_of(path: Path) -> str:
    inside = path.relative_to(PACKAGE)
    return inside.parts[0] if len(inside.parts) > 1 else inside.stem


SOURCES = sorted(PACKAGE.rglob("*.py"))
NAMES = {path: str(path.relative_to(PACKAGE)) for path in SOURCES}


def imports(tree: ast.AST, at_module_level: bool = True) -> Iterator[Import]:
    """Yield every import. Imports in functions or for type checkers are not at module level."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield Import(name.name, node.lineno, at_module_level)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, (
                f"line {node.lineno}: relative imports hide what comes from where"
            )
            for name in node.names:
                yield Import(f"{node.module}.{name.name}", node.lineno, at_module_level)
        elif not isinstance(node, ast.expr):
            function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
            yield from imports(node, at_module_level and not function and not typing)


class Facts(NamedTuple):
    """What the rules need to know of a file, without its syntax tree."""

    imports: tuple[Import, ...]
    in_strings: tuple[Import, ...]  # modules named in strings
    dangers: tuple[str, ...]
    names: frozenset[str]


@functools.cache
def facts_of(path: Path) -> Facts:
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    names = frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    return Facts(tuple(imports(tree)), tuple(modules_in_strings(tree)), tuple(dangers(tree)), names)


def imports_of(path: Path) -> tuple[Import, ...]:
    return facts_of(path).imports


def import_problem(home: str, module: str) -> str | None:
    """Return why a module of the room `home` may not import `module`, or None if it may."""
    allowed = ROOMS[home]
    top, *rest = module.split(".")
    if top == "pensieve":
        target = rest[0] if rest else ""
        if target in {home, "errors", "sampling", "__version__"} or target in allowed.rooms:
            return None
        return f"{home} may not import pensieve.{target}"
    if top == "__future__" or top in allowed.packages:
        return None
    if top in sys.stdlib_module_names:
        return f"{home} never imports {top}" if top in allowed.never else None
    return f"{home} may not import {top}"


def test_a_room_imports_only_what_its_row_allows() -> None:
    assembled = [path for path in SOURCES if room_of(path) not in MAY_IMPORT_EVERYTHING]
    assert {room_of(path) for path in assembled} <= ROOMS.keys(), "a room has no row in the table"
    found = [
        f"{NAMES[path]}:{each.line}: {why}"
        for path in assembled
        for each in imports_of(path)
        if (why := import_problem(room_of(path), each.module))
    ]
    assert not found, "\n".join(found)


def test_no_api_imports_another_api() -> None:
    found = [
        f"{name}:{each.line}: {each.module}"
        for name, path in MODULES.items()
        for home, others in FORBIDDEN_BETWEEN_APIS.items()
        if name.startswith(f"pensieve.api.{home}")
        for each in [*imports_of(path), *facts_of(path).in_strings]
        if each.module.startswith(tuple(f"pensieve.api.{other}" for other in others))
    ]
    assert not found, "\n".join(found)


def test_the_command_line_first_loads_only_light_modules() -> None:
    found = [
        f"{NAMES[path]}:{each.line}: {each.module} is loaded with the module"
        for path in SOURCES
        if room_of(path) in MAY_IMPORT_EVERYTHING | {"errors", "config", "client"}
        for each in imports_of(path)
        if each.at_module_level
        and (each.module.split(".")[0] in HEAVY or each.module.startswith("pensieve.model"))
        and not (room_of(path) == "client" and each.module.startswith("grpc"))
    ]
    assert not found, "\n".join(found)


MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in SOURCES
}


def module_named(name: str) -> str | None:
    """Return the module of pensieve that a dotted name names, or that contains the name."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or None


def modules_in_strings(tree: ast.Module) -> Iterator[Import]:
    """Yield modules that are named in strings, for example to start a program. They count as imports."""
    documentation = set()
    for node in ast.walk(tree):  # outside in, so a docstring comes after its function or class
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if node.body and isinstance(node.body[0], ast.Expr):
                documentation.add(id(node.body[0].value))
            continue
        if not isinstance(node, ast.Constant) or id(node) in documentation:
            continue
        if isinstance(node.value, str):
            for name in re.findall(r"\bpensieve(?:\.\w+)+", node.value):
                if (found := module_named(name)) not in (None, "pensieve"):
                    yield Import(str(found), node.lineno, False)


def test_no_string_names_a_module_of_a_room_above() -> None:
    found = [
        f"{NAMES[path]}:{each.line}: {why}"
        for path in SOURCES
        if room_of(path)
        not in {*MAY_IMPORT_EVERYTHING, "v1"}  # v1: names of gRPC services look like modules
        for each in facts_of(path).in_strings
        if (why := import_problem(room_of(path), each.module))
    ]
    assert not found, "\n".join(found)


def cycle_in(arrows: dict[str, set[str]]) -> list[str]:
    """Return the modules of an import cycle in order, or [] if there is none."""
    done: set[str] = set()
    path: list[str] = []

    def visit(name: str) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        path.append(name)
        for target in sorted(arrows.get(name, ())):
            if found := visit(target):
                return found
        path.pop()
        done.add(name)
        return []

    for name in sorted(arrows):
        if found := visit(name):
            return found
    return []


def test_no_modules_import_each_other_in_a_cycle() -> None:
    """Deferred imports, imports for type checkers, and modules named in strings count."""
    arrows: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        every = [*imports_of(path), *facts_of(path).in_strings]
        targets = {module_named(each.module) for each in every}
        # An import of a module also names the module's package, which may re-export the module.
        arrows[name] = {each for each in targets if each and each != name and each != "pensieve"}
    for name, path in MODULES.items():
        if path.name == "__init__.py":
            inner = {each for each in arrows[name] if each.startswith(name + ".")}
            for each in inner:
                arrows[each].discard(name)
    assert not (found := cycle_in(arrows)), " -> ".join(found)


def test_no_rooms_import_each_other_in_a_cycle() -> None:
    arrows: dict[str, set[str]] = {}
    for path in SOURCES:
        home = room_of(path)
        if home in ("__init__", "__main__"):
            continue
        for each in [*imports_of(path), *facts_of(path).in_strings]:
            parts = each.module.split(".")
            if parts[0] == "pensieve" and len(parts) > 1 and parts[1] not in (home, "__version__"):
                arrows.setdefault(home, set()).add(parts[1])
    assert not (found := cycle_in(arrows)), " -> ".join(found)


def test_an_import_cycle_is_found() -> None:
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert not cycle_in({"a": {"b", "c"}, "b": {"c"}})


def test_a_module_named_in_a_string_counts_as_an_import() -> None:
    tree = ast.parse('"""Of pensieve.core.turn."""\nstart("-m", "pensieve.engine.engine")')
    assert list(modules_in_strings(tree)) == [Import("pensieve.engine.engine", 2, False)]


def loaded_with(path: Path) -> set[str]:
    """Return all modules that importing this file loads."""
    names = MODULES
    loaded: set[str] = set()
    paths = [path]
    while paths:
        for each in imports_of(paths.pop()):
            parts = each.module.split(".") if each.at_module_level else []
            for length in range(1, len(parts) + 1):
                name = ".".join(parts[:length])
                if name not in loaded:
                    loaded.add(name)
                    paths += [names[name]] if name in names else []
    return loaded


@pytest.mark.parametrize("entry", ["__main__.py", "cli/main.py", "client/__init__.py"])
def test_help_is_shown_without_loading_a_model_library(entry: str) -> None:
    if (path := PACKAGE / entry) in SOURCES:
        assert not loaded_with(path) & {"torch", "transformers", "grpc"} - {
            "grpc" if entry.startswith("client") else ""
        }


def dangers(tree: ast.Module) -> Iterator[str]:
    """Yield calls and imports that are forbidden everywhere in the package."""
    for each in imports(tree):
        if each.module.split(".")[0] in IMPORTS_NEVER:
            yield f"{each.line}: imports {each.module}"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name | ast.Attribute):
            name = ast.unparse(node.func)
            if name in CALLS_NEVER:
                yield f"{node.lineno}: {name}() {CALLS_NEVER[name]}"
        for argument in node.keywords:
            value = argument.value
            off = isinstance(value, ast.Constant) and not value.value
            if argument.arg in ARGUMENTS_NEVER and not off:
                yield f"{node.lineno}: {argument.arg}={ast.unparse(value)}"


def test_no_module_executes_data() -> None:
    found = [f"{NAMES[path]}:{each}" for path in SOURCES for each in facts_of(path).dangers]
    assert not found, "\n".join(found)


def test_the_core_draws_no_random_numbers_and_reads_no_clock() -> None:
    words = {"time", "random", "perf_counter", "monotonic", "getrandom", "urandom", "uuid4"}
    for path in SOURCES:
        if room_of(path) == "core":
            used = facts_of(path).names & words
            assert not used, f"{NAMES[path]} uses {used}"


@pytest.mark.parametrize(
    ("home", "module", "why"),
    [
        ("core", "torch", "core may not import torch"),
        ("core", "time", "core never imports time"),
        ("core", "pensieve.engine.mailbox", "core may not import pensieve.engine"),
        ("core", "pensieve.core.prefix_tree", None),
        ("core", "pensieve.errors", None),
        ("engine", "torch", "engine may not import torch"),
        ("store", "pensieve.engine", "store may not import pensieve.engine"),
        ("api", "pensieve.model.loader", "api may not import pensieve.model"),
        ("kernels", "pensieve.core.prefix_tree", "kernels may not import pensieve.core"),
        ("text", "tokenizers", None),
        ("text", "transformers", "text may not import transformers"),
    ],
)
def test_import_problem_applies_the_table_of_rooms(home: str, module: str, why: str | None) -> None:
    assert import_problem(home, module) == why


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("import pickle", "1: imports pickle"),
        ("def f():\n    from pickle import loads", "2: imports pickle.loads"),
        ("eval('1')", "1: eval() runs text as code"),
        ("torch.load(path)", "1: torch.load() unpickles; safetensors are read instead"),
        ("run(x, shell=True)", "1: shell=True"),
        ("load(x, trust_remote_code=flag)", "1: trust_remote_code=flag"),
    ],
)
def test_forbidden_calls_are_recognised(source: str, problem: str) -> None:
    assert list(dangers(ast.parse(source))) == [problem]
    assert not list(dangers(ast.parse("run(x, shell=False); model.eval()")))


def test_nested_imports_are_found_and_relative_imports_refused() -> None:
    tree = ast.parse("import a.b\nif TYPE_CHECKING:\n    import c\ndef f():\n    from d import e")
    assert list(imports(tree)) == [
        Import("a.b", 1, True),
        Import("c", 3, False),
        Import("d.e", 5, False),
    ]
    with pytest.raises(AssertionError, match="relative imports hide"):
        list(imports(ast.parse("from .engine import x")))


def test_the_sources_include_every_important_room() -> None:
    assert {room_of(path) for path in SOURCES} >= {
        "core",
        "engine",
        "text",
        "store",
        "model",
        "cli",
    }
