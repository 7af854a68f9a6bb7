"""Figures 11 and 12 of the FluidInfer paper: nine panels, three OPT models on three machines.

The load is single requests that arrive at random, the first rounds of conversations. The systems, the load
and the quantities are those of scripts/measurements/servers.py. `streamed` is our scheduler with turns whose
KV stays on the host (core/streaming.py). Each panel has the rate that a system sustains within a normalized
latency, and the latency bound, the longest time between two tokens of one reply, at twice the load that
fills the device.

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
    ServingSetting,
    counts_of,
    figures_of,
    requests_of,
    sustained,
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
FACTORS = (0.3, 1.0, 2.0, 4.0)  # multiples of the rate that fills the device
REQUESTS_MIN = 400


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
    rates = [factor * setting.rate_held for factor in FACTORS]
    limit = 1000 * setting.limit_seconds
    # Enough requests to fill the device: in a shorter run no queue can become long.
    filling = int(extent.panel_fills * setting.turns_held)
    num_requests = min(max(filling, REQUESTS_MIN), extent.panel_requests_max)
    link = setting.cost.kv_bytes_per_token / setting.cost.attention_seconds_per_key
    fast = replace(setting, cost=replace(setting.cost, link_bytes_per_second=link))
    carried: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    bounds: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    for system in SYSTEMS:
        given = (STREAMED, fast) if system == SAME_LINK else (system, setting)
        for seed in range(extent.seeds):
            found = [
                figures_of(counts_of(*given, requests_of(rate, num_requests, seed)))
                for rate in rates
            ]
            points = [(rate, each.normalized) for rate, each in zip(rates, found, strict=True)]
            carried[system].append(min(sustained(points, limit), rates[-1]))
            bounds[system].append(found[FACTORS.index(2.0)].bound)
    shown = ", ".join(f"{each} {statistics.median(carried[each]):.3g}" for each in SYSTEMS)
    held = f"the device holds {setting.turns_held:,}; {num_requests:,} requests per run"
    reason = f"requests/s within {limit:.3g} ms/token: {shown}; {held}"
    # About Orca and FastServe, the text has only that the gain is larger than over vLLM.
    for system, other in (
        (SAME_LINK, "vllm"),
        (STREAMED, "vllm"),
        *((SAME_LINK, each) for each in ("orca", "fastserve")),
    ):
        yield Row(
            "FluidInfer, figure 11",
            f"{name}: sustained load, {system} over {OTHERS[other]}",
            about(2.0, 4.0) if other == "vllm" else more(),
            ratio(carried[system], carried[other]),
            reason,
        )
    shown = ", ".join(f"{each} {Spread(tuple(bounds[each])).shown('{:,.0f}')}" for each in SYSTEMS)
    yield Row(
        "FluidInfer, figure 12",
        f"{name}: latency bound, vLLM over {SAME_LINK}",
        about(3.0),
        ratio(bounds["vllm"], bounds[SAME_LINK]),
        f"ms: {shown}; a single late token decides it, so it differs much between seeds",
    )


FIGURES: dict[str, Figure] = {f"fluidinfer-{model}": partial(panels, model) for model in OPTS}
