"""--context-max: a sliding-window model is served only up to its window, and exactly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pensieve.engine.messages import CheckIntegrity
from pensieve.errors import ContextFull, UnsupportedModel
from pensieve.sampling import Sampling
from tests.conversations.rig import Crowd, Reference, ask, query, started, write_model
from tests.text.families import QWEN_2_5

WINDOW = 128


@pytest.fixture
def windowed(tmp_path: Path) -> Path:
    folder = write_model(tmp_path / "model", QWEN_2_5, "mistral")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"sliding_window": WINDOW}))
    return folder


def test_a_windowed_model_is_exact_below_its_window(windowed: Path, tmp_path: Path) -> None:
    """Compare with plain transformers, which use the model's own window."""
    with pytest.raises(UnsupportedModel, match=f"Serve it with --context-max {WINDOW}"):
        started(windowed, tmp_path / "refused")
    with started(windowed, tmp_path / "data", context_max=str(WINDOW)) as runtime:
        assert runtime.engine.config.context_max == WINDOW
        crowd = Crowd(runtime, seed=7, size=12)
        crowd.run(80)
        crowd.settle()
        assert query(runtime, CheckIntegrity(2)).problems == ()
        reference = Reference(windowed)
        counts = [reference.wrong_tokens(runtime, name) for name in crowd.names]
        assert sum(sampled for sampled, _, _ in counts) > 100
        assert sum(wrong for _, wrong, _ in counts) == 0


def test_a_reply_ends_at_the_lowered_context_limit(windowed: Path, tmp_path: Path) -> None:
    with started(windowed, tmp_path / "data", context_max=str(WINDOW)) as runtime:
        runtime.conversations.create("c")
        everything = Sampling(max_tokens=10_000, ignore_eos=True)
        ask(runtime, "c", "Oslo", sampling=everything)
        assert len(runtime.store.log("c")) == WINDOW
        with pytest.raises(ContextFull, match=f"the limit is {WINDOW}"):
            ask(runtime, "c", "and today")
        assert Reference(windowed).wrong_tokens(runtime, "c")[1] == 0
