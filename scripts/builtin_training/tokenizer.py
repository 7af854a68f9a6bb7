"""The tokenizer of the built-in model: byte-level BPE, trained on its dialogues."""

from __future__ import annotations

from itertools import chain, islice
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from scripts.builtin_corpus import words
from scripts.builtin_corpus.dialogues import (
    conversation,
)

PAD, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PAD_ID, IM_START_ID, IM_END_ID = 0, 1, 2
VOCABULARY = 2560
POSITIONS_MAX = 4096
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
# A word with its leading space is one piece; so are each digit and each run of signs.
PIECES = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train_tokenizer(seed: int) -> Tokenizer:
    """Return a byte-level BPE whose merges come from the dialogues."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    random = Random(seed)
    spoken = (
        f"{speaker}\n{text}"
        for _ in range(6000)
        for exchange in islice(conversation(random), 12)
        for speaker, text in (("user", exchange.user), ("assistant", exchange.reply))
    )
    rare_words = (f" {word}" for word in words.known_words() for _ in range(300))
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(chain(spoken, rare_words), trainer)
    return tokenizer
