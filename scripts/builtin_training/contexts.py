"""Training contexts: conversations as tokens, with the weight of predicting each token."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
from tokenizers import Tokenizer

from scripts.builtin_corpus.dialogues import (
    Exchange,
    conversation,
    system_prompt,
)
from scripts.builtin_training.tokenizer import IM_END_ID, IM_START_ID, PAD_ID, VOCABULARY

JUMPED_POSITIONS_MAX = 2400  # positions in a training context, including positions that jumps skip
BATCH_TOKENS = 4096
VALUE_WEIGHT, OPENING_WEIGHT = 4.0, 3.0


@dataclass(frozen=True)
class Segment:
    """Tokens with the weight of predicting each. Positions may jump before a segment with `opens_turn`."""

    ids: list[int]
    weights: list[float]
    opens_turn: bool = False


@dataclass(frozen=True)
class Batch:
    ids: torch.Tensor  # (rows, length)
    positions: torch.Tensor  # (rows, length)
    weights: torch.Tensor  # (rows, length): weight of predicting the token itself


class ContextWriter:
    """Write conversations as tokens, like the chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.newline = self._ids("\n")

    def system(self, text: str) -> Segment:
        return self._unweighted("system", text)

    def exchange(self, exchange: Exchange) -> list[Segment]:
        return [self._unweighted("user", exchange.user), self._reply(exchange)]

    def prompt(self, exchanges: list[Exchange], system: str | None) -> list[int]:
        """Return everything before the last reply, including the generation prompt."""
        segments = self.conversation(exchanges, system)
        reply = len(self._ids(exchanges[-1].reply)) + 1 + len(self.newline)
        return [token for segment in segments for token in segment.ids][: -reply or None]

    def conversation(self, exchanges: list[Exchange], system: str | None) -> list[Segment]:
        segments = [self.system(system)] if system else []
        for exchange in exchanges:
            segments += self.exchange(exchange)
        return segments

    def batch(self, random: Random, length: int, jumps: bool, drills: float = 0.0) -> Batch:
        """Return contexts of one length; `drills` is the share of drills among them."""
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
        """Write one conversation, cut at `length` tokens."""
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
        """Write random runs of tokens, some of them repeated later. They teach the model to look back."""
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

    def _unweighted(self, role: str, text: str) -> Segment:
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
