"""Missing packages are named in one line, or installed on request."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from pensieve import extras
from pensieve.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
WITHOUT = """
import sys

class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {missing}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Nothing())
from pensieve.cli.main import main
sys.exit(main())
"""


def without(missing: Sequence[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command while these modules are not installed."""
    program = WITHOUT.format(missing=set(missing))
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_the_packages_of_an_extra_match_the_distribution() -> None:
    assert [each.split(">")[0] for each in extras.requirements("bench")] == ["matplotlib"]
    assert extras.requirements("nothing of this name") == []


def test_the_error_names_a_missing_package_of_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(extras.ADD, raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"^--plot needs matplotlib: pip install 'matplotlib>=3"):
        extras.need("bench", "matplotlib", "--plot")


def test_a_broken_package_is_not_reported_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_package.py").write_text("import a_module_that_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_nobody_has"):
        extras.need("bench", "broken_package", "--plot")


def test_a_missing_package_is_installed_if_pensieve_add_extra_names_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "add"
    program.write_text(f"#!/bin/sh\necho \"found = '$1'\" > {tmp_path}/added_when_needed.py\n")
    program.chmod(0o755)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(extras.ADD, str(program))
    assert extras.need("bench", "added_when_needed", "--plot").found == "bench"
    assert "--plot needs 'matplotlib" in capsys.readouterr().err
    program.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(ConfigError, match="could not be installed"):
        extras.need("bench", "not_added_at_all", "--plot")


@pytest.mark.parametrize(
    ("module", "package"), [("torch", "torch"), ("sqlite_utils", "sqlite-utils")]
)
def test_doctor_runs_without_the_packages_that_it_checks(module: str, package: str) -> None:
    finished = without([module], "doctor")
    assert finished.stderr == ""
    assert f"unknown: {module} is missing" in finished.stdout


def test_a_command_names_the_missing_package_that_it_needs() -> None:
    finished = without(["sqlite_utils"], "chat", "-q", "Hello.")
    assert finished.returncode == 3
    assert finished.stderr == (
        "pensieve: chat needs the package sqlite-utils, which is not installed. "
        "`pip install sqlite-utils` installs it; `pensieve doctor` lists all that is missing\n"
    )


def test_the_script_add_extra_prints_its_usage_without_an_extra(tmp_path: Path) -> None:
    finished = subprocess.run(
        [ROOT / "scripts" / "add_extra"], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 2
    assert "scripts/add_extra bench" in finished.stderr
