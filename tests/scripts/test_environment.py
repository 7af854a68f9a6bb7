"""What `scripts/run` prints while it installs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_an_installation_that_fails_names_the_log_with_the_output_of_pip(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    nowhere = {
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_RETRIES": "0",
        "PIP_NO_INPUT": "1",
    }
    done = subprocess.run(
        [ROOT / "scripts" / "run", "--version"],
        env={**os.environ, **nowhere, "PENSIEVE_VENV": str(venv), "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    log = venv / "install.log"
    lines = done.stderr.splitlines()
    assert done.returncode == 3, done.stderr
    assert lines[-1] == f"pensieve: The complete output is in {log}"
    assert "ERROR: " in done.stderr
    assert len(lines) < 10
    assert len(log.read_text().splitlines()) > len(lines)
