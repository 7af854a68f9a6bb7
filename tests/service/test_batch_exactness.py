"""Every token of a batch is the one that plain transformers would have said, beside chats in tiny caches."""

from __future__ import annotations

import random
from array import array
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from pensieve.core.group_feed import FeedConfig
from pensieve.core.sampling import Sampling
from pensieve.core.turn import TurnOptions
from pensieve.engine.batch_run import BatchRequest, BatchRun, Finished
from pensieve.engine.messages import CheckIntegrity, EvictConversation
from tests.service.rig import TIE, Reference, ask, figures, query, started, write_model
from tests.text.families import LLAMA_3, QWEN_2_5, Family

OPTIONS = TurnOptions(Sampling(max_tokens=10, ignore_eos=True), background=True)


def drawn(seed: int) -> list[BatchRequest]:
    """Groups of several sizes, prefixes within prefixes, some prompts alone, and two that are the same."""
    choose = random.Random(seed)

    def words(num_tokens: int) -> list[int]:
        return [choose.randrange(300) for _ in range(num_tokens)]

    prompts = [words(choose.randint(3, 60)) for _ in range(4)]
    instructions = words(21)
    for size in (2, 5, 9):
        prefix = instructions + words(choose.randint(20, 70))
        prompts += [prefix + words(choose.randint(1, 20)) for _ in range(size)]
    prompts.append(prompts[-1])
    choose.shuffle(prompts)
    return [BatchRequest(array("I", prompt), OPTIONS) for prompt in prompts]


@pytest.mark.parametrize(
    ("family", "kind", "chunk_tokens", "tokens", "depth"),
    [
        (QWEN_2_5, "llama-gqa", 8, 360, 1),
        (LLAMA_3, "qwen3", 8, 360, 2),
        (
            QWEN_2_5,
            "llama-gqa",
            32,
            320,
            1,
        ),  # pages that the compiled kernels take, shared ones once
    ],
)
def test_answers_of_a_batch_are_those_of_plain_transformers(
    tmp_path: Path, family: Family, kind: str, chunk_tokens: int, tokens: int, depth: int
) -> None:
    folder = write_model(tmp_path / "model", family, kind)
    requests = drawn(chunk_tokens + depth)
    choose = random.Random(depth)
    sizes = {"chunk_tokens": str(chunk_tokens), "device_cache": f"{tokens}t"}
    with started(folder, tmp_path / "data", host_cache=f"{tokens // 2}t", **sizes) as runtime:
        runtime.conversations.create("last")
        engine = runtime.engine
        engine.executor.depth = depth  # type: ignore[misc]
        feed = FeedConfig(3 * tokens // chunk_tokens, chunk_tokens, 12)  # more than there is
        batch = BatchRun("b", requests, feed, count(1 << 40).__next__, "~batch")
        finished: dict[int, Finished] = {}

        def take(event: Any) -> None:
            if getattr(event, "turn_id", 0) < 1 << 40:
                runtime.conversations.handle(event)
            elif (found := batch.take(event)) is not None:
                assert found.request not in finished, "a request is answered twice"
                finished[found.request] = found

        def step() -> bool:
            messages = batch.go()
            for message in messages:
                runtime.mailbox.put(message)
            worked = engine.step() or bool(messages)
            while (event := runtime.outbox.get(0)) is not None:
                take(event)
                worked = True
            return worked

        chats = 0
        while not batch.is_done:
            assert step(), "the batch stands still"
            if choose.random() < 0.3:
                name = f"c{chats % 5}.{chats // 15}"  # of three turns, within the model's context
                if chats % 15 < 5:
                    runtime.conversations.create(name)
                chats += 1
                text = "Oslo " * choose.randint(1, 9)
                live = runtime.conversations.send(name, text, sampling=Sampling(max_tokens=40))
                while live.finish is None:
                    assert step(), "a turn does not end"
            elif choose.random() < 0.1:  # the shared part goes, wherever it is used next
                for prefix in [
                    each for each in engine.scheduler.cache.conversations if "/p" in each
                ]:
                    runtime.mailbox.put(EvictConversation(prefix, choose.random() < 0.5))
        now = figures(runtime)
        assert query(runtime, CheckIntegrity(2)).problems == ()
        assert not [each for each in engine.scheduler.cache.conversations if each.startswith("~")]
        ask(runtime, "last", "Good bye.")
    assert sorted(finished) == list(range(len(requests)))
    assert batch.saved_tokens > 0
    assert now["chunks_dropped"] > 0, "the caches are not tiny"
    reference, num_sampled = Reference(folder), 0
    with torch.inference_mode():
        for request, found in finished.items():
            assert found.failure is None
            prompt, reply = list(requests[request].tokens), found.token_ids
            assert len(reply) == 10
            logits = reference.logits(prompt + reply).double()
            for position in range(len(prompt), len(prompt) + len(reply)):
                row, token = logits[position - 1], (prompt + reply)[position]
                assert float(row.max() - row[token]) <= TIE, (request, position)
                num_sampled += 1
    assert num_sampled == 10 * len(requests)
