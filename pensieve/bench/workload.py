"""Conversations that a bench plays to a daemon (how many, how long, when)."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

from pensieve.bench.random_model import words

NUM_WORDS = 7_000  # that even the smallest of the random models has as one token each
TEMPLATE_TOKENS = 16  # of a turn, beside its messages


@dataclass(frozen=True)
class WorkloadShape:
    """How long the conversations of a bench are, and when they come."""

    conversations: int
    turns: int
    input_tokens: int
    output_tokens: int
    rate: float = 0.0  # conversations arriving per second; 0: all at once
    think_seconds: float = 0.0  # between a reply and the next message, on average
    device_share: float = 0.0  # of what all conversations need together; 0: the daemon's default

    @property
    def tokens_per_turn(self) -> int:
        return self.input_tokens + self.output_tokens + TEMPLATE_TOKENS

    @property
    def tokens(self) -> int:
        """That all conversations hold in the end."""
        return self.conversations * self.turns * self.tokens_per_turn


SHAPES = {
    "short": WorkloadShape(16, 4, 64, 64),
    "long": WorkloadShape(8, 6, 256, 96),
    "crowd": WorkloadShape(20, 2, 64, 200, device_share=0.1),
    "pressure": WorkloadShape(24, 6, 256, 96, rate=8.0, think_seconds=1.5, device_share=0.25),
}


class ScriptedMessage(NamedTuple):
    text: str
    think_seconds: float  # before it


class Script(NamedTuple):
    """One conversation."""

    arrives_at: float
    turns: tuple[ScriptedMessage, ...]


def scripts_of(shape: WorkloadShape, seed: int) -> list[Script]:
    """Texts of words that the tokenizer of scripts/make_random_model knows as one token each."""
    draw = random.Random(seed)
    known = words()[:NUM_WORDS]
    scripts, now = [], 0.0
    for _ in range(shape.conversations):
        now += draw.expovariate(shape.rate) if shape.rate else 0.0
        turns = [
            ScriptedMessage(
                "".join(draw.choices(known, k=shape.input_tokens)).strip(),
                draw.expovariate(1 / shape.think_seconds)
                if shape.think_seconds and number
                else 0.0,
            )
            for number in range(shape.turns)
        ]
        scripts.append(Script(now, tuple(turns)))
    return scripts
