"""The conversations that a benchmark plays to a daemon: how many, how long, and when."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

from pensieve.bench.random_model import words

NUM_WORDS = 7_000  # words that are one token each even in the smallest random model
TEMPLATE_TOKENS = 16  # tokens of the chat template per turn


@dataclass(frozen=True)
class WorkloadShape:
    """The number, length and timing of a benchmark's conversations."""

    conversations: int
    turns: int
    input_tokens: int
    output_tokens: int
    rate: float = 0.0  # conversations arriving per second; 0: all at once
    think_seconds: float = 0.0  # between a reply and the next message, on average
    # size of the device tier, as a share of the KV of all conversations; 0: the daemon's default
    device_share: float = 0.0

    @property
    def tokens_per_turn(self) -> int:
        return self.input_tokens + self.output_tokens + TEMPLATE_TOKENS

    @property
    def tokens(self) -> int:
        """Return the number of tokens that all conversations hold at their ends."""
        return self.conversations * self.turns * self.tokens_per_turn


SHAPES = {
    "short": WorkloadShape(16, 4, 64, 64),
    "long": WorkloadShape(8, 6, 256, 96),
    "crowd": WorkloadShape(20, 2, 64, 200, device_share=0.1),
    "pressure": WorkloadShape(24, 6, 256, 96, rate=8.0, think_seconds=1.5, device_share=0.25),
}


class ScriptedMessage(NamedTuple):
    text: str
    think_seconds: float  # before the message


class Script(NamedTuple):
    """One conversation."""

    arrives_at: float
    turns: tuple[ScriptedMessage, ...]


def scripts_of(shape: WorkloadShape, seed: int) -> list[Script]:
    """Return random conversations of words that a random model's tokenizer maps to one token each."""
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
