"""Figures 11 and 12 of the FluidInfer paper: nine panels, three OPT models on three machines.

The load is single requests, the first rounds of conversations. The systems are those of
scripts/measurements/servers.py. `streamed` is our scheduler with turns whose KV stays on the host
(core/streaming.py). Each panel has the throughput while requests wait, and the latency bound at the load that
fills the device. The bound is the longest time between two tokens of one reply.

The paper assumes that KV can be copied as fast as attention reads it. `fast link` is such a link. The links
of the data sheets are a few dozen times slower.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from pensieve.sim.cost import HARDWARE, MODELS, CostModel, device_tokens_of, host_tokens_of
from scripts.measurements.servers import (
    Figures,
    ServingSetting,
    counts_of,
    figures_of,
    requests_of,
)
from scripts.papers.rows import Extent, Figure, Row, Spread, about, more, ratio

OPTS = ("opt-125m", "opt-1.3b", "opt-6.7b")
MACHINES = {
    "one RTX 4090": HARDWARE["rtx-4090"],
    "four RTX 4090": replace(HARDWARE["rtx-4090"], devices=4),
    "four A100": replace(HARDWARE["a100-40gb"], devices=4),
}
STREAMED, SAME_LINK = "streamed", "streamed, fast link"
OTHERS = {"vllm": "vLLM", "orca": "Orca", "fastserve": "FastServe"}
SYSTEMS = (STREAMED, SAME_LINK, *OTHERS)
REQUESTS_MIN = 400
AT_ONCE = 1e6  # requests per second: all are there at the start


def panels(model: str, extent: Extent) -> Iterator[Row]:
    """The three panels of a model, in both figures."""
    preset = MODELS[model]
    for name, hardware in MACHINES.items():
        setting = ServingSetting(
            CostModel.of(preset, hardware),
            device_tokens_of(preset, hardware),
            host_tokens_of(preset, hardware),
        )
        yield from _panel(f"{model}, {name}", setting, extent)


def _panel(name: str, setting: ServingSetting, extent: Extent) -> Iterator[Row]:
    # Enough requests to fill the device several times: otherwise memory would not matter.
    num_requests = max(int(extent.panel_fills * setting.turns_held), REQUESTS_MIN)
    link = setting.cost.kv_bytes_per_token / setting.cost.attention_seconds_per_key
    fast = replace(setting, cost=replace(setting.cost, link_bytes_per_second=link))

    def runs(system: str, rate: float) -> list[Figures]:
        given = (STREAMED, fast) if system == SAME_LINK else (system, setting)
        return [
            figures_of(counts_of(*given, requests_of(rate, num_requests, seed)))
            for seed in range(extent.seeds)
        ]

    speeds = {
        system: [each.tokens_per_second for each in runs(system, AT_ONCE)] for system in SYSTEMS
    }
    shown = ", ".join(f"{each} {statistics.median(speeds[each]):,.0f}" for each in SYSTEMS)
    reason = (
        f"tokens/s: {shown}; {num_requests:,} requests wait at the start, and the device holds "
        f"{setting.turns_held:,}"
    )
    # About Orca and FastServe, the text has only that the gain is larger than over vLLM.
    pairs = ((SAME_LINK, "vllm"), (STREAMED, "vllm"), (SAME_LINK, "orca"), (SAME_LINK, "fastserve"))
    for system, other in pairs:
        yield Row(
            "FluidInfer, figure 11",
            f"{name}: throughput, {system} over {OTHERS[other]}",
            about(2.0, 4.0) if other == "vllm" else more(),
            ratio(speeds[system], speeds[other]),
            reason,
        )
    bounds = {
        system: [each.bound for each in runs(system, setting.rate_held)]
        for system in (STREAMED, SAME_LINK, "vllm")
    }
    shown = ", ".join(
        f"{key} {Spread(tuple(each)).shown('{:,.0f}')}" for key, each in bounds.items()
    )
    yield Row(
        "FluidInfer, figure 12",
        f"{name}: latency bound, vLLM over {SAME_LINK}",
        about(3.0),
        ratio(bounds["vllm"], bounds[SAME_LINK]),
        f"ms: {shown}; a single late token decides it, so it differs much between loads",
    )


FIGURES: dict[str, Figure] = {f"fluidinfer-{model}": partial(panels, model) for model in OPTS}
