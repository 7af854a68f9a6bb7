"""Which device is used, and when `auto` falls back to the CPU."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from pensieve.errors import ConfigError, DeviceError
from pensieve.launch import model_ranks
from pensieve.launch.model_ranks import chosen_device, usable_device
from tests.launch.settings import settings_of


def test_a_missing_gpu_is_refused_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert chosen_device(settings_of()) == torch.device("cpu")
    with pytest.raises(ConfigError, match="finds no GPU"):
        chosen_device(settings_of(device="cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert chosen_device(settings_of()) == torch.device("cuda", 0)
    assert chosen_device(settings_of(device="cuda:1")) == torch.device("cuda", 1)
    assert chosen_device(settings_of(device="cpu")) == torch.device("cpu")
    with pytest.raises(ConfigError, match="this machine has 2 GPUs"):
        chosen_device(settings_of(device="cuda:2"))
    with pytest.raises(ConfigError, match="the first GPUs"):
        chosen_device(settings_of(device="cuda:1", tensor_parallel="2"))


def test_auto_falls_back_to_the_cpu_if_the_gpu_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: Any) -> None:
        raise DeviceError("the CUDA kernels need CuPy")

    loaded: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(model_ranks, "_check_kernels", refuse)
    monkeypatch.setattr(model_ranks, "load", lambda folder, device, **_: loaded.append(device))
    lines: list[str] = []
    with ExitStack() as undo:
        model_ranks.load_model(settings_of(), tmp_path, lines.append, undo)
        assert loaded == [torch.device("cpu")]
        assert any("computing on the CPU: the CUDA kernels need CuPy" in line for line in lines)
        with pytest.raises(DeviceError, match="need CuPy"):
            model_ranks.load_model(settings_of(device="cuda"), tmp_path, lines.append, undo)


@pytest.mark.parametrize("name", ["weights", "kv_dtype"])
def test_int8_is_only_for_cpus(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    flag = "--" + name.replace("_", "-")
    with pytest.raises(ConfigError, match=f"{flag} int8 is only for CPUs: pass --device cpu"):
        usable_device(settings_of(**{name: "int8"}, device="cuda"), print)
    lines: list[str] = []
    assert usable_device(settings_of(**{name: "int8"}), lines.append) == torch.device("cpu")
    assert lines == [f"computing on the CPU: {flag} int8 is only for CPUs: pass --device cpu"]


def test_fp8_on_a_cpu_warns_that_it_is_slow_also_after_a_fallback_from_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise DeviceError("the CUDA kernels need CuPy")

    told: dict[bool, list[str]] = {}
    for has_gpu in (False, True):
        lines: list[str] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(model_ranks, "_check_kernels", refuse)
        assert usable_device(settings_of(kv_dtype="fp8"), lines.append) == torch.device("cpu")
        told[has_gpu] = lines
    (slow,) = told[False]
    assert "--kv-dtype fp8 is meant for GPUs" in slow
    assert told[True] == ["computing on the CPU: the CUDA kernels need CuPy", slow]


def test_an_unknown_kv_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="int4"):
        settings_of(kv_dtype="int4")
