"""Section `load` of the GPU bench (throughput with and without memory at equal latency).

It runs the engine itself, without a daemon, under conversations like those of ShareGPT: they arrive at
random; each sends a message, waits for the reply, reacts after a random time, and sends the next one. Mean
reaction time, tiers and load are all shrunk by the same factor (`SHRINK`), which keeps what matters: how much
idle KV the tiers can hold for how long. Four engines get the same conversations:

    stateless     everything is forgotten when a turn ends, and computed again with the next
    device only   what the device tier has no room for is forgotten
    two tiers     the host tier takes it
    two, LRU      as before, but the least recently used is given up first

Throughput is compared at equal P90 normalized latency (the time of a turn over its output tokens), as the
paper does: each engine's latency is measured at a few rates and interpolated.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

from pensieve.bench.gpu_conversations import ENGINES, EngineShape, serve, talks
from pensieve.bench.gpu_harness import Bench
from pensieve.bench.gpu_model import executor_of
from pensieve.errors import PensieveError
from pensieve.kernels import PAGE_SLOTS as PAGE
from pensieve.model.loader import LoadedModel

SHRINK = 20  # of reaction times and tiers
REACTION_SECONDS = 60.0


def section_load(bench: Bench, model: LoadedModel) -> None:
    small = bench.small
    rates = (2.0,) if small else (8.0, 16.0, 32.0)  # conversations a second
    runs = len(rates) * len(ENGINES)
    # A run has its seconds, and a third as much for what is still running then: the section keeps its limit.
    seconds = 3.0 if small else min(max(bench.seconds_left - 45, 60) / runs * 0.7, 20.0)
    turns_max, budget = (8, 64) if small else (128, 1024)
    # What 60 s of reaction would leave idle on 40 GB of KV, all of it by SHRINK.
    device_pages = 60 if small else 300_000 // SHRINK // PAGE * 4
    host_pages = 4 * device_pages
    shape = EngineShape(device_pages, host_pages, budget, turns_max)
    executor = executor_of(model, bench.device, device_pages, host_pages, turns_max)
    reaction = REACTION_SECONDS / SHRINK
    found: dict[str, list[tuple[float, float]]] = {}  # by kind: (P90 latency, tokens a second)
    for rate in rates:
        for kind in ENGINES:
            vocab_size = model.shape.vocab_size
            arrivals = talks(rate, seconds, reaction, vocab_size, int(rate * 10))
            if small:
                for _, talk in arrivals:
                    talk.outputs = [min(each, 12) for each in talk.outputs]
            people, lasted = serve(
                model, executor, kind, shape, arrivals, seconds, max(seconds / 3, 2.0)
            )
            what = f"{rate:g} conversations/s, {kind.name}"
            with bench.noting("load", what):
                if people.failures or not people.latencies:
                    failed, ended = people.failures, len(people.latencies)
                    raise PensieveError(f"{failed} turns failed, {ended} ended")
                ordered = sorted(people.latencies)
                p90 = ordered[int(0.9 * (len(ordered) - 1))]
                throughput = people.output_tokens / lasted
                found.setdefault(kind.name, []).append((p90, throughput))
                bench.report(
                    "load",
                    f"{what}: {throughput:.0f} tokens/s, P90 {p90 * 1e3:.1f} ms a token, "
                    f"{len(ordered)} turns, {people.num_cut} cut off at the end",
                    rate=rate,
                    kind=kind.name,
                    throughput=throughput,
                    p90=p90,
                )
    executor.close()
    if "stateless" not in found:
        raise PensieveError("nothing is known of the stateless engine, so nothing is compared")
    limit = statistics.median(p90 for p90, _ in found["stateless"])
    at_limit = {name: throughput_at(points, limit) for name, points in found.items()}
    for name, throughput in at_limit.items():
        bench.report(
            "load",
            f"at P90 {limit * 1e3:.1f} ms a token, {name}: {throughput:.0f} tokens/s, "
            f"{throughput / at_limit['stateless']:.2f} x stateless",
            kind=name,
            ratio=throughput / at_limit["stateless"],
        )


def throughput_at(points: Sequence[tuple[float, float]], limit: float) -> float:
    """Where the line through (P90, tokens a second) meets the limit; its end where it does not."""
    ordered = sorted(points)
    for (low, before), (high, after) in itertools.pairwise(ordered):
        if low <= limit <= high and high > low:
            return before + (after - before) * (limit - low) / (high - low)
    below = [throughput for p90, throughput in ordered if p90 <= limit]
    return max(below) if below else ordered[0][1]
