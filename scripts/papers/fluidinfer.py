"""Figures 11 and 12 of the FluidInfer paper: nine panels, three OPT models on three machines.

The load is single requests, the first rounds of conversations. The systems are those of
scripts/measurements/servers.py. `streamed` is our scheduler with turns whose KV stays on the host
(core/streaming.py). Each panel has the throughput while requests wait, and the latency bound at the load that
fills the device. The bound is the longest time between two tokens of one reply. It varies widely between
loads, so the table has its range.

The paper assumes that KV can be copied as fast as attention reads it. `fast link` is such a link. The links
of the data sheets are a few dozen times slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from pensieve.sim.cost import HARDWARE, MODELS, CostModel, device_tokens_of, host_tokens_of
from scripts.measurements.servers import (
    MEAN_CONTEXT,
    Figures,
    ServingSetting,
    figures_of,
    requests_of,
    simulated_figures,
    streamed_run,
)
from scripts.papers.claims import about, more, no_claim
from scripts.papers.rows import Extent, Figure, Row, Spread, ratio

OPTS = ("opt-125m", "opt-1.3b", "opt-6.7b")
MACHINES = {
    "one RTX 4090": HARDWARE["rtx-4090"],
    "four RTX 4090": replace(HARDWARE["rtx-4090"], devices=4),
    "four A100": replace(HARDWARE["a100-40gb"], devices=4),
}
STREAMED, FAST_LINK = "streamed", "streamed, fast link"
OTHERS = {"vllm": "vLLM", "orca": "Orca", "fastserve": "FastServe"}
REQUESTS_MIN = 400
AT_ONCE = 1e6  # requests per second: all requests arrive at the start


def panel(model: str, machine: str, extent: Extent, kv_tokens: int | None = None) -> Iterator[Row]:
    """One panel of each figure. `kv_tokens`: the room for KV; None: what the weights leave."""
    preset, hardware = MODELS[model], MACHINES[machine]
    setting = ServingSetting(
        CostModel.of(preset, hardware),
        kv_tokens or device_tokens_of(preset, hardware),
        host_tokens_of(preset, hardware),
    )
    name = f"{model}, {machine}" + (f", {kv_tokens:,} tokens of KV" if kv_tokens else "")
    # More requests than may run at once: otherwise the limits would not matter.
    num_requests = max(int(extent.panel_fills * setting.turns_held), REQUESTS_MIN)
    copies: list[bool] = []

    def runs(rate: float, num_seeds: int, *others: str) -> dict[str, list[Figures]]:
        found: dict[str, list[Figures]] = {each: [] for each in (STREAMED, FAST_LINK, *others)}
        for seed in range(num_seeds):
            load = partial(requests_of, rate, num_requests, seed)
            counts, copied = streamed_run(_with_fast_link(setting), load())
            copies.append(copied)
            found[FAST_LINK].append(figures_of(counts))
            if copied:
                counts, _ = streamed_run(setting, load())
            found[STREAMED].append(figures_of(counts))
            for each in others:
                found[each].append(figures_of(simulated_figures(each, setting, load())))
        return found

    at_once = runs(AT_ONCE, extent.seeds, *OTHERS)
    speeds = {key: Spread(each.tokens_per_second for each in some) for key, some in at_once.items()}
    shown = ", ".join(f"{key} {each.median:,.0f}" for key, each in speeds.items())
    turns, room = setting.turns_held, setting.device_tokens // MEAN_CONTEXT
    whole = 1e3 * setting.cost.decode_seconds(turns, MEAN_CONTEXT)
    reading = 1e3 * setting.cost.attention_seconds_per_key * turns * MEAN_CONTEXT
    reason = (
        f"tokens/s: {shown}; the device holds {room:,} of {num_requests:,} requests; an iteration of "
        f"{turns:,} takes {whole:.1f} ms, of which {reading:.1f} ms read KV, which grows with the requests"
        + (f"; {turns:,} is our limit" if turns < room else "")
        + ("" if any(copies) else "; no turn was streamed, and no KV was copied")
    )
    for system in (FAST_LINK, STREAMED):
        what = f"{name}: throughput, {system} over vLLM"
        yield Row("figure 11", what, about(2.0, 4.0), ratio(speeds[system], speeds["vllm"]), reason)
    for other in ("orca", "fastserve"):  # the paper: this gain is larger than the gain over vLLM
        what = f"{name}: gain of throughput over {OTHERS[other]}, relative to the gain over vLLM"
        yield Row("figure 11", what, more(), ratio(speeds["vllm"], speeds[other]), reason)
    loaded = runs(setting.rate_held, extent.bound_seeds, "vllm")
    bounds = {key: Spread(each.bound for each in some) for key, some in loaded.items()}
    what = f"{name}: latency bound, vLLM over {FAST_LINK}"
    yield Row("figure 12", what, about(3.0), ratio(bounds["vllm"], bounds[FAST_LINK])).because(
        "a single late token decides each bound, so the ratio varies widely between loads"
    )
    for system, found in bounds.items():
        what = f"{name}: latency bound, {OTHERS.get(system, system)}"
        yield Row("figure 12", what, no_claim("{:,.0f} ms"), found).because(
            f"the longest gap between two tokens of a reply, in each of {extent.bound_seeds} loads"
        )


def _with_fast_link(setting: ServingSetting) -> ServingSetting:
    cost = setting.cost
    link = cost.kv_bytes_per_token / cost.attention_seconds_per_key
    return replace(setting, cost=replace(cost, link_bytes_per_second=link))


FIGURES: dict[str, Figure] = {
    f"fluidinfer-{model}-{machine.replace(' ', '-').lower()}": partial(panel, model, machine)
    for model in OPTS
    for machine in MACHINES
}
# The paper counts at most 16 requests for this panel. OPT's longest context has 2,048 tokens.
FIGURES["fluidinfer-16-requests"] = partial(panel, "opt-6.7b", "four RTX 4090", kv_tokens=16 * 2048)
