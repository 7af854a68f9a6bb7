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
from pensieve.bench.gpu_model import executor_of, in_fp8, random_model
from pensieve.errors import PensieveError
from pensieve.model.loader import LoadedModel

BF16_GAP = 2e-2  # of the logits' range: rounding
FP8_GAP = 0.1  # the same; what is drawn at random lies half of the range below the largest
ROOMS = {"room": (400, 0), "pressure": (60, 40)}  # pages of the device and of the host


def section_exactness(bench: Bench, model: LoadedModel) -> None:
    """The same conversations with room for all, and with a quarter of it: swaps, drops, recompute.

    Sums of floats depend on what else is in a batch, so two replies may differ from where two tokens are
    equally likely; from there on they are compared with logits, not with each other.
    """
    replies: dict[str, list[Talk]] = {}
    recomputed = 0
    for name in ROOMS:
        replies[name], recomputed = _played(bench, model, name)
    differ = sum(
        one.tokens != other.tokens
        for one, other in zip(replies["room"], replies["pressure"], strict=True)
    )
    right = random_model(bench.device, bench.small, plain=True)
    counts = [
        (name, wrong_tokens(right, bench.device, each, BF16_GAP)) for name, each in replies.items()
    ]
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
    if bench.small:
        with bench.noting("exactness", "KV in fp8"):
            _with_fp8(bench, model, right)


def _with_fp8(bench: Bench, model: LoadedModel, right: LoadedModel) -> None:
    """Whether the whole path works, which bytes and their scales go: tokens are near those of the model."""
    if "fp8" in bench.wrong:
        bench.report("exactness", "KV in fp8: left out, its kernels are not right")
        return
    replies, recomputed = _played(bench, in_fp8(model), "pressure")
    if wrong := wrong_tokens(right, bench.device, replies, FP8_GAP):
        raise PensieveError(f"{wrong} tokens lie far below those that the model would sample")
    count = sum(len(talk.replied) for talk in replies)
    line = (
        f"KV in fp8: {count} tokens of replies, {recomputed} of histories recomputed, none far off"
    )
    bench.report("exactness", line, fp8_tokens=count)


def _played(bench: Bench, model: LoadedModel, name: str) -> tuple[list[Talk], int]:
    """The conversations with their replies, and how many tokens of histories were computed again."""
    turns_max, budget = 8, 128
    pages = ROOMS[name]
    draw = random.Random(3)
    executor = executor_of(model, bench.device, *pages, turns_max)
    people = Conversations(False, time.perf_counter())
    shape = EngineShape(*pages, budget, turns_max)
    engine = engine_of(model, executor, EngineKind(name), shape, people)
    talks = []
    for index in range(10):
        outputs = [draw.randint(4, 24) for _ in range(4)]
        messages = [
            array("I", draw.choices(range(3, model.shape.vocab_size), k=draw.randint(5, 150)))
            for _ in outputs
        ]
        talks.append(Talk(f"c{index}", messages, outputs, [0.0] * 4))
        people.add(0.0, talks[-1])
    while True:
        people.speak(math.inf)
        if not engine.step() and people.next_at == math.inf:
            break
    executor.close()
    if people.failures:
        raise PensieveError(f"{people.failures} turns failed")
    recomputed = engine.scheduler.counters.recomputed_tokens
    if name == "pressure" and not recomputed:
        raise PensieveError("there was no memory pressure: nothing was recomputed")
    return talks, recomputed


def wrong_tokens(
    model: LoadedModel, device: torch.device, conversations: Sequence[Talk], gap_max: float
) -> int:
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
        wrong += int((gaps > gap_max).sum())
    return wrong
