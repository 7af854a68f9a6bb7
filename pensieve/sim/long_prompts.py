"""Requests with long prompts, batched in several ways: table 4 of Sarathi-Serve (Agrawal et al., 2024).

Yi-34B on two A100-80GB, 128 requests, a token budget of 1,024; nothing is known of anybody when they come.

    hybrid batches only      prompts uncut, beside the turns that generate
    chunked prefills only    prompts cut, in passes of their own
    combined                 prompts cut, beside: the scheduler as it is
    prefill first            prompts uncut, in passes of their own (vLLM's way then)

The rate is not published.  So it is the one at which the combined scheduler's median first token takes what
the paper's took (`rate_with`); what the others do under that load, and everybody's P99 between tokens, is
then a prediction.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from itertools import islice

from pensieve.core.cache import CacheConfig
from pensieve.core.policies.registry import policy_named
from pensieve.core.scheduler import SchedulerConfig
from pensieve.sim import report
from pensieve.sim.cost import HARDWARE, MODELS, CostModel, device_tokens_of
from pensieve.sim.scenario import CHUNK_TOKENS
from pensieve.sim.simulator import Simulator
from pensieve.sim.trace import HABITS, drawn

GPU, NUM_GPUS = "a100-80gb", 2
WHOLE = 1_000_000  # tokens: prompts are not cut
MODEL = "yi-34b"
SCHEDULERS = {
    "hybrid batches only": (WHOLE, "unified"),
    "chunked prefills only": (1024, "separate"),
    "combined": (1024, "unified"),
}
PREFILL_FIRST = (WHOLE, "separate")
TABLE_4 = {  # P50 of the first token and P99 between tokens, seconds
    "requests": {
        "hybrid batches only": (0.56, 1.08),
        "chunked prefills only": (1.04, 0.34),
        "combined": (0.85, 0.29),
    },
    "documents": {
        "hybrid batches only": (4.18, 1.76),
        "chunked prefills only": (4.86, 0.38),
        "combined": (3.03, 0.35),
    },
}


def play(
    workload: str, rate: float, scheduling: tuple[int, str], requests: int, seeds: int
) -> dict[str, float]:
    """Means over seeds of each run's median first token, P99 between tokens (s) and throughput."""
    hardware = replace(HARDWARE[GPU], devices=NUM_GPUS)
    cost = CostModel.of(MODELS[MODEL], hardware)
    budget, phases = scheduling
    rows = []
    for seed in range(seeds):
        simulator = Simulator(
            cost,
            policy_named("value", cost.recompute(CHUNK_TOKENS), CHUNK_TOKENS),
            CacheConfig(device_tokens_of(MODELS[MODEL], hardware) // CHUNK_TOKENS, 0),
            SchedulerConfig(budget, 128),
            keep_gaps=True,
            phases=phases,
        )
        visits = islice(drawn(HABITS[workload], rate, 1e9, seed), requests)
        rows.append(report.figures("value", simulator.run(visits)))
    return {
        "first_token": statistics.mean(row["first_token_p50"] for row in rows),
        "gap": statistics.mean(row["gap_p99"] for row in rows) / 1000,
        "tokens_per_second": statistics.mean(row["tokens_per_second"] for row in rows),
    }


def rate_with(workload: str, first_token: float, requests: int, seeds: int, halvings: int) -> float:
    """At which the combined scheduler's median first token takes so long."""
    low, high = 0.01, 4.0
    for _ in range(halvings):
        middle = (low * high) ** 0.5
        found = play(workload, middle, SCHEDULERS["combined"], requests, seeds)
        low, high = (middle, high) if found["first_token"] < first_token else (low, middle)
    return low
