"""A model of random weights in the shape of Llama 3 8B, and an executor for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from pensieve.core.sampling import Sampling
from pensieve.errors import PensieveError
from pensieve.kernels import PAGE_SLOTS as PAGE
from pensieve.kernels.kv_format import FP8
from pensieve.model.attention import SERVING, FlatModel, register
from pensieve.model.executor import TorchExecutor
from pensieve.model.fuse import fuse
from pensieve.model.graphs import DecodeGraphs
from pensieve.model.kv.memory import KVMemory
from pensieve.model.loader import LoadedModel
from pensieve.model.sampling.sampler import Sampler
from pensieve.model.shape import ModelShape

CONTEXT_MAX = 16_384
GREEDY = Sampling(ignore_eos=True, max_tokens=100_000)


class Mute:
    """A tokenizer for tokens that mean nothing."""

    def is_silent(self, token_id: int) -> bool:
        return False

    def piece(self, token_id: int, *, first: bool) -> bytes:
        return b" "


def random_model(device: torch.device, small: bool, *, plain: bool = False) -> LoadedModel:
    """A model in the shape of Llama 3 8B (small: a few tiny layers), made on the device that uses it.

    Always the same weights; `plain` leaves the layers as transformers has them.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, mlp, layers, vocabulary = (256, 512, 2, 512) if small else (4096, 14_336, 32, 128_256)
    heads, kv_heads = (4, 2) if small else (32, 8)
    head_size = hidden // heads
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=CONTEXT_MAX,
    )
    with torch.device("meta"):
        module = LlamaForCausalLM(config)
    rotary = type(module.model.rotary_emb)(config)  # whose frequencies are no weights
    module = module.to(torch.bfloat16).to_empty(device=device)
    torch.manual_seed(0)
    module.model.rotary_emb = rotary.to(device)
    for parameter in module.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, parameter.shape[1] ** -0.5)
        else:
            parameter.data.fill_(1.0)
    register()
    module.eval().requires_grad_(False).set_attn_implementation(SERVING)
    count = sum(each.numel() for each in module.parameters())
    shape = ModelShape(
        *(layers, heads, kv_heads, head_size, vocabulary, CONTEXT_MAX),
        *(torch.bfloat16, count, 2 * count),
    )
    flat = FlatModel(module)
    if not plain:
        num_replaced = fuse(flat, range(3, 40), range(37), int8=False).num_layers
        if num_replaced != layers:
            raise PensieveError(f"{num_replaced} of {layers} layers were replaced")
    return LoadedModel("random", flat, shape, heads, frozenset())


def in_fp8(model: LoadedModel) -> LoadedModel:
    """The same with its KV kept in fp8.

    Its keys and values are of the size of one, which fits whichever scale they have.  Neighbors have others,
    so that a scale of another layer, head or side does not go unseen.
    """
    shape = model.shape
    exponents = tuple(
        (
            tuple(-((layer + head) % 4) for head in range(shape.num_kv_heads)),
            tuple(-((layer + head + 2) % 4) for head in range(shape.num_kv_heads)),
        )
        for layer in range(shape.num_layers)
    )
    return replace(model, shape=replace(shape, kv_dtype=FP8.name, kv_exponents=exponents))


def executor_of(
    model: LoadedModel,
    device: torch.device,
    device_pages: int,
    host_pages: int,
    turns_max: int,
    *,
    graphs: bool = True,
    filled: bool = False,
) -> TorchExecutor:
    """With `filled` its device pages hold numbers, as if whoever decodes had computed a history."""
    memory = KVMemory(model.shape, device_pages, host_pages, PAGE, device)
    if filled:
        draw = torch.Generator(device).manual_seed(0)
        for layer in memory.device_arena:  # the same numbers in every format
            layer.copy_(torch.randn(layer.shape, generator=draw, device=device))
    captured = None
    if device.type == "cuda" and graphs:
        captured = DecodeGraphs(model.flat, memory, turns_max)
        captured.capture()
        if captured.failure:
            raise PensieveError(f"no graphs: {captured.failure}")
    tokenizer: Any = Mute()
    sampler = Sampler(model.shape.vocab_size)
    return TorchExecutor(model, memory, sampler, tokenizer, graphs=captured)
