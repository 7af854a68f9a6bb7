"""A random model whose replies are unchanged when their text is tokenized again."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from pensieve.bench import step as bench_step
from pensieve.bench.random_model import RandomShape, make, words
from pensieve.errors import InvalidArgument
from pensieve.kernels import cpu_library
from pensieve.model.loader import load
from pensieve.text.tokenizer import Tokenizer


def test_replies_of_a_random_model_tokenize_to_the_same_ids(random_model: Path) -> None:
    tokenizer = Tokenizer.load(random_model)
    model = load(random_model)
    assert model.flat.whole is not None or cpu_library.compiled_library() is None
    draw = random.Random(3)
    text = "".join(draw.choices(words()[:1000], k=50)).strip()
    ids = tokenizer.encode(text).ids
    bench = bench_step.Bench(model, tokenizer, 1, 200)
    with torch.inference_mode():
        turn = bench.turn(0, ids)
        bench.prefill([turn])
        for _ in range(60):
            bench.decode([turn])
    bench.close()
    sampled = list(turn.tokens[len(ids) :])
    whole = tokenizer.decode(list(turn.tokens))
    assert tokenizer.encode(whole).ids == list(turn.tokens)
    assert len(sampled) == 61
    for strange in ("Grüße, 你好!\n\n  x", "<|im_end|>"):
        assert tokenizer.decode(tokenizer.encode(strange).ids) == strange


def test_an_impossible_vocabulary_size_is_explained(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="must be at least"):
        make(tmp_path, RandomShape(1, 8, 1, 1, 8, 300))
    with pytest.raises(InvalidArgument, match="there are no more words"):
        make(tmp_path, RandomShape(1, 8, 1, 1, 8, 2_000_000))
