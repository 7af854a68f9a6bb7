"""Section `exactness` of the GPU bench (the same replies under memory pressure)."""

from __future__ import annotations

import math
import random
import time
from array import array
from collections.abc import Sequence

import torch

from pensieve.bench.gpu_conversations import Conversations, EngineKind, EngineShape, Talk, engine_of
from pensieve.bench.gpu_harness import Bench
from pensieve.bench.gpu_model import executor_of, random_model
from pensieve.errors import PensieveError
from pensieve.model.loader import LoadedModel

BF16_GAP = 2e-2  # of the logits' range: rounding


def section_exactness(bench: Bench, model: LoadedModel) -> None:
    """The same conversations with room for all, and with a quarter of it: swaps, drops, recompute.

    Sums of floats depend on what else is in a batch, so two replies may differ from where two tokens are
    equally likely; from there on they are compared with logits, not with each other.
    """
    turns_max, budget = 8, 128
    replies: dict[str, list[Talk]] = {}
    recomputed = 0
    for name, pages in {"room": (400, 0), "pressure": (60, 40)}.items():
        draw = random.Random(3)
        executor = executor_of(model, bench.device, *pages, turns_max)
        people = Conversations(False, time.perf_counter())
        shape = EngineShape(*pages, budget, turns_max)
        engine = engine_of(model, executor, EngineKind(name), shape, people)
        replies[name] = []
        for index in range(10):
            outputs = [draw.randint(4, 24) for _ in range(4)]
            messages = [
                array("I", draw.choices(range(3, model.shape.vocab_size), k=draw.randint(5, 150)))
                for _ in outputs
            ]
            replies[name].append(Talk(f"c{index}", messages, outputs, [0.0] * 4))
            people.add(0.0, replies[name][-1])
        while True:
            people.speak(math.inf)
            if not engine.step() and people.next_at == math.inf:
                break
        recomputed = engine.scheduler.counters.recomputed_tokens
        executor.close()
        if people.failures:
            raise PensieveError(f"{people.failures} turns failed")
    differ = sum(
        one.tokens != other.tokens
        for one, other in zip(replies["room"], replies["pressure"], strict=True)
    )
    if not recomputed:
        raise PensieveError("there was no memory pressure: nothing was recomputed")
    right = random_model(bench.device, bench.small, plain=True)
    counts = [(name, wrong_tokens(right, bench.device, each)) for name, each in replies.items()]
    if any(wrong for _, wrong in counts):
        raise PensieveError(f"tokens that the model would not sample: {counts}")
    count = sum(len(talk.replied) for each in replies.values() for talk in each)
    bench.report(
        "exactness",
        f"{count} tokens of replies, {recomputed} of histories recomputed, 0 wrong; {differ} of "
        f"{len(replies['room'])} conversations differ from where two tokens were as likely",
        parted=differ,
        recomputed=recomputed,
    )


def wrong_tokens(model: LoadedModel, device: torch.device, conversations: Sequence[Talk]) -> int:
    """Of all replies, given the ids before them: tokens whose logit lies far below the largest."""
    model.flat.module.set_attn_implementation("sdpa")
    wrong = 0
    for talk in conversations:
        ids = torch.tensor(list(talk.tokens), device=device)
        logits = model.flat.module(input_ids=ids[None], use_cache=False).logits[0].float()
        at = torch.tensor(talk.replied, device=device)
        before = logits[at - 1]
        largest = before.amax(1)
        gaps = (largest - before.gather(1, ids[at, None])[:, 0]) / (largest - before.amin(1))
        wrong += int((gaps > BF16_GAP).sum())
    return wrong
