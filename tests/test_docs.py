"""The README and the help texts tell the truth about what there is."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pensieve.cli.main import parser
from tests.service.rig_daemon import DaemonRig

ROOT = Path(__file__).parent.parent
BIN = Path(sys.prefix) / "bin"
ENVIRONMENT = {**os.environ, "PENSIEVE_VENV": sys.prefix, "PATH": f"{BIN}:{os.environ['PATH']}"}
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


def test_the_file_tree_and_its_captions_are_those_of_the_files():
    script = ROOT / "scripts" / "file_tree"
    told = subprocess.run([script, "--check"], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr


def test_the_example_of_the_readme_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    example = README[README.index("```python") + len("```python") :].split("```")[0]
    with DaemonRig(tmp_path / "data") as rig:
        exec(example.replace("127.0.0.1:50051", rig.server.address), {})
        assert rig.messages("trip-42")[0].content == "My name is Ada and I live in Oslo."
    assert "tokens were still there" in capsys.readouterr().out


def test_every_method_of_the_service_is_documented_in_its_proto():
    for proto in (ROOT / "proto" / "pensieve" / "v1").glob("*.proto"):
        lines = proto.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines):
            if line.strip().startswith("rpc "):
                assert lines[number - 1].strip().startswith("//"), f"{proto.name}: {line.strip()}"


def test_the_stubs_are_what_the_protos_say():
    script = ROOT / "scripts" / "generate_protos"
    told = subprocess.run(
        [script, "--check"], capture_output=True, text=True, check=False, env=ENVIRONMENT
    )
    assert told.returncode == 0, told.stderr


def test_the_protos_pass_the_linter():
    told = subprocess.run(
        ["buf", "lint"],
        cwd=ROOT / "proto",
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
    )
    assert told.returncode == 0, told.stdout + told.stderr


def test_no_method_of_a_service_is_left_to_its_generated_base():
    """The base answers UNIMPLEMENTED, which no caller should ever meet."""
    from pensieve.service.grpc.admin import AdminService
    from pensieve.service.grpc.conversation import ConversationService
    from pensieve.v1 import admin_pb2, conversation_pb2

    for file, ours in ((conversation_pb2, ConversationService), (admin_pb2, AdminService)):
        (service,) = file.DESCRIPTOR.services_by_name.values()
        missing = [method.name for method in service.methods if method.name not in vars(ours)]
        assert service.methods
        assert not missing, f"{service.full_name}: {missing}"
