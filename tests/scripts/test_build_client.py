"""The SDK's wheel is complete, matches its RECORD file, and has no server code."""

from __future__ import annotations

import base64
import csv
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conversations.rig_daemon import DaemonRig

ROOT = Path(__file__).resolve().parents[2]
CLIENT_PROGRAM = """
import importlib, sys

MISSING = {"torch", "transformers", "numpy", "sqlite_utils", "jinja2", "rich", "tokenizers"}

class MissingPackages:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in MISSING:
            raise ModuleNotFoundError(name)

# Remove the import finders of editable installs.
standard = {"BuiltinImporter", "FrozenImporter", "PathFinder"}
kept = [each for each in sys.meta_path if getattr(each, "__name__", "") in standard]
sys.meta_path[:] = [MissingPackages(), *kept]
sys.path.insert(0, sys.argv[1])
from pensieve import client
assert client.__file__.startswith(sys.argv[1]), client.__file__
with client.Client(sys.argv[2]) as found:
    print(found.conversation("c").ask("Hello.", max_tokens=3, ignore_eos=True).usage.output_tokens)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    built = subprocess.run(
        [ROOT / "scripts" / "build_client", folder], capture_output=True, text=True, check=True
    )
    (path,) = folder.iterdir()
    assert built.stdout.strip() == str(path)
    return path


def test_the_record_lists_the_wheels_files_with_digests_and_sizes(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (record,) = [name for name in archive.namelist() if name.endswith("/RECORD")]
        rows = list(csv.reader(archive.read(record).decode().splitlines()))
        assert sorted(path for path, _, _ in rows) == sorted(archive.namelist())
        for path, digest, size in rows:
            if path != record:
                data = archive.read(path)
                found = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
                assert (digest, int(size)) == (f"sha256={found.decode()}", len(data))
        metadata = archive.read(record.replace("RECORD", "METADATA")).decode()
    needed = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:")]
    assert [line.split()[1].split(">")[0] for line in needed] == ["grpcio", "protobuf"]


def test_without_the_server_package_the_wheel_can_use_a_daemon(wheel: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(alone)
    with DaemonRig(tmp_path / "data") as rig:
        finished = subprocess.run(
            [sys.executable, "-c", CLIENT_PROGRAM, str(alone), rig.server.address],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
        )
    assert (finished.stdout, finished.stderr) == ("3\n", "")
