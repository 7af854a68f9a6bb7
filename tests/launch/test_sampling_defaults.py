"""What a message gets that says nothing of sampling, by what generation_config.json says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from pensieve.builtin import MODEL_PATH
from pensieve.launch.model_folder import MAX_TOKENS, load_texts
from pensieve.sampling import Sampling


@pytest.mark.parametrize(
    ("given", "defaults", "recommended"),
    [
        (None, {}, {}),
        ({"eos_token_id": 2}, {}, {}),
        ({"eos_token_id": 2, "do_sample": False}, {}, {"temperature": 0.0}),
        ({"do_sample": True}, {"temperature": 1.0}, {"temperature": 1.0}),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20},
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
        ),
        # transformers is greedy here too, and warns that 0.6 is not used
        ({"temperature": 0.6, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}, {}),
    ],
    ids=["no file", "nothing", "greedy", "sampled", "all", "without do_sample"],
)
def test_the_models_own_values_are_used_and_without_any_replies_are_greedy(
    given: Mapping[str, Any] | None,
    defaults: Mapping[str, float],
    recommended: Mapping[str, float],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODEL_PATH, folder)
    (folder / "generation_config.json").unlink()
    if given is not None:
        (folder / "generation_config.json").write_text(json.dumps(given))
        sampled = bool(GenerationConfig.from_pretrained(folder).do_sample)
        assert sampled == (defaults.get("temperature", 0.0) > 0)  # as transformers would do
    texts = load_texts(folder, lambda line: None)
    assert texts.defaults == Sampling(max_tokens=MAX_TOKENS, **defaults)  # type: ignore[arg-type]
    assert texts.recommended == recommended
