"""From settings to tiers and devices, as far as it needs no engine."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pensieve.config import Settings, resolve
from pensieve.core.policies.learned import ReturnPolicy
from pensieve.errors import ConfigError, DeviceError
from pensieve.launch import device as device_module
from pensieve.launch import model_ranks
from pensieve.launch import sizing as tier_sizing
from pensieve.launch.device import chosen_device
from pensieve.launch.sizing import tier_pages
from pensieve.model import free_memory as sizing
from pensieve.model.free_memory import MARGIN_BYTES, MARGIN_SHARE, free_for_kv
from tests.service.rig import started, write_model
from tests.text.families import QWEN_2_5

GIB = 2**30
PAGE_BYTES = 4 << 20


def settings_of(**written: str) -> Settings:
    return resolve(written, {}).settings


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_sizing, "available_memory_bytes", lambda: 64 * GIB)


def test_on_a_cpu_both_tiers_share_its_memory() -> None:
    most = tier_sizing.TOKENS_MAX // 32
    assert tier_pages(settings_of(), PAGE_BYTES, None) == (4096, 4096)
    assert tier_pages(settings_of(), 1 << 10, None) == (most, most), "small models need no more"
    given = settings_of(device_cache="640t", host_cache="1GiB")
    assert tier_pages(given, PAGE_BYTES, None) == (20, 256)
    with pytest.raises(ConfigError, match="the two tiers need"):
        tier_pages(settings_of(device_cache="40GiB", host_cache="40GiB"), PAGE_BYTES, None)


def test_a_gpu_has_memory_of_its_own() -> None:
    assert tier_pages(settings_of(), PAGE_BYTES, 100 * GIB) == (25_600, 4096)
    given = settings_of(device_cache="50%", host_cache="60GiB")
    assert tier_pages(given, PAGE_BYTES, 100 * GIB) == (12_800, 15_360)
    with pytest.raises(
        ConfigError, match=r"--device-cache .*101.*100.0 GiB of the GPU's memory are left"
    ):
        tier_pages(settings_of(device_cache="101GiB"), PAGE_BYTES, 100 * GIB)
    with pytest.raises(ConfigError, match=r"--host-cache .*65.*64.0 GiB are available"):
        tier_pages(settings_of(host_cache="65GiB"), PAGE_BYTES, 100 * GIB)
    with pytest.raises(ConfigError, match="4 are needed"):
        tier_pages(settings_of(), PAGE_BYTES, 0)


def test_a_gpu_that_is_not_there_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert chosen_device(settings_of()) == torch.device("cpu")
    with pytest.raises(ConfigError, match="finds no GPU"):
        chosen_device(settings_of(device="cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert chosen_device(settings_of()) == torch.device("cuda", 0)
    assert chosen_device(settings_of(device="cuda:1")) == torch.device("cuda", 1)
    assert chosen_device(settings_of(device="cpu")) == torch.device("cpu")
    with pytest.raises(ConfigError, match="there are 2 GPUs"):
        chosen_device(settings_of(device="cuda:2"))
    with pytest.raises(ConfigError, match="the first GPUs"):
        chosen_device(settings_of(device="cuda:1", tensor_parallel="2"))


def test_what_is_left_for_kv_is_what_nothing_else_was_seen_to_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights take 20 GiB; a decode batch 1 and the largest batch 3 besides, and 2 for their own KV."""
    device = torch.device("cuda", 0)
    held = peak = 20 * GIB
    ran: list[int] = []

    def run_once(model: Any, num_tokens: int, *rest: Any) -> int:
        nonlocal peak
        ran.append(num_tokens)
        peak = held + (3 if num_tokens == 8 else 5) * GIB
        return 2 * GIB

    monkeypatch.setattr(sizing, "run_once", run_once)
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: held)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: peak)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * GIB, 80 * GIB))
    model: Any = SimpleNamespace(shape=SimpleNamespace(vocab_size=1000))
    found = free_for_kv(model, 512, 8, 32, device)
    assert ran == [8, 512]
    logits = 4 * 8 * 1000  # of the graphs
    assert found == 56 * GIB - logits - MARGIN_BYTES - int(MARGIN_SHARE * 80 * GIB)


def test_auto_falls_back_to_the_cpu_where_the_gpu_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: Any) -> None:
        raise DeviceError("the CUDA kernels need CuPy")

    loaded: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(device_module, "_check_kernels", refuse)
    monkeypatch.setattr(model_ranks, "load", lambda folder, device, **_: loaded.append(device))
    told: list[str] = []
    with ExitStack() as undo:
        model_ranks.load_model(settings_of(), tmp_path, told.append, undo)
        assert loaded == [torch.device("cpu")]
        assert any("computing on the CPU: the CUDA kernels need CuPy" in line for line in told)
        with pytest.raises(DeviceError, match="need CuPy"):
            model_ranks.load_model(settings_of(device="cuda"), tmp_path, told.append, undo)


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


def test_retention_weighs_what_was_found_on_this_machine(tmp_path: Path) -> None:
    """Chunks of 8 tokens: 8 ms to compute and, over a slow link, 16 ms to copy."""
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
