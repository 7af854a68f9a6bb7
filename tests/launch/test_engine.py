"""The engine that a daemon starts: its eviction policy uses the costs of this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pensieve.core.policies.return_policy import ReturnPolicy
from pensieve.errors import ConfigError
from tests.conversations.rig import started, write_model
from tests.text.families import QWEN_2_5


def cost_file(folder: Path, **changed: object) -> Path:
    cost = {
        "dense_seconds_per_token": 0.001,
        "dense_seconds_min": 0.002,
        "attention_seconds_per_pair": 1e-7,
        "attention_seconds_per_key": 1e-7,
        "overhead_seconds": 0.0001,
        "layers": 2,
        "kv_bytes_per_token": 128,
        "link_bytes_per_second": 64_000,
        **changed,
    }
    path = folder / "cost.json"
    path.write_text(json.dumps({"version": 1, "source": "a journal", "cost": cost}))
    return path


def test_the_eviction_policy_uses_the_costs_of_this_machine(tmp_path: Path) -> None:
    """Chunks have 8 tokens. They take 8 ms to compute and, over a slow link, 16 ms to copy."""
    model = write_model(tmp_path / "model", QWEN_2_5)
    path = cost_file(tmp_path)
    with started(model, tmp_path / "data", policy="return", cost=str(path)) as runtime:
        policy = runtime.engine.scheduler.cache.policy
        assert isinstance(policy, ReturnPolicy)
        assert policy._cost.measured
        assert policy._cost.chunk_seconds(1000) == pytest.approx(0.008 + 8 * 1e-7 * 1000)
        assert policy._cost.copy_seconds == pytest.approx(0.016)
        assert not policy.worth_swapping_in(0)


def test_costs_of_another_model_are_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", QWEN_2_5)
    path = cost_file(tmp_path, layers=7)
    with pytest.raises(ConfigError, match="7 layers, and this one has 2"):
        started(model, tmp_path / "data", cost=str(path))
    path = cost_file(tmp_path, kv_bytes_per_token=1000)
    with pytest.raises(ConfigError, match="1,000 bytes of KV per token, and this one has 128"):
        started(model, tmp_path / "data", cost=str(path))
    with pytest.raises(ConfigError, match=r"cannot read .*nothing\.json: No such file"):
        started(model, tmp_path / "data", cost=str(tmp_path / "nothing.json"))


@pytest.mark.parametrize("program", ["echo_engine", "engine_process"])
def test_an_engine_starts_without_importing_packages_of_the_service(program: str) -> None:
    """Unused imports slow the start: importing SQLite takes as long as all other imports before torch."""
    code = (
        f"import sys, pensieve.launch.{program}\n"
        "print(sorted({'grpc', 'numpy', 'sqlite_utils', 'torch'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
