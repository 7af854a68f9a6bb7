"""Train the small chat model that ships with Pensieve, only on its own dialogues.

    python scripts/train_builtin.py                       train, examine, write pensieve/builtin/model
    python scripts/train_builtin.py --minutes 60          the same within an hour
    python scripts/train_builtin.py --resume --minutes 10 continue with the model in --out
    python scripts/train_builtin.py --evaluate            examine the model in --out without training

The dialogues come from `scripts.builtin_corpus.dialogues`. The tokenizer is trained on them first; it is
byte-level BPE, so that every text can be encoded exactly. The model is a Llama of three layers. It learns,
reply by reply, to find in its context what the user told it.

The model starts with attention heads that already repeat what they have seen
(`scripts.builtin_training.network`). Training teaches it what to say, and when.

Contexts begin short and grow. Values to be recalled weigh more than the words around them. The loss covers
replies only. In half of the contexts, positions jump forward at random between turns, so that the model knows
distances that no training context has.

The exit status is 1 if the recall on the held-out examination is below 95 %.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from random import Random

import torch
from transformers import LlamaForCausalLM
from transformers.utils import logging

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pensieve.builtin import MODEL_PATH  # noqa: E402
from scripts.builtin_corpus.dialogues import Exchange, examination  # noqa: E402
from scripts.builtin_training.contexts import Batch, ContextWriter  # noqa: E402
from scripts.builtin_training.network import (  # noqa: E402
    hand_start,
    load,
    save,
    untrained_model,
)
from scripts.builtin_training.tokenizer import train_tokenizer  # noqa: E402

RECALL_MIN = 0.95
DISTANCES = range(1, 21)
EXAMINATION_SEED = 1_000_003  # far from every training seed
# (share of the training until here, tokens per context); contexts grow as recall becomes reliable.
CURRICULUM = ((0.12, 256), (0.45, 448), (1.0, 768))
PEAK_LEARNING_RATE = 1.5e-3


def context_length(progress: float, resumed: bool) -> int:
    if resumed:
        return CURRICULUM[-1][1]
    return next(length for until, length in CURRICULUM if progress <= until)


def learning_rate(progress: float, step: int, resumed: bool) -> float:
    peak = PEAK_LEARNING_RATE * (0.6 if resumed else 1.0)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return peak * min(1.0, (step + 1) / 100) * (0.02 + 0.98 * cosine)


def train(
    model: LlamaForCausalLM, writer: ContextWriter, arguments: argparse.Namespace
) -> LlamaForCausalLM:
    """Run the curriculum; write the model to `--out` every 500 steps."""
    random = Random(arguments.seed)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.98),
    )
    started = time.monotonic()
    seen_tokens, recent_loss = 0, 0.0
    step, progress = 0, 0.0
    while progress < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress, step, arguments.resume)
        batch = writer.batch(random, context_length(progress, arguments.resume), jumps=True)
        loss = reply_loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        seen_tokens += batch.ids.numel()
        recent_loss += (loss.item() - recent_loss) / min(step, 50)
        elapsed = time.monotonic() - started
        progress = step / arguments.steps
        if arguments.minutes:
            progress = max(progress, elapsed / 60 / arguments.minutes)
        if step % 50 == 0:
            print(
                f"step {step}  {progress:5.1%}  {elapsed / 60:5.1f} min  loss {recent_loss:.4f}"
                f"  context {batch.ids.shape[1]}  {seen_tokens / elapsed:,.0f} tokens/s",
                flush=True,
            )
        if step % 500 == 0:
            print(f"    recall {overall(examine(model, writer, per_distance=5)):.1%}", flush=True)
            save(model, writer.tokenizer, arguments.out)
    return model


def reply_loss(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """Return the weighted cross-entropy of the reply tokens, each predicted from the previous token."""
    wanted = batch.weights[:, 1:] > 0
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(
            input_ids=batch.ids,
            position_ids=batch.positions,
            attention_mask=torch.ones_like(batch.ids),
            use_cache=False,
        ).last_hidden_state
        logits = model.lm_head(hidden[:, :-1][wanted])
    losses = torch.nn.functional.cross_entropy(
        logits.float(), batch.ids[:, 1:][wanted], reduction="none"
    )
    weights = batch.weights[:, 1:][wanted]
    return (losses * weights).sum() / weights.sum()


def held_out_examinations(
    seed: int, per_distance: int, distances: range = DISTANCES
) -> list[tuple[int, list[Exchange]]]:
    """Return (distance, conversation) pairs of the held-out set; the same for the same seed."""
    return [
        (distance, examination(Random(seed * 1000 + distance * 100_003 + index), distance))
        for distance in distances
        for index in range(per_distance)
    ]


def examine(
    model: LlamaForCausalLM, writer: ContextWriter, per_distance: int, seed: int = EXAMINATION_SEED
) -> dict[int, float]:
    """Return the share of right replies by distance.

    A greedy reply is right exactly if every token of the right reply, including its end, is the likeliest
    after the tokens before it. So one forward pass decides, without sampling.
    """
    right: dict[int, int] = dict.fromkeys(DISTANCES, 0)
    for distance, exchanges in held_out_examinations(seed, per_distance):
        context = [
            token for segment in writer.conversation(exchanges, None) for token in segment.ids
        ]
        prompt = len(writer.prompt(exchanges, None))
        end = len(context) - len(writer.newline)
        with torch.no_grad():
            ids = torch.tensor([context[:end]])
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
            likeliest = model.lm_head(hidden[0, prompt - 1 : end - 1]).argmax(-1)
        right[distance] += int(likeliest.tolist() == context[prompt:end])
    return {distance: count / per_distance for distance, count in right.items()}


def overall(recall: dict[int, float]) -> float:
    return sum(recall.values()) / len(recall)


def report(recall: dict[int, float], per_distance: int) -> None:
    print(f"held-out recall, {per_distance} conversations for each distance in turns")
    for distance, share in recall.items():
        print(f"  {distance:2d}  {share:6.1%}")
    print(f"  all {overall(recall):6.1%}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=MODEL_PATH, help="the model's folder")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after this time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="continue with the model in --out")
    parser.add_argument("--evaluate", action="store_true", help="examine only")
    parser.add_argument("--per-distance", type=int, default=50, help="examinations per distance")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    if not arguments.evaluate:
        if arguments.resume:
            model, tokenizer = load(arguments.out)
        else:
            model, tokenizer = hand_start(untrained_model()), train_tokenizer(arguments.seed)
        print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
        train(model, ContextWriter(tokenizer), arguments)
        save(model, tokenizer, arguments.out)
    model, tokenizer = load(arguments.out)
    recall = examine(model, ContextWriter(tokenizer), arguments.per_distance)
    report(recall, arguments.per_distance)
    return 0 if overall(recall) >= RECALL_MIN else 1


if __name__ == "__main__":
    sys.exit(main())
