"""Tiny random models of every served family, and of some refused families.

Weights have a large deviation, so that greedy replies vary and a wrong key changes the logits visibly.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 128
CONTEXT_MAX = 256

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_MAX,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts_per_tok": 2}


def _config(kind: str, **changes: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, kind)(**{**_COMMON, **changes})


SERVED: dict[str, Callable[[], Any]] = {
    "llama-mha": _config("LlamaConfig", num_key_value_heads=4),
    "llama-gqa": _config("LlamaConfig", num_key_value_heads=1),
    "mistral": _config("MistralConfig", sliding_window=None),
    "qwen2": _config("Qwen2Config"),
    "qwen3": _config("Qwen3Config", head_dim=16),
    "qwen3-moe": _config(
        "Qwen3MoeConfig", head_dim=8, num_experts=4, moe_intermediate_size=24, **_EXPERTS
    ),
    "mixtral": _config("MixtralConfig", sliding_window=None, num_local_experts=4, **_EXPERTS),
    "opt": _config("OPTConfig", ffn_dim=48, word_embed_proj_dim=32),
    "phi3": _config("Phi3Config", sliding_window=None),
    "gpt2": _config("GPT2Config", num_key_value_heads=4, scale_attn_by_inverse_layer_idx=True),
    "gpt-neox": _config("GPTNeoXConfig", num_key_value_heads=4),
    "granite": _config(
        "GraniteConfig", attention_multiplier=0.3, residual_multiplier=0.7, logits_scaling=2.0
    ),
    "gemma": _config("GemmaConfig", head_dim=16),
    "olmo2": _config("Olmo2Config"),
}

# Models whose queries are scaled with the position, from 64 on.
FAR_SCALED: dict[str, Callable[[], Any]] = {
    "ministral3": _config(
        "Ministral3Config",
        head_dim=8,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "llama_4_scaling_beta": 0.5,
        },
    ),
    "llama4": _config(
        "Llama4TextConfig",
        head_dim=8,
        num_local_experts=2,
        intermediate_size_mlp=48,
        attention_chunk_size=CONTEXT_MAX,
        no_rope_layers=[0, 0],
        floor_scale=64,
        attn_scale=4.0,
    ),
}

# Models with enough layers for more than two pipeline stages.
DEEP: dict[str, Callable[[], Any]] = {
    "deep": _config("Qwen3Config", head_dim=16, num_hidden_layers=5),
    "deep-tied": _config("Qwen3Config", num_hidden_layers=4, tie_word_embeddings=True),
}


def tiny_model(config: Any, seed: int = 0, std: float = 0.25) -> Any:
    """A model with random weights of this standard deviation, in fp32."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, std)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def save_tiny(config: Any, folder: Path, seed: int = 0) -> Path:
    """Save such a tiny model as a checkpoint with safetensors."""
    tiny_model(config, seed).save_pretrained(folder)
    return folder


_DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 64,
}
_QWEN3_NEXT = {
    "num_hidden_layers": 4,
    "head_dim": 8,
    "num_experts": 4,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    **_EXPERTS,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    **_EXPERTS,
}

# Models that cannot be served exactly, with the words of their refusal.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "mistral-window": (
        _config("MistralConfig", sliding_window=200),  # longer than the probe's prompts
        "layer 0 sees at most 200 positions (a sliding window or chunks), fewer than the context",
    ),
    "qwen2-half-sliding": (
        _config("Qwen2Config", use_sliding_window=True, sliding_window=64, max_window_layers=1),
        "layer 1 sees at most 64 positions",
    ),
    "gemma2-window": (
        _config("Gemma2Config", head_dim=8, sliding_window=64, attn_logit_softcapping=None),
        "layer 0 sees at most 64 positions",
    ),
    "gemma2-softcap": (
        _config("Gemma2Config", head_dim=8, sliding_window=64),
        "layer 0 passes softcap = 50.0 to its attention, which is not supported (a cap on scores)",
    ),
    "gemma4": (
        _config(
            "Gemma4TextConfig",
            head_dim=8,
            global_head_dim=16,
            sliding_window=64,
            num_hidden_layers=6,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=VOCAB_SIZE,
            num_kv_shared_layers=0,
        ),
        "its layers differ in heads or types",
    ),
    "llama4-chunks": (
        _config(
            "Llama4TextConfig",
            head_dim=8,
            num_local_experts=2,
            intermediate_size_mlp=48,
            attention_chunk_size=32,
        ),
        "layer 0 sees at most 32 positions",
    ),
    "gpt-oss-sinks": (
        _config(
            "GptOssConfig",
            head_dim=8,
            num_local_experts=4,
            sliding_window=64,
            **_EXPERTS,
        ),
        "layer 0 passes s_aux to its attention, which is not supported (attention sinks)",
    ),
    "mimo-v2": (
        _config(
            "MiMoV2FlashConfig",
            head_dim=8,
            v_head_dim=16,
            sliding_window=64,
            num_experts=4,
            n_routed_experts=4,
            moe_intermediate_size=16,
            **_EXPERTS,
        ),
        "layer 0 has queries, keys and values of different sizes (4 heads of 8, 2 heads of 8, 2 heads of 16)",
    ),
    "falcon": (
        _config("FalconConfig"),
        "FalconForCausalLM does not support setting its attention implementation",
    ),
    "stablelm": (
        _config("StableLmConfig"),
        "StableLmAttention does not pass the forward's keyword arguments",
    ),
    "mamba": (
        _config("MambaConfig"),
        "it keeps a recurrent state beside KV (state-space layers or linear attention): none of its "
        "layers calls the attention interface",
    ),
    "mamba2": (
        _config("Mamba2Config", num_heads=8, head_dim=8, state_size=8, n_groups=1, expand=2),
        "it keeps a recurrent state beside KV (state-space layers or linear attention): none of its "
        "layers calls the attention interface",
    ),
    "falcon-h1": (
        _config(
            "FalconH1Config",
            mamba_d_ssm=32,
            mamba_n_heads=4,
            mamba_d_head=8,
            mamba_d_state=8,
            mamba_n_groups=1,
        ),
        "it keeps a recurrent state beside KV (state-space layers or linear attention): ",
    ),
    "deepseek-v3.2": (
        _config("DeepseekV32Config", **_LATENT, index_n_heads=2, index_head_dim=16, index_topk=16),
        "its queries see only 16 keys that an index chooses (sparse attention)",
    ),
    "glm-5": (
        _config("GlmMoeDsaConfig", **_LATENT, index_n_heads=2, index_head_dim=16, index_topk=16),
        "its queries see only 16 keys that an index chooses (sparse attention)",
    ),
    "recurrent-gemma": (
        _config("RecurrentGemmaConfig", num_hidden_layers=3, lru_width=32, head_dim=8),
        "(state-space layers or linear attention): layer 0 never calls the attention interface",
    ),
    "qwen3-next": (
        _config("Qwen3NextConfig", **_QWEN3_NEXT),
        "(state-space layers or linear attention): layer 0 never calls the attention interface",
    ),
    "deepseek-v3": (
        _config("DeepseekV3Config", **_LATENT),
        "layer 0 has queries, keys and values of different sizes",
    ),
    "diff-llama": (_config("DiffLlamaConfig"), "its attention is called for layers [0, 0, 1, 1]"),
    "bert": (_config("BertConfig"), "layer 0 uses a mask that is not causal"),
    "dynamic-rope": (
        _config("LlamaConfig", rope_parameters=_DYNAMIC),
        "its rotary frequencies depend on the longest context in the batch",
    ),
    "longrope": (
        _config(
            "Phi3Config",
            sliding_window=None,
            rope_parameters=_LONG,
            original_max_position_embeddings=64,
        ),
        "its rotary frequencies depend on the longest context in the batch",
    ),
}
