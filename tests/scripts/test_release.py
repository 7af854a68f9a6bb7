"""What `scripts/release` builds and refuses, and the files of docs/deploy."""

from __future__ import annotations

import csv
import json
import re
import shlex
import subprocess
import zipfile
from pathlib import Path

import pytest
import yaml

from pensieve.cli.main import parser
from scripts import release

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "docs" / "deploy"


def test_a_wheel_with_kernels_is_for_its_machine(tmp_path: Path) -> None:
    pure = tmp_path / "pensieve_serve-1.2-py3-none-any.whl"
    info = "pensieve_serve-1.2.dist-info"
    with zipfile.ZipFile(pure, "w") as archive:
        archive.writestr("pensieve/__init__.py", "")
        archive.writestr(f"{info}/METADATA", "Name: pensieve-serve\n")
        archive.writestr(f"{info}/WHEEL", "Root-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    made = release.with_kernels(pure, b"machine code", "aarch64", tmp_path)
    assert made.name == "pensieve_serve-1.2-py3-none-manylinux_2_28_aarch64.whl"
    with zipfile.ZipFile(made) as archive:
        assert archive.read("pensieve/kernels/libpensieve_cpu.so") == b"machine code"
        about = archive.read(f"{info}/WHEEL").decode()
        recorded = {row[0] for row in csv.reader(archive.read(f"{info}/RECORD").decode().split())}
        assert recorded == set(archive.namelist())
        assert len(archive.namelist()) == len(recorded)
    assert "Root-Is-Purelib: false\nTag: py3-none-manylinux_2_28_aarch64\n" in about


def test_a_checkout_that_is_not_ready_is_refused(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text("# Changelog\n\n## Unreleased\n")
    git("init")
    git("add", ".")
    git("commit", "-m", "begin")
    with pytest.raises(release.ReleaseError, match=r"no section '## 1\.2'"):
        release.check_ready(tmp_path, "1.2")
    changelog.write_text("# Changelog\n\n## 1.2\n")
    with pytest.raises(release.ReleaseError, match=r"CHANGELOG\.md"):
        release.check_ready(tmp_path, "1.2")
    git("commit", "--all", "-m", "describe 1.2")
    release.check_ready(tmp_path, "1.2")


def served(arguments: list[str]) -> None:
    """Check that the daemon accepts these arguments."""
    options = parser().parse_args(["serve", *arguments])
    assert options.command == "serve"


def test_the_daemon_takes_the_arguments_of_each_deployment() -> None:
    unit = (DEPLOY / "pensieve.service").read_text()
    (started,) = re.findall(r"^ExecStart=\S+/pensieve serve (.*)$", unit, re.MULTILINE)
    served(shlex.split(started))
    container = (DEPLOY / "Containerfile").read_text().replace("\\\n", "")
    (given,) = re.findall(r"^CMD (\[.*\])$", container, re.MULTILINE)
    served(json.loads(given))
    _, stateful = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    (daemon,) = stateful["spec"]["template"]["spec"]["containers"]
    served(daemon["args"])
    drain = next(each for each in daemon["args"] if each.startswith("--drain-timeout="))
    grace = stateful["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > int(drain.split("=")[1]), "Kubernetes would kill a daemon that drains"
    mounted = {each["mountPath"] for each in daemon["volumeMounts"]}
    for path in re.findall(r"=(/etc/\S+)", " ".join(daemon["args"])):
        assert str(Path(path).parent) in mounted, path
