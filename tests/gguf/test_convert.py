"""A GGUF file is converted back to the folder that it was made from, or is refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind

from pensieve.errors import ModelError, UnsupportedModel
from pensieve.gguf import weights as weights_module
from pensieve.gguf.convert import Conversion
from tests.gguf.tiny import ARCHITECTURES, permuted, random_model, write_gguf

LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def converted(path: Path) -> Path:
    folder = path.with_suffix("")
    folder.mkdir()
    Conversion(path).write(folder, lambda line: None, lambda: None)
    return folder


def load(folder: Path, dtype: Any = "auto") -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def logits_of(model: Any) -> torch.Tensor:
    ids = torch.arange(3, 63).reshape(2, 30)
    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_converting_an_unquantised_file_restores_the_original_model(
    architecture: str, is_tied: bool, tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    model = random_model(architecture, tie_word_embeddings=is_tied)
    write_gguf(path, architecture, model)
    again = load(converted(path))
    assert again.dtype == torch.float32
    assert again.state_dict().keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    assert torch.equal(logits_of(again), logits_of(model))


def test_llama_3_rotary_frequencies_are_restored_from_their_factors(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    model = random_model(
        "llama", rope_parameters=LLAMA_3, head_dim=64, max_position_embeddings=131_072
    )
    write_gguf(path, "llama", model)
    again = load(converted(path))
    assert again.config.rope_parameters == LLAMA_3
    assert torch.equal(again.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    assert torch.equal(logits_of(again), logits_of(model))


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_1, Kind.F16, Kind.BF16])
def test_a_converted_quantised_file_has_the_weights_that_transformers_reads_from_the_gguf_file(
    kind: gguf.GGMLQuantizationType, tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", random_model("llama", tie_word_embeddings=True), kind=kind)
    again = load(converted(path))
    assert again.dtype == (torch.float16 if kind == Kind.F16 else torch.bfloat16)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="tiny.gguf", dtype=again.dtype
    )
    for name, value in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    assert torch.equal(logits_of(again), logits_of(theirs.eval()))


def test_converting_in_small_blocks_gives_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks have three rows of 32, so the end of a block is never the end of a head."""
    model = random_model("llama")
    for name, elements in (("whole", 1 << 22), ("blocks", 100)):
        monkeypatch.setattr(weights_module, "BLOCK_ELEMENTS", elements)
        write_gguf(tmp_path / f"{name}.gguf", "llama", model, kind=Kind.Q8_0)
        converted(tmp_path / f"{name}.gguf")
    whole, blocks = ((tmp_path / each / "model.safetensors") for each in ("whole", "blocks"))
    assert whole.read_bytes() == blocks.read_bytes()


def test_bfloat16_is_rounded_as_torch_rounds_it() -> None:
    generator = np.random.default_rng(3)
    values = generator.integers(0, 1 << 32, 100_000, dtype=np.uint32).view(np.float32)
    values[:5] = [np.nan, np.inf, -np.inf, 0.0, -0.0]
    values[5:7] = np.array([0x3F808000, 0x3F818000], dtype=np.uint32).view(np.float32)  # ties
    with np.errstate(all="ignore"):
        ours = np.frombuffer(weights_module._as_kind(values, "BF16"), dtype=np.int16)
    theirs = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy()
    numbers = ~np.isnan(values)
    assert np.array_equal(ours[numbers], theirs[numbers])
    assert np.isnan(
        torch.from_numpy(ours.copy()).view(torch.bfloat16).float().numpy()[~numbers]
    ).all()


def test_the_announced_size_is_the_size_on_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, kind=Kind.Q8_0)
    conversion = Conversion(path)
    assert conversion.sizes().startswith("tiny.gguf: llama, Q8_0, ")
    assert "as bfloat16" in conversion.sizes()
    assert "--weights int8" in conversion.sizes()
    size = (converted(path) / "model.safetensors").stat().st_size
    assert conversion.num_bytes <= size <= conversion.num_bytes + 8192  # 8192: names of tensors


def test_end_of_turn_tokens_and_sampling_settings_of_a_file_are_kept(
    tmp_path: Path,
) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_eot_token_id(7)
        writer.add_sampling_temp(0.5)
        writer.add_sampling_top_k(20)

    write_gguf(tmp_path / "tiny.gguf", change=change)
    given = json.loads((converted(tmp_path / "tiny.gguf") / "generation_config.json").read_text())
    assert given["eos_token_id"][1] == 7
    assert given["do_sample"] is True
    assert (given["temperature"], given["top_k"]) == (0.5, 20)
    write_gguf(tmp_path / "plain.gguf")
    given = json.loads((converted(tmp_path / "plain.gguf") / "generation_config.json").read_text())
    assert set(given) == {"eos_token_id"}


def test_a_conversion_stops_if_its_check_raises(tmp_path: Path) -> None:
    def check() -> None:
        raise KeyboardInterrupt

    write_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(KeyboardInterrupt):
        Conversion(tmp_path / "tiny.gguf").write(tmp_path, lambda line: None, check)


def unknown_key(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)


def other_factors(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("rope_freqs.weight", np.array([1, 2, 3, 4], dtype=np.float32))


def unknown_tensor(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("blk.0.attn_sinks.weight", np.zeros(4, dtype=np.float32))


def a_window(writer: gguf.GGUFWriter) -> None:
    writer.add_sliding_window(128)


def part_of_a_head(writer: gguf.GGUFWriter) -> None:
    writer.add_value_length(4)


def one_of_three(writer: gguf.GGUFWriter) -> None:
    writer.add_uint16("split.count", 3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (unknown_key, r"no known equivalent of llama.rope.scaling.type = 'yarn'"),
        (other_factors, "not scaled as Llama 3's"),
        (unknown_tensor, "no tensor like blk.0.attn_sinks.weight"),
        (a_window, "llama.attention.sliding_window = 128"),
        (part_of_a_head, "llama.attention.value_length is 4"),
        (one_of_three, "one of 3 parts. Join them with llama-gguf-split --merge"),
    ],
)
def test_a_file_that_cannot_be_served_exactly_is_refused_with_the_reason(
    change: Any, reason: str, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "tiny.gguf", change=change)
    with pytest.raises(UnsupportedModel, match=reason) as refused:
        Conversion(tmp_path / "tiny.gguf")
    assert "\n" not in str(refused.value)


def test_an_unknown_architecture_is_refused_and_the_error_lists_the_known_ones(
    tmp_path: Path,
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), dtype=np.float32))
    for write in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file"):
        getattr(writer, write)()
    writer.close()
    with pytest.raises(UnsupportedModel, match=r"architecture mamba. .* llama, qwen2, qwen3"):
        Conversion(tmp_path / "tiny.gguf")


def test_a_file_with_a_missing_tensor_or_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, leave_out="blk.1.ffn_up")
    write_gguf(path, leave_out="blk.1.ffn_up.weight")
    with pytest.raises(ModelError, match=r"lacks the tensor blk.1.ffn_up.weight"):
        Conversion(path)
    write_gguf(path)
    whole = path.read_bytes()
    for length in (3, 30, 2000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match="not a complete GGUF file"):
            Conversion(path)


def test_the_test_writer_permutes_the_rows_of_a_head_like_llama_cpp() -> None:
    """The model has two heads of four rows. llama.cpp writes the rows of a head as 0 2 1 3."""
    assert permuted(np.arange(8), 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
