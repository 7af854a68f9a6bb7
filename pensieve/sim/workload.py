"""Draw random conversations like the conversations of published data sets.

`sharegpt`, `assistant` and `agents` are conversations. `requests`, `documents` and `first-rounds` are single
turns.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from pensieve.sim.trace import Arrival


@dataclass(frozen=True)
class WorkloadPreset:
    """The distributions from which a kind of conversation is drawn.

    Without a spread, a length is exponential around its mean, and the number of turns is geometric. With a
    spread, a length is log-normal around its median, and the number of turns is log-normal with the given
    mean. Alternatively, `continue_probabilities` has the probabilities of another turn after the first turn,
    after the second, and so on.
    """

    turns_mean: float
    input_tokens: float
    output_tokens: float
    reaction_seconds: float
    context_max: int  # tokens at which a conversation is cut off
    turns_spread: float = 0.0
    input_spread: float = 0.0
    output_spread: float = 0.0
    first_input_tokens: float = 0.0  # length of the first message, if different
    reaction_spread: float = 0.0  # above 0: log-normal around the same mean, not exponential
    continue_probabilities: tuple[float, ...] = ()  # the last value holds for all later turns

    def turns_from(self, least: int) -> float:
        """Return the mean number of turns of conversations with at least `least` turns."""
        if least <= 1:
            return self.turns_mean
        draw = random.Random(0)
        counts = [turns for _ in range(20_000) if (turns := _turns(draw, self)) >= least]
        return sum(counts) / len(counts) if counts else float(least)


# The spreads reproduce published figures:
#
#   sharegpt      ShareGPT: 36 % of the conversations have at least five turns, and 0.57 % exceed the context
#                 (drawn: 0.2 % exceed it; with a geometric number of turns, 45 % would have five turns, and
#                 none would exceed it)
#   requests      openchat_sharegpt4, each request with its history as the prompt: prompts of 1,730 tokens
#                 (median) and 5,696 tokens (P90), replies of 415 and 834 tokens
#   assistant     Mooncake's trace: a quarter of the first turns are followed by a second turn, and later
#                 turns are followed by another turn more often; reactions of 42 s, 126 s and 480 s (P10, P50,
#                 P90); first messages of 7,000 tokens (median; the mean is 12,700)
#   documents     arXiv summaries: prompts of 7,059 tokens (median) and 12,985 tokens (P90), replies of 208
#                 and 371 tokens
#   first-rounds  ShareGPT's first messages and replies, up to OPT's context, with the means of vLLM's paper,
#                 161 and 338 tokens; the spread is assumed (3 % would exceed the context)
WORKLOAD_PRESETS = {
    "sharegpt": WorkloadPreset(5.56, 37.8, 204.6, 60.0, 16_384, turns_spread=1.13),
    "requests": WorkloadPreset(1.0, 2000.0, 415.0, 60.0, 8_192, 0.0, 1.2, 0.545),
    "assistant": WorkloadPreset(
        turns_mean=1.46,
        input_tokens=900.0,
        output_tokens=343.0,
        reaction_seconds=215.0,
        context_max=131_072,
        input_spread=1.1,
        first_input_tokens=7000.0,
        reaction_spread=1.03,
        continue_probabilities=(0.25, 0.39, 0.49, 0.55, 0.61),
    ),
    "agents": WorkloadPreset(33.0, 2242.0, 17.0, 5.2, 100_000),
    "documents": WorkloadPreset(1.0, 7400.0, 208.0, 60.0, 16_384, 0.0, 0.55, 0.45),
    "first-rounds": WorkloadPreset(1.0, 70.0, 240.0, 60.0, 2_048, 0.0, 1.5, 0.95),
}


def drawn(
    preset: WorkloadPreset,
    conversations_per_second: float,
    seconds: float,
    seed: int = 0,
    *,
    reaction_seconds: float | None = None,
    turns_min: int = 1,
) -> Iterator[Arrival]:
    """Draw conversations that arrive at random; each later turn follows a random time after a reply."""
    draw = random.Random(seed)
    reaction = preset.reaction_seconds if reaction_seconds is None else reaction_seconds
    now, number = 0.0, 0
    while (now := now + draw.expovariate(conversations_per_second)) < seconds:
        number += 1
        turns = _turns(draw, preset)
        if turns < turns_min:
            continue
        length = 0
        for turn in range(turns):
            typical = preset.input_tokens
            if turn == 0 and preset.first_input_tokens:
                typical = preset.first_input_tokens
            inputs = _length(draw, typical, preset.input_spread)
            outputs = _length(draw, preset.output_tokens, preset.output_spread)
            length += inputs + outputs
            if length >= preset.context_max:
                break
            wait = _reaction(draw, reaction, preset.reaction_spread)
            yield Arrival(f"d{number}", now if turn == 0 else None, inputs, outputs, wait)


def _turns(draw: random.Random, preset: WorkloadPreset) -> int:
    if probabilities := preset.continue_probabilities:
        turns = 1
        while draw.random() < probabilities[min(turns, len(probabilities)) - 1]:
            turns += 1
        return turns
    if preset.turns_mean <= 1:
        return 1
    if not preset.turns_spread:
        return 1 + int(draw.expovariate(math.log1p(1 / (preset.turns_mean - 1))))
    spread = preset.turns_spread  # rounding up adds a half on average
    return math.ceil(draw.lognormvariate(math.log(preset.turns_mean - 0.5) - spread**2 / 2, spread))


def _reaction(draw: random.Random, mean: float, spread: float) -> float:
    if spread:
        return draw.lognormvariate(math.log(mean) - spread**2 / 2, spread)
    return draw.expovariate(1 / mean)


def _length(draw: random.Random, typical: float, spread: float) -> int:
    if spread:
        return 1 + int(draw.lognormvariate(math.log(typical), spread))
    return 1 + int(draw.expovariate(1 / typical))
