"""The built-in model's shape, its first weights, and its folder.

By itself, a model this small needs hours to discover how to look back. So it starts with the circuit in place
(`hand_start`). Three heads of the first layer look one, two and three positions back. The first two of them
copy the codes of the tokens at these positions. Two heads of the second layer look for the position where the
last two tokens stood before, and copy the token after them. Before any training, the model repeats 60 to 70 %
of a random sequence that it has seen.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from scripts.builtin_training.tokenizer import (
    CHAT_TEMPLATE,
    IM_END,
    IM_END_ID,
    IM_START,
    PAD,
    PAD_ID,
    POSITIONS_MAX,
    VOCABULARY,
)

HIDDEN, HEADS, HEAD_SIZE, LAYERS = 256, 4, 64, 3
ROPE_THETA = 1e10  # most pairs hardly rotate within a context, so they can compare contents
CODE = 64  # dimensions of the residual stream that hold a token's code
CONSTANT = HIDDEN - 1  # the dimension that is the same for every token


def untrained_model() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=512,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            head_dim=HEAD_SIZE,
            max_position_embeddings=POSITIONS_MAX,
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
            tie_word_embeddings=True,
            initializer_range=0.02,
            pad_token_id=PAD_ID,
            bos_token_id=None,
            eos_token_id=IM_END_ID,
        )
    )


@torch.no_grad()
def hand_start(model: LlamaForCausalLM, seed: int = 0) -> LlamaForCausalLM:
    """Set weights with which the model already repeats what it has seen; return the model.

    The residual stream is laid out as [code | code one back | code two back | free | constant]. Some heads
    look `distance` positions back. The query of such a head is the constant, rotated by `distance` positions:
    its rotary score is a sum of cosines with its peak at this distance. The comparing heads use the pairs
    that hardly rotate: query (code, code one back) against key (code one back, code two back).
    """
    generator = torch.Generator().manual_seed(seed)
    embedding = model.model.embed_tokens.weight
    embedding.mul_(0.5)
    embedding[:, :CODE] = torch.randn(VOCABULARY, CODE, generator=generator) * 0.12
    embedding[:, CODE : 3 * CODE] *= 0.2
    embedding[:, CONSTANT] = 1.0
    half = HEAD_SIZE // 2
    turns = ROPE_THETA ** (-torch.arange(half) / half)  # radians per position, by pair
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(0.3)
        layer.mlp.down_proj.weight.mul_(0.3)
    look, compare = (model.model.layers[i].self_attn for i in (0, 1))

    for head, distance in enumerate((1, 2, 3)):
        first = head * HEAD_SIZE
        for projection in (look.q_proj, look.k_proj, look.v_proj):
            projection.weight[first : first + HEAD_SIZE].mul_(0.1)
        for pair in range(6):  # the fast pairs
            angle = -float(turns[pair]) * distance
            look.q_proj.weight[first + pair, CONSTANT] = 0.75 * math.cos(angle)
            look.q_proj.weight[first + half + pair, CONSTANT] = 0.75 * math.sin(angle)
            look.k_proj.weight[first + pair, CONSTANT] = 0.75
        for i in range(CODE):
            look.v_proj.weight[first + i, i] = 1.0
            if distance < 3:
                look.o_proj.weight[distance * CODE + i, first + i] = 0.087

    slow = [pair for pair in range(half) if turns[pair] * 2500 < 0.6]
    places = slow + [pair + half for pair in slow]
    places = [places[i] for i in torch.randperm(len(places), generator=generator)]
    for head in (0, 1):
        first = head * HEAD_SIZE
        for projection in (compare.q_proj, compare.k_proj, compare.v_proj):
            projection.weight[first : first + HEAD_SIZE].mul_(0.1)
        mixed = torch.linalg.qr(torch.randn(CODE, CODE, generator=generator))[0]
        for i, place in enumerate(places):
            back = 0 if i < int(len(places) * 0.6) else CODE
            compare.q_proj.weight[first + place, back : back + CODE] = mixed[i] * 2.2
            compare.k_proj.weight[first + place, back + CODE : back + 2 * CODE] = mixed[i] * 2.2
        for i in range(CODE):
            compare.v_proj.weight[first + i, i] = 1.0
            compare.o_proj.weight[i, first + i] = 0.4
    return model


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write the folder that `transformers` loads: weights rounded to bfloat16."""
    out.mkdir(parents=True, exist_ok=True)
    rounded = untrained_model().to(torch.bfloat16)
    rounded.load_state_dict(model.state_dict())
    rounded.generation_config.update(
        do_sample=False, eos_token_id=IM_END_ID, pad_token_id=PAD_ID, bos_token_id=None
    )
    rounded.save_pretrained(out)
    config = json.loads((out / "config.json").read_text())
    config["dtype"] = "float32"
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": IM_END,
                "pad_token": PAD,
                "additional_special_tokens": [IM_START],
                "model_max_length": POSITIONS_MAX,
                "clean_up_tokenization_spaces": False,
                "chat_template": CHAT_TEMPLATE,
            },
            indent=2,
        )
        + "\n"
    )


def load(folder: Path) -> tuple[LlamaForCausalLM, Tokenizer]:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))
