"""Write tiny random models as GGUF files, as llama.cpp's converter does."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tests.models import SERVED, tiny_model
from tests.text.families import QWEN_2_5, Family
from tests.text.tiny_tokenizers import byte_level_library

ARCHITECTURES = {
    "llama": "llama-gqa",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}
Change = Callable[[gguf.GGUFWriter], object]


def random_model(architecture: str, **changes: Any) -> Any:
    """Return an fp32 model that can be quantized. llama.cpp needs rows of whole blocks of 32."""
    config = SERVED[ARCHITECTURES[architecture]]()
    config.vocab_size, config.intermediate_size = 512, 64
    for name, value in changes.items():
        setattr(config, name, value)
    return tiny_model(config, seed=5)


def write_gguf(
    path: Path,
    architecture: str = "llama",
    model: Any = None,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    rule: str | None = "gpt-2",
    family: Family | None = QWEN_2_5,
    change: Change = lambda writer: None,
    leave_out: str = "",
    has_template: bool = True,
) -> Any:
    """Write a file and return its model. `change` adds further keys and tensors."""
    model = model or random_model(architecture)
    writer = gguf.GGUFWriter(path, architecture)
    _write_config(writer, model.config, architecture)
    if family is not None:
        write_byte_level(writer, byte_level_library(family.special, family.plain_added), rule)
        writer.add_eos_token_id(_id(family, family.eos))
        if has_template:
            writer.add_chat_template(family.template)
    change(writer)
    _write_tensors(writer, model, architecture, kind, leave_out)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _id(family: Family, text: str) -> int:
    found = byte_level_library(family.special, family.plain_added).token_to_id(text)
    assert found is not None
    return found


def _write_config(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    head_size = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if head_size != config.hidden_size // config.num_attention_heads:
        writer.add_key_length(head_size)
        writer.add_value_length(head_size)
    if architecture == "llama":
        writer.add_rope_dimension_count(head_size)
        writer.add_vocab_size(config.vocab_size)


def _write_tensors(
    writer: gguf.GGUFWriter,
    model: Any,
    architecture: str,
    kind: gguf.GGMLQuantizationType,
    leave_out: str,
) -> None:
    config = model.config
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    if config.rope_parameters["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(config))
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = value.numpy()
        for part, heads in (
            ("q_proj", config.num_attention_heads),
            ("k_proj", config.num_key_value_heads),
        ):
            if architecture == "llama" and name.endswith(f"{part}.weight"):
                values = permuted(values, heads)
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if theirs == leave_out:
            continue
        if values.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(theirs, np.ascontiguousarray(values, dtype=np.float32))
        else:
            writer.add_tensor(theirs, gguf.quants.quantize(values, kind), raw_dtype=kind)


def permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """Do the same as `LlamaModel.permute` of llama.cpp's converter."""
    shape = values.shape
    parts = values.reshape(heads, 2, shape[0] // heads // 2, *shape[1:])
    return parts.swapaxes(1, 2).reshape(shape)


def llama3_factors(config: Any) -> np.ndarray:
    """Return llama.cpp's factors for Llama 3's rotary frequencies."""
    rope, size = config.rope_parameters, config.head_dim
    frequencies = 1.0 / (rope["rope_theta"] ** (torch.arange(0, size, 2).float() / size))
    length = rope["original_max_position_embeddings"]
    factors = []
    for frequency in frequencies:
        wavelength = 2 * math.pi / frequency
        if wavelength < length / rope["high_freq_factor"]:
            factors.append(1.0)
        elif wavelength > length / rope["low_freq_factor"]:
            factors.append(rope["factor"])
        else:
            smooth = (length / wavelength - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


def write_byte_level(writer: gguf.GGUFWriter, library: Any, rule: str | None) -> None:
    """Write a tokenizer of the tokenizers library as the arrays of a GGUF file."""
    definition = json.loads(library.to_str())
    added = {each["id"]: each for each in definition["added_tokens"]}
    vocabulary = library.get_vocab(with_added_tokens=True)
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    assert [vocabulary[token] for token in tokens] == list(range(len(tokens)))
    writer.add_tokenizer_model("gpt2")
    if rule is not None:
        writer.add_tokenizer_pre(rule)
    writer.add_token_list(tokens)
    writer.add_token_types(
        [(3 if added[i]["special"] else 4) if i in added else 1 for i in range(len(tokens))]
    )
    writer.add_token_merges([" ".join(each) for each in definition["model"]["merges"]])
