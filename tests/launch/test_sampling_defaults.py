"""The sampling values for messages that set none, as generation_config.json defines them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from pensieve.builtin import MODEL_PATH
from pensieve.errors import ModelError
from pensieve.launch.model_folder import load_texts
from pensieve.sampling import MAX_TOKENS, OURS, STOP_REPETITION, Sampling


def folder_with(tmp_path: Path, given: Mapping[str, Any] | None) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(MODEL_PATH, folder)
    (folder / "generation_config.json").unlink()
    if given is not None:
        (folder / "generation_config.json").write_text(json.dumps(given))
    return folder


@pytest.mark.parametrize(
    ("given", "defaults", "from_model"),
    [
        (None, OURS, False),
        ({"eos_token_id": 2}, OURS, False),
        ({"repetition_penalty": 1.2}, {**OURS, "repetition_penalty": 1.2}, False),
        ({"eos_token_id": 2, "do_sample": False}, {"temperature": 0.0}, True),
        ({"do_sample": True}, {"temperature": 1.0}, True),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20},
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
            True,
        ),
        # transformers warns here that 0.6 is unused, but the author of the file meant it.
        ({"temperature": 0.6}, {"temperature": 0.6}, True),
    ],
    ids=["no file", "nothing", "a penalty", "greedy", "sampled", "all", "without do_sample"],
)
def test_sampling_defaults_come_from_the_model_or_else_from_pensieve(
    given: Mapping[str, Any] | None,
    defaults: Mapping[str, float],
    from_model: bool,
    tmp_path: Path,
) -> None:
    folder = folder_with(tmp_path, given)
    if given is not None and "do_sample" in given:
        assert GenerationConfig.from_pretrained(folder).do_sample == (defaults["temperature"] > 0)
    texts = load_texts(folder, lambda line: None)
    assert texts.defaults == Sampling(
        max_tokens=MAX_TOKENS,
        stop_repetition=STOP_REPETITION,
        **defaults,  # type: ignore[arg-type]
    )
    assert texts.defaults_from_model is from_model


@pytest.mark.parametrize("given", [{"temperature": -1}, {"top_k": "many"}, ["temperature"]])
def test_the_error_for_invalid_values_names_the_file(given: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        load_texts(folder_with(tmp_path, given), lambda line: None)


def test_temperature_0_alone_is_plain_greedy_decoding() -> None:
    """A client then gets the tokens of transformers' greedy search, whatever the defaults are."""
    defaults = Sampling(temperature=0.7, repetition_penalty=1.1, frequency_penalty=0.2)
    assert defaults.with_given({"temperature": 0.0}) == Sampling()
    penalised = defaults.with_given({"temperature": 0.0, "repetition_penalty": 1.2})
    assert penalised == Sampling(repetition_penalty=1.2)
    assert defaults.with_given({"temperature": 0.1}).repetition_penalty == 1.1


def test_ignore_eos_turns_stop_repetition_off_unless_it_is_set() -> None:
    defaults = Sampling(stop_repetition=256)
    assert defaults.with_given({"ignore_eos": True}).stop_repetition == 0
    assert defaults.with_given({"ignore_eos": True, "stop_repetition": 9}).stop_repetition == 9
    assert defaults.with_given({"ignore_eos": False}).stop_repetition == 256
