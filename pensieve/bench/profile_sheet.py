"""Draws a profile: how far predictions of held-out iterations are off; what chunks cost to recompute."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pensieve.bench.plots import Sheet
from pensieve.bench.profile import Profile


def plot(profile: Profile, path: Path, facts: Sequence[str]) -> None:
    sheet = Sheet("What iterations cost on this machine", [*facts, "lower quartiles"], 4.0)
    unseen = [each for each in profile.points if each.point.held_out]
    panel = sheet.panel(
        "held-out iterations", "off by at most, %", "share of iterations, %", most=100.0
    )
    panel.level("nine of ten", 90.0)
    for kind in dict.fromkeys(each.point.kind for each in unseen):
        errors = sorted(
            100 * abs(profile.cost.iteration_seconds(each.point.spans) / each.seconds - 1)
            for each in unseen
            if each.point.kind == kind
        )
        shares = [100 * (index + 1) / len(errors) for index in range(len(errors))]
        panel.line(kind, [0.0, *errors], [0.0, *shares], marked=False, step=True)
    if profile.cost.chunk_costs is not None:
        tokens, recompute = profile.cost.chunk_costs
        contexts = [context for context, _ in recompute.attention_seconds]
        costs = [1e3 * recompute.chunk_seconds(context) for context in contexts]
        panel = sheet.panel(
            f"to recompute {tokens} tokens", "context, tokens", "ms", swept=contexts
        )
        panel.line("in a full batch", contexts, costs)
        if profile.cost.link_bytes_per_second < float("inf"):
            panel.level("to copy them", 1e3 * profile.cost.copy_seconds(tokens))
    sheet.save(path)
