"""KV gets the memory that is left after everything else was measured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pensieve.model import free_memory as sizing
from pensieve.model.free_memory import MARGIN_BYTES, MARGIN_SHARE, free_for_kv

GIB = 2**30


def test_kv_gets_the_memory_that_measured_runs_did_not_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights take 20 GiB. Without KV, a decode batch needs 1 GiB more, and the largest batch 3 GiB."""
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
    margin = MARGIN_BYTES + int(MARGIN_SHARE * 80 * GIB)
    assert found == 60 * GIB - 3 * GIB - margin
    found = free_for_kv(model, 512, 8, 32, device, with_graphs=True)
    assert ran == 2 * [8, 512]
    logits = 4 * 8 * 1000  # logits of the decode batches
    graphs = (1 + 3) * GIB  # graphs of the decode batches, and of the largest batch
    assert found == 60 * GIB - 3 * GIB - graphs - logits - margin
