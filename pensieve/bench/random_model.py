"""Make checkpoints of a realistic shape with random weights, for benchmarks.

A reply's text is tokenised to the reply's own tokens. Every token that the model can sample is one word with
a leading space, and the tokenizer maps that word back to the same token. (All other tokens have output
weights of zero, and the largest of thousands of random logits is never zero.) So a server that tokenises the
history again in each turn gets exactly the tokens that it generated, and its prefix cache performs at its
best. Other text can be tokenised, too: the words are byte-level BPE merges over all bytes.
"""

from __future__ import annotations

import argparse
import json
from itertools import islice, product
from pathlib import Path
from typing import NamedTuple

from pensieve.errors import InvalidArgument

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' + message['content']"
    " + '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
SYLLABLES = tuple(a + b for a in "bcdfghjklmnpqrstvwxz" for b in "aeiou")


class RandomShape(NamedTuple):
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    mlp: int
    vocabulary: int = 32_000


SHAPES = {
    "0.03B": RandomShape(8, 512, 8, 2, 1408, 8_000),
    "0.37B": RandomShape(24, 1024, 16, 4, 3328),
    "1.1B": RandomShape(22, 2048, 32, 4, 5632),
}


def words() -> list[str]:
    """Return all words in the order of the vocabulary; each word is one token."""
    syllables = product(SYLLABLES, SYLLABLES)
    pairs = [" " + a + b for a, b in syllables]
    return pairs + [word + c for word in pairs for c in SYLLABLES]


def make(
    folder: Path, shape: RandomShape, *, dtype: str = "bfloat16", context: int = 8192, seed: int = 0
) -> None:
    """Write the checkpoint; create the folder if it is missing."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    first_word = _write_tokenizer(folder, shape.vocabulary)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=context,
        bos_token_id=None,
        eos_token_id=SPECIAL.index("<|im_end|>"),
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to(getattr(torch, dtype)).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5)
            else:
                parameter.fill_(1.0)
        model.lm_head.weight[:first_word] = 0
    model.save_pretrained(folder)


def _write_tokenizer(folder: Path, vocabulary: int) -> int:
    """Write the tokenizer; return the id of the first word."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    space = "Ġ"
    ids: dict[str, int] = {}
    merges: list[tuple[str, str]] = []

    def add(token: str, *parts: str) -> None:
        ids[token] = len(ids)
        if parts:
            merges.append((parts[0], parts[1]))

    for token in (*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())):
        add(token)
    for syllable in SYLLABLES:
        add(syllable, *syllable)
    for syllable in SYLLABLES:
        add(space + syllable, space, syllable)
    first_word = len(ids)
    if vocabulary < first_word + 1000:
        raise InvalidArgument("vocabulary", f"must be at least {first_word + 1000}")
    for word in islice(words(), vocabulary - first_word):
        add(space + word[1:], space + word[1:-2], word[-2:])
    if len(ids) < vocabulary:
        raise InvalidArgument("vocabulary", f"must be at most {len(ids)}: there are no more words")
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": ["<|im_start|>"],
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return first_word


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/make_random_model",
        description="Write a Llama checkpoint with random weights, a tokenizer and a chat template. "
        "Its replies are words that tokenise back to the same tokens.",
    )
    parser.add_argument("folder", type=Path, help="where to write it")
    parser.add_argument("--shape", choices=SHAPES, default="0.37B", help="(default: 0.37B)")
    for name in RandomShape._fields:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--context", type=int, default=8192, metavar="N", help="(default: 8192)")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    given = parser.parse_args()
    changes = {name: value for name in RandomShape._fields if (value := getattr(given, name))}
    shape = SHAPES[given.shape]._replace(**changes)
    make(given.folder, shape, dtype=given.dtype, context=given.context, seed=given.seed)
    print(f"{given.folder}: {shape}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
