"""Makes the small chat model that ships with Pensieve, from nothing but its own dialogues.

    python scripts/train_builtin.py                       train, examine, write pensieve/builtin/model
    python scripts/train_builtin.py --minutes 60          the same within an hour
    python scripts/train_builtin.py --resume --minutes 10 go on from the model in --out
    python scripts/train_builtin.py --evaluate            examine the model in --out, train nothing

The dialogues come from `scripts.builtin_corpus.dialogues`; the tokenizer (byte-level BPE, so that every
text can be encoded and comes back exactly) is trained on them first. The model is a Llama of three
layers that learns, reply by reply, to find in its context what it was told.

Left to itself, a model this small needs hours to discover how to look back. So it starts with the
circuit in place (`hand_start`): three heads of the first layer copy the codes of the tokens one, two
and three places back; two heads of the second layer look for the place where the last two tokens
stood before, and copy what followed them. Before any training that repeats 60 to 70 % of a random
sequence that it has seen. What is left to learn is what to say, and when.

Contexts begin short and grow; the values to be recalled weigh more than the words around them; the
loss looks at replies only. Positions jump forward at random between turns in half of the contexts,
so that the model knows distances that no training context has.

The exit status is 1 when the recall on the held-out examination is below 95 %.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from random import Random

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pensieve.builtin import MODEL_PATH  # noqa: E402
from scripts.builtin_corpus import words  # noqa: E402
from scripts.builtin_corpus.dialogues import (  # noqa: E402
    Exchange,
    conversation,
    examination,
    system_prompt,
)

PAD, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PAD_ID, IM_START_ID, IM_END_ID = 0, 1, 2
VOCABULARY = 2560
POSITIONS_MAX = 4096
JUMPED_POSITIONS_MAX = 2400  # in training contexts
RECALL_MIN = 0.95
DISTANCES = range(1, 21)
EXAMINATION_SEED = 1_000_003  # far from every training seed
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
# A word with its leading space is one piece, each digit is one, and so is each run of signs.
PIECES = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# (share of the training done until here, tokens in a context); contexts grow as recall settles.
CURRICULUM = ((0.12, 256), (0.45, 448), (1.0, 768))
BATCH_TOKENS = 4096
PEAK_LEARNING_RATE = 1.5e-3
VALUE_WEIGHT, OPENING_WEIGHT = 4.0, 3.0


# Tokenizer ---------------------------------------------------------------------------------------


def train_tokenizer(seed: int) -> Tokenizer:
    """A byte-level BPE whose merges come from the dialogues."""
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


# Contexts ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Segment:
    """Tokens with the weight of predicting each of them; `opens_turn` where positions may jump."""

    ids: list[int]
    weights: list[float]
    opens_turn: bool = False


@dataclass(frozen=True)
class Batch:
    ids: torch.Tensor  # (rows, length)
    positions: torch.Tensor  # (rows, length)
    weights: torch.Tensor  # (rows, length): of the token itself, as a prediction


class ContextWriter:
    """Writes conversations as tokens, the way the chat template does."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.newline = self._ids("\n")

    def system(self, text: str) -> Segment:
        return self._silent("system", text)

    def exchange(self, exchange: Exchange) -> list[Segment]:
        return [self._silent("user", exchange.user), self._reply(exchange)]

    def prompt(self, exchanges: list[Exchange], system: str | None) -> list[int]:
        """Everything before the last reply, generation prompt included."""
        segments = self.conversation(exchanges, system)
        reply = len(self._ids(exchanges[-1].reply)) + 1 + len(self.newline)
        return [token for segment in segments for token in segment.ids][: -reply or None]

    def conversation(self, exchanges: list[Exchange], system: str | None) -> list[Segment]:
        segments = [self.system(system)] if system else []
        for exchange in exchanges:
            segments += self.exchange(exchange)
        return segments

    def batch(self, random: Random, length: int, jumps: bool, drills: float = 0.0) -> Batch:
        """Contexts of one length, a share of them drills."""
        rows = max(2, BATCH_TOKENS // length)
        ids = torch.full((rows, length), PAD_ID)
        positions = torch.zeros((rows, length), dtype=torch.long)
        weights = torch.zeros((rows, length))
        for row in range(rows):
            write = self._drill if random.random() < drills else self._context
            row_ids, row_positions, row_weights = write(random, length, jumps)
            ids[row, : len(row_ids)] = torch.tensor(row_ids)
            positions[row, : len(row_ids)] = torch.tensor(row_positions)
            weights[row, : len(row_ids)] = torch.tensor(row_weights)
        return Batch(ids, positions, weights)

    def _context(
        self, random: Random, length: int, jumps: bool
    ) -> tuple[list[int], list[int], list[float]]:
        """One conversation cut at `length` tokens."""
        ids: list[int] = []
        weights: list[float] = []
        positions: list[int] = []
        slack = JUMPED_POSITIONS_MAX - length if jumps and random.random() < 0.5 else 0
        position = 0
        system = system_prompt(random)
        segments = [self.system(system)] if system else []
        exchanges = conversation(random)
        while len(ids) < length:
            if not segments:
                segments = self.exchange(next(exchanges))
            segment = segments.pop(0)
            if slack and segment.opens_turn and random.random() < 0.2:
                jump = random.randint(0, slack // 2)
                slack -= jump
                position += jump
            ids += segment.ids
            weights += segment.weights
            positions += range(position, position + len(segment.ids))
            position += len(segment.ids)
        return ids[:length], positions[:length], weights[:length]

    def _drill(
        self, random: Random, length: int, jumps: bool
    ) -> tuple[list[int], list[int], list[float]]:
        """Meaningless runs of tokens, said again later: nothing to learn here but looking back."""
        runs: list[list[int]] = []
        alphabet = random.sample(range(IM_END_ID + 1, VOCABULARY), 60)
        ids: list[int] = []
        weights: list[float] = []
        while len(ids) < length:
            if runs and random.random() < 0.6:
                run = random.choice(runs)
                weights += [0.0] + [1.0] * (len(run) - 1)
            else:
                run = random.choices(alphabet, k=random.randint(3, 10))
                runs.append(run)
                weights += [0.0] * len(run)
            ids += run
        return ids[:length], list(range(length)), weights[:length]

    def _silent(self, role: str, text: str) -> Segment:
        ids = [IM_START_ID, *self._ids(f"{role}\n{text}"), IM_END_ID, *self.newline]
        return Segment(ids, [0.0] * len(ids), opens_turn=True)

    def _reply(self, exchange: Exchange) -> Segment:
        head = self._ids("assistant\n")
        encoding = self.tokenizer.encode(exchange.reply)
        weights = [1.0] * len(encoding.ids)
        weights[0] = OPENING_WEIGHT
        end = 0
        for value in exchange.values:
            start = exchange.reply.index(value, end)
            end = start + len(value)
            for index, (token_start, token_end) in enumerate(encoding.offsets):
                if token_start < end and token_end > start:
                    weights[index] = VALUE_WEIGHT
        return Segment(
            [IM_START_ID, *head, *encoding.ids, IM_END_ID, *self.newline],
            [0.0] * (1 + len(head)) + weights + [1.0] + [0.0] * len(self.newline),
        )

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids


# Model -------------------------------------------------------------------------------------------


HIDDEN, HEADS, HEAD_SIZE, LAYERS = 256, 4, 64, 3
ROPE_THETA = 1e10  # most pairs of a head hardly turn within a context, so they can compare contents
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
    """Weights with which the model already repeats what it has seen.

    The residual stream is laid out as [code | code one back | code two back | free | constant].
    A head that looks `distance` back asks with the constant, turned by `distance` positions: its
    rotary score is a sum of cosines that peaks there. The heads that compare use the pairs that
    hardly turn: query (code, code one back) against key (code one back, code two back).
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
        for pair in range(6):  # the quick ones
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
    """Runs the curriculum; the model is written to `--out` now and then, and at the end."""
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
    """Weighted cross-entropy of the reply tokens, each predicted from the token before it."""
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


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """The folder that `transformers` loads: weights in bfloat16, computed with in float32."""
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


# Examination -------------------------------------------------------------------------------------


def held_out_examinations(
    seed: int, per_distance: int, distances: range = DISTANCES
) -> list[tuple[int, list[Exchange]]]:
    """(distance, conversation) pairs of the held-out set; the same for the same seed."""
    return [
        (distance, examination(Random(seed * 1000 + distance * 100_003 + index), distance))
        for distance in distances
        for index in range(per_distance)
    ]


def examine(
    model: LlamaForCausalLM, writer: ContextWriter, per_distance: int, seed: int = EXAMINATION_SEED
) -> dict[int, float]:
    """The share of right replies by distance.

    A greedy reply is right exactly when every token of the right reply, its end included, is the
    likeliest after the ones before it; so one forward pass decides, and nothing is sampled.
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


def load(folder: Path) -> tuple[LlamaForCausalLM, Tokenizer]:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=MODEL_PATH, help="the model's folder")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after this time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="go on from the model in --out")
    parser.add_argument("--evaluate", action="store_true", help="examine only")
    parser.add_argument("--per-distance", type=int, default=50, help="examinations a distance")
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
