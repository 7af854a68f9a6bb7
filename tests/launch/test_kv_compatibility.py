"""An engine reports what its KV was computed with. Engines whose reports differ do not exchange KV."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch

from pensieve.launch.kv_compatibility import PAGE_BYTES_MAX, kv_compatibility, weights_digest
from pensieve.model.shape import ModelShape
from tests.conversations.rig import write_model
from tests.launch.settings import settings_of
from tests.text.families import QWEN_2_5

SHAPE = ModelShape(2, 4, 2, 16, 512, 256, torch.float32, 1000, 4000)


def test_engines_of_the_same_model_are_compatible_wherever_its_folder_is(tmp_path: Path) -> None:
    one = write_model(tmp_path / "one", QWEN_2_5)
    other = shutil.copytree(one, tmp_path / "other")
    facts = [
        kv_compatibility(settings_of(), each, SHAPE, "cpu", 4096).facts for each in (one, other)
    ]
    assert facts[0] == facts[1]
    assert facts[0]["kv_heads"] == "2"
    assert facts[0]["kv_scales"] == "none"


def test_other_weights_configurations_or_formats_are_incompatible(tmp_path: Path) -> None:
    one = write_model(tmp_path / "one", QWEN_2_5)
    trained = write_model(tmp_path / "trained", QWEN_2_5, seed=1)
    assert weights_digest(one) != weights_digest(trained)
    configured = Path(shutil.copytree(one, tmp_path / "configured"))
    config = json.loads((configured / "config.json").read_text())
    (configured / "config.json").write_text(json.dumps({**config, "rope_theta": 3.0}))
    assert weights_digest(one) != weights_digest(configured)

    def facts(shape: ModelShape = SHAPE, device: str = "cpu", **written: str) -> dict[str, str]:
        return dict(kv_compatibility(settings_of(**written), one, shape, device, 4096).facts)

    here = facts()
    for differs, there in (
        ("device", facts(device="cuda")),
        ("chunk_tokens", facts(chunk_tokens="16")),
        ("weights_format", facts(weights="int8")),
        ("kv_format", facts(replace(SHAPE, kv_dtype="int8"))),
        ("kv_scales", facts(replace(SHAPE, kv_exponents=(((1,), (2,)),)))),
        ("head_size", facts(replace(SHAPE, head_size=32))),
        ("dtype", facts(replace(SHAPE, dtype=torch.bfloat16))),
    ):
        assert here[differs] != there[differs]


def test_a_change_of_one_byte_changes_the_weights_digest(tmp_path: Path) -> None:
    one = write_model(tmp_path / "one", QWEN_2_5)
    before, (file,) = weights_digest(one), one.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    assert weights_digest(one) != before


def test_engines_with_several_ranks_or_huge_pages_hand_over_no_kv(tmp_path: Path) -> None:
    for written in ({"tensor_parallel": "2"}, {"pipeline_stages": "2"}):
        refused = kv_compatibility(settings_of(**written), tmp_path, SHAPE, "cpu", 4096)
        assert (refused.facts, refused.refusal) == (
            {},
            "its pages are divided among several ranks",
        )
    refused = kv_compatibility(settings_of(), tmp_path, SHAPE, "cpu", PAGE_BYTES_MAX + 1)
    assert refused.refusal == "a page of 33,554,433 bytes is too large"
