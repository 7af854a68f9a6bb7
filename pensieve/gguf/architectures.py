"""Map the architectures, keys and tensors of llama.cpp to those of transformers.

llama.cpp's converter does not change a model's weights, with two exceptions:

* For `llama`, it reorders the rows of the query and key projections. llama.cpp applies the rotary embedding
  to adjacent elements, transformers to elements i and i + half. weights.py restores the order.
* It replaces the four parameters of Llama 3's rotary scaling by one factor per frequency (`rope_freqs`).
  Three of these parameters are the same in every Llama 3, and the fourth is the largest factor. If the four
  parameters do not give the factors in the file, the file is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from pensieve.errors import ModelError, UnsupportedModel
from pensieve.gguf.header import Header, Tensor, brief

ROPE_FACTORS = "rope_freqs.weight"
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_LENGTH = 1.0, 4.0, 8192
FACTOR_TOLERANCE = 1e-4  # factors are float32, computed from float32 frequencies
OUTSIDE_LAYERS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
IN_LAYERS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
BIASES = {f"attn_{each}.bias": f"self_attn.{each}_proj.bias" for each in "qkv"}
HEAD_NORMS = {f"attn_{each}_norm.weight": f"self_attn.{each}_norm.weight" for each in "qk"}
KEYS = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
}
# Keys that have no effect on the model if they have this value.
NO_EFFECT: dict[str, Any] = {
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.causal": True,
    "attention.sliding_window": 0,
    "rope.scaling.type": "none",
    "rope.scaling.finetuned": None,  # any value
}


class Architecture(NamedTuple):
    model_type: str
    class_name: str
    more_in_layers: dict[str, str]
    is_reordered: bool = False  # whether the rows of the query and key projections are reordered


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", {}, is_reordered=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", BIASES),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", HEAD_NORMS),
}


class Weight(NamedTuple):
    """A tensor of the file, with its name in transformers."""

    name: str
    tensor: Tensor
    num_heads: int = 0  # number of heads whose rows must be reordered; 0: no reordering


def architecture_of(header: Header) -> Architecture:
    found = ARCHITECTURES.get(header.architecture)
    if found is None:
        raise UnsupportedModel(
            f"{header.path.name} has the architecture {header.architecture}. GGUF files are supported "
            f"only for {', '.join(ARCHITECTURES)}. For other models, pass a folder with safetensors"
        )
    return found


def config_of(header: Header) -> dict[str, Any]:
    """Return the model's config.json for transformers, without the dtype of the weights."""
    architecture, prefix = architecture_of(header), header.architecture
    _refuse_unknown_keys(header)

    def integer(name: str, default: int | None = None) -> int:
        return int(header.number(f"{prefix}.{name}", default))

    heads, hidden = integer("attention.head_count"), integer("embedding_length")
    head_size = integer("attention.key_length", hidden // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if (size := integer(name, head_size)) != head_size:
            raise UnsupportedModel(
                f"{header.path.name} cannot be served exactly: {prefix}.{name} is {size}, and its "
                f"heads have {head_size} elements"
            )
    return {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "vocab_size": _required_tensor(header, "token_embd.weight").shape[0],
        "hidden_size": hidden,
        "intermediate_size": integer("feed_forward_length"),
        "num_hidden_layers": integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": integer("attention.head_count_kv", heads),
        "head_dim": head_size,
        "max_position_embeddings": integer("context_length"),
        "rms_norm_eps": header.number(f"{prefix}.attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(header, head_size),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "hidden_act": "silu",
    }


def weights_of(header: Header) -> list[Weight]:
    """Return every tensor, in layer order. A missing or unknown tensor is an error."""
    architecture, config = architecture_of(header), config_of(header)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    found = []
    for name, wanted in _names(architecture, config):
        tensor = _required_tensor(header, name)
        kind = name.split(".")[-2] if architecture.is_reordered else ""
        found.append(Weight(wanted, tensor, heads.get(kind, 0)))
    unknown = set(header.tensors) - {each.tensor.name for each in found} - {ROPE_FACTORS}
    if unknown:
        raise UnsupportedModel(
            f"{header.path.name} cannot be served exactly: {config['architectures'][0]} has no "
            f"tensor like {sorted(unknown)[0]}"
        )
    return found


def _names(architecture: Architecture, config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name in the file and the name in transformers of each tensor that the model needs."""
    for name, wanted in OUTSIDE_LAYERS.items():
        if not (name == "output.weight" and config["tie_word_embeddings"]):
            yield name, wanted
    for layer in range(config["num_hidden_layers"]):
        for name, wanted in (IN_LAYERS | architecture.more_in_layers).items():
            yield f"blk.{layer}.{name}", f"model.layers.{layer}.{wanted}"


def _required_tensor(header: Header, name: str) -> Tensor:
    if name not in header.tensors:
        raise ModelError(f"{header.path.name} lacks the tensor {name}")
    return header.tensors[name]


def _refuse_unknown_keys(header: Header) -> None:
    prefix = f"{header.architecture}."
    for key in header.keys(prefix):
        name, value = key.removeprefix(prefix), header.get(key)
        if name in KEYS or (name in NO_EFFECT and NO_EFFECT[name] in (None, value)):
            continue
        raise UnsupportedModel(
            f"{header.path.name} cannot be served exactly: transformers has no known "
            f"equivalent of {key} = {brief(value)}"
        )


def _rope(header: Header, head_size: int) -> dict[str, Any]:
    base = float(header.number(f"{header.architecture}.rope.freq_base", 10_000.0))
    if ROPE_FACTORS not in header.tensors:
        return {"rope_type": "default", "rope_theta": base}
    factors = [float(each) for each in header.tensors[ROPE_FACTORS].data]
    factor = round(max(factors), 3)
    expected = _llama3_factors(base, head_size, factor)
    if len(factors) != len(expected) or any(
        abs(here - there) > FACTOR_TOLERANCE * there
        for here, there in zip(factors, expected, strict=True)
    ):
        raise UnsupportedModel(
            f"{header.path.name} cannot be served exactly: its rotary frequencies are not scaled "
            "as Llama 3's are"
        )
    return {
        "rope_type": "llama3",
        "rope_theta": base,
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": LLAMA3_LENGTH,
    }


def _llama3_factors(base: float, head_size: int, factor: float) -> list[float]:
    """Return the divisor of each frequency: 1 for the fastest, `factor` for the slowest."""
    factors = []
    for index in range(0, head_size, 2):
        rotations = LLAMA3_LENGTH / (2 * math.pi * base ** (index / head_size))
        share = (rotations - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)
        share = min(max(share, 0.0), 1.0)  # weight of the original frequency
        factors.append(1 / ((1 - share) / factor + share))
    return factors
