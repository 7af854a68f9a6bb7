"""README, docs and help texts are correct: examples, paths, links, stubs. Commands: tests/doc_commands."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from pensieve.cli.main import parser
from pensieve.sampling import Sampling, parameter_of
from tests.test_layering import MAY_IMPORT_EVERYTHING
from tests.test_layering import ROOMS as ALLOWED_IMPORTS

ROOT = Path(__file__).parent.parent
BIN = Path(sys.prefix) / "bin"
ENVIRONMENT = {**os.environ, "PENSIEVE_VENV": sys.prefix, "PATH": f"{BIN}:{os.environ['PATH']}"}
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob(".github/**/*.md"))
}
README, COMMANDS = PAGES["README.md"], PAGES["docs/commands.md"]
EXAMPLES = [
    (page, line.strip())
    for page, text in PAGES.items()
    for line in re.findall(r"^    ((?:pensieve|scripts/run) .*)$", text, re.MULTILINE)
]
PACKAGES = sorted(path.parent.name for path in (ROOT / "pensieve").glob("*/__init__.py"))
TOPS = {*PACKAGES, "pensieve", "tests", "scripts", "docs", "proto", "csrc"}


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from commands(command)


def test_every_option_of_every_command_has_a_help_text() -> None:
    for command in commands(parser()):
        assert "usage: pensieve" in command.format_help()
        bare = [action.dest for action in command._actions if not action.help]
        allowed = {"temperature", "top_p", "top_k", "seed", "policy", "command", "kind"}
        assert set(bare) <= allowed, f"{command.prog}: {bare}"


def test_every_command_has_a_heading_and_an_example() -> None:
    examples = [line for page, line in EXAMPLES if page == "docs/commands.md"]
    for command in commands(parser()):
        if any(isinstance(action, argparse._SubParsersAction) for action in command._actions):
            continue  # a group of commands: only its commands can be called
        assert f"**`{command.prog}`**" in COMMANDS, f"docs/commands.md lacks {command.prog}"
        assert any(
            line == command.prog or line.startswith(f"{command.prog} ") for line in examples
        ), f"docs/commands.md has no example of {command.prog}"


def paths_in(text: str) -> Iterator[str]:
    """Yield strings that look like paths of this repository: in backticks, or as targets of links."""
    yield from re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    for quoted in re.findall(r"`([^`\n]+)`", text):
        if re.fullmatch(r"[\w./-]+", quoted) and not quoted.startswith(("/", "-", ".")):
            known = quoted.split("/")[0] in TOPS
            suffix = re.search(r"\.(py|md|proto|cu|cpp|h)$", quoted)
            if (("/" in quoted and known) or suffix) and "NAME" not in quoted:
                yield quoted
    yield from re.findall(r"(?<![`\w/.])((?:\w+/)*test_\w+\.py)", text)


@pytest.mark.parametrize("page", sorted(PAGES))
def test_every_path_that_a_page_names_exists(page: str) -> None:
    homes = [
        (ROOT / page).parent,
        ROOT,
        ROOT / "pensieve",
        ROOT / "tests",
        ROOT / "tests" / "faults",
    ]
    missing = [
        path for path in paths_in(PAGES[page]) if not any((home / path).exists() for home in homes)
    ]
    assert not missing, f"{page} names {', '.join(missing)}"


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub generates them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.M)
    return {re.sub(r"[^\w\- ]", "", each).lower().replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", sorted(PAGES))
def test_every_section_that_a_page_links_to_exists(page: str) -> None:
    home = (ROOT / page).parent
    missing = []
    for path, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", PAGES[page]):
        target = (home / path) if path else ROOT / page
        if anchor not in anchors(target.read_text(encoding="utf-8")):
            missing.append(f"{path}#{anchor}")
    assert not missing, f"{page} links to {', '.join(missing)}"


def test_every_page_and_section_that_other_files_name_exists() -> None:
    """For example `docs/backup.md, "A full disk"` in an alert."""
    named = 0
    for folder in ("pensieve", "scripts", "proto", "docs"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".yaml", ".proto", "") and path.is_file():
                text = path.read_text(encoding="utf-8")
                for page, section in re.findall(r'\b(docs/\w+\.md)(?:, "([^"]+)")?', text):
                    assert page in PAGES, f"{path} names {page}"
                    assert not section or f"# {section}\n" in PAGES[page], f"{path}: {section}"
                    named += 1
    assert named > 10


def test_anchors_are_generated_as_on_github() -> None:
    assert anchors("# OpenAI's and `x`\n```\n# no\n```\n### A drill") == {
        "openais-and-x",
        "a-drill",
    }


def test_every_row_of_faults_names_tests_that_exist() -> None:
    tables = PAGES["docs/reliability.md"].split("| fault | what happens | tests |\n")[1:]
    lines = [line for table in tables for line in table.partition("\n\n")[0].splitlines()[1:]]
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) > 50
    for row in rows:
        cell = row.strip("|").rpartition(" | ")[2]
        named = re.findall(r"([\w/]+\.py) \(([^)]+)\)", cell)
        assert named, f"no test shows what happens: {row}"
        assert len(named) == cell.count(".py"), (
            f"name the tests of each file in parentheses: {cell}"
        )
        for file, names in named:
            source = (ROOT / "tests" / file).read_text(encoding="utf-8")
            for name in re.findall(r"`(\w+)`", names):
                assert re.search(rf"^(async )?def {name}\(", source, re.MULTILINE), (
                    f"{file}: {name}"
                )


def test_every_test_that_a_script_names_exists() -> None:
    for script in (ROOT / "scripts").iterdir():
        if script.is_file():
            for path in re.findall(r"\btests/[\w/]+\.py\b", script.read_text(encoding="utf-8")):
                assert (ROOT / path).is_file(), f"{script.name} names {path}"


def test_paths_are_found_in_prose() -> None:
    text = (
        "`core/cache.py`, `pensieve/x/`, `--config`, `a/b`, [a](../b.md#c), store/test_a.py, `x.py`"
    )
    found = ["../b.md", "core/cache.py", "pensieve/x/", "x.py", "store/test_a.py"]
    assert list(paths_in(text)) == found


def test_the_readme_is_short_and_names_no_host_and_no_home() -> None:
    assert len(README.splitlines()) <= 150
    assert not re.search(r"/(?:home|root|tmp|work|opt)/|index-url|pypi|https?://", README)


def test_the_documented_table_of_layers_matches_test_layering() -> None:
    page = PAGES["docs/structure.md"]
    section = page[page.index("## The law of layers") : page.index("## How a turn flows")]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    described = {
        name: cells for cells in rows for name in re.findall(r"`([a-z0-9_]+)/?`", cells[0])
    }
    assert set(described) == {*PACKAGES, "errors", "sampling", "extras", "config", "gc_pause"}
    for package, cells in described.items():
        may = cells[2].strip()
        if may and not may.startswith("everything") and package not in MAY_IMPORT_EVERYTHING:
            named = {name for name in re.findall(r"`([a-z0-9_]+)`", may) if name != "errors"}
            assert named == ALLOWED_IMPORTS[package].rooms, f"docs/structure.md on {package}"


def test_the_documented_table_of_sampling_parameters_is_complete() -> None:
    rows = [
        f"| `{each.name}` | {parameter_of(each).help} | {parameter_of(each).bounds} |"
        for each in fields(Sampling)
    ]
    page = PAGES["docs/http.md"].splitlines()
    first = page.index(rows[0])
    assert page[first : first + len(rows) + 1] == [*rows, ""]


def test_every_method_of_the_service_is_documented_in_its_proto() -> None:
    for proto in (ROOT / "proto" / "pensieve" / "v1").glob("*.proto"):
        lines = proto.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines):
            if line.strip().startswith("rpc "):
                assert lines[number - 1].strip().startswith("//"), f"{proto.name}: {line.strip()}"


def test_the_generated_stubs_match_the_protos() -> None:
    script = ROOT / "scripts" / "generate_protos"
    finished = subprocess.run(
        [script, "--check"], capture_output=True, text=True, check=False, env=ENVIRONMENT
    )
    assert finished.returncode == 0, finished.stderr


def test_the_protos_pass_the_linter() -> None:
    finished = subprocess.run(
        ["buf", "lint"],
        cwd=ROOT / "proto",
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_servicers_implement_every_method_of_their_service() -> None:
    """The base answers UNIMPLEMENTED, which callers should never get."""
    from pensieve.api.grpc.admin import AdminService
    from pensieve.api.grpc.conversation import ConversationService
    from pensieve.v1 import admin_pb2, conversation_pb2

    for file, ours in ((conversation_pb2, ConversationService), (admin_pb2, AdminService)):
        (service,) = file.DESCRIPTOR.services_by_name.values()
        missing = [method.name for method in service.methods if method.name not in vars(ours)]
        assert service.methods
        assert not missing, f"{service.full_name}: {missing}"
