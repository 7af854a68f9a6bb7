"""Combine the figures of several daemons.

    counts                are added (turns, tokens, bytes; pages as tokens, because page sizes differ)
    quantiles             are computed from the summed buckets of `Latency`
    shares and means      are ratios of sums, if the numerator and the denominator are known
    worst values          are maxima (loop lag, age of a backup)
    counts of a history   are counted once, because all replicas of a history report the same number
    other figures         appear only per replica: quantiles without buckets, differing objectives, uptimes

Figures that this version does not know are added, unless their names end with an entry of NOT_ADDITIVE, such
as `_p99` or `_share`. Those are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pensieve.v1 import admin_pb2 as pb

SUMS = (
    *("turns_queued", "turns_running", "turns_suspended", "conversations_cached"),
    *("new_tokens", "device_tokens", "host_tokens", "recomputed_tokens", "output_tokens"),
    *("bytes_swapped_out", "bytes_swapped_in", "iterations", "iterations_per_second"),
    *("idle_tokens", "engine_restarts"),
)
SERVICE_SUMS = ("store_jobs", "commits", "calls", "connections_max", "audit_lines_lost")
SERVICE_WORST = (
    *("loop_lag_max_seconds", "store_oldest_seconds", "commit_max_seconds"),
    "heartbeat_age_seconds",
)
WORST = (
    *("queue_wait_seconds", "heartbeat_age_seconds", "backup_age_seconds", "backup_failing"),
    *("erasure_pending", "ranges_repaired_at_once_max"),
)
PER_HISTORY = ("history_problems", "scrub_passes")
NOT_ADDITIVE = ("_p50", "_p90", "_p95", "_p99", "_seconds", "_share", "_used", "_attained")
# Not added: an uptime, and a mean that is computed from its numerator and denominator.
NOT_SUMMED = ("seconds", "tokens_per_iteration")
QUANTILES = (0.5, 0.95, 0.99)


def total_of(found: Sequence[pb.Stats]) -> dict[str, Any]:
    """Return the combined figures as JSON values."""
    sums: dict[str, Any] = {name: sum(getattr(each, name) for each in found) for name in SUMS}
    computed = sum(each.more.get("tokens_computed", 0.0) for each in found)
    return {
        "num_serving": sum(each.serving for each in found),
        "num_draining": sum(each.draining for each in found),
        "device": _tier([each.device for each in found]),
        "host": _tier([each.host for each in found]),
        **sums,
        "conversations_stored": once_per_history(
            (each.history, each.conversations_stored) for each in found
        ),
        "tokens_per_iteration": computed / sums["iterations"] if sums["iterations"] else 0.0,
        "first_token": latency_of([each.first_token for each in found]),
        "token_gap": latency_of([each.token_gap for each in found]),
        "service": _service(found),
        "more": _more(found),
    }


def latency_of(found: Iterable[pb.Latency]) -> dict[str, float]:
    """Return the quantiles over the samples of all daemons."""
    counts: dict[float, int] = {}
    for each in found:
        for bucket in each.buckets:
            counts[bucket.seconds] = counts.get(bucket.seconds, 0) + bucket.count
    total = sum(counts.values())
    figures: dict[str, float] = {"count": total}
    for share in QUANTILES:
        figures[f"p{share * 100:.0f}_seconds"] = _quantile(counts, total, share)
    return figures


def _quantile(counts: Mapping[float, int], total: int, share: float) -> float:
    rank, cumulative = max(math.ceil(share * total), 1), 0
    for seconds in sorted(counts):
        cumulative += counts[seconds]
        if cumulative >= rank:
            return seconds
    return 0.0


def once_per_history(counts: Iterable[tuple[str, int]]) -> int:
    """Sum counts of (history, count), with only the largest count of each history.

    The counts of a history may differ, because they are from different moments. Each count with an empty
    history name is added.
    """
    shared: dict[str, int] = {}
    own = 0
    for history, count in counts:
        if history:
            shared[history] = max(shared.get(history, 0), count)
        else:
            own += count
    return own + sum(shared.values())


def tenants_of(found: Sequence[pb.ListTenantsResponse]) -> list[dict[str, Any]]:
    """Return the total usage of each tenant, by name.

    Limits, and a tenant's unused allowance under its rate limits, apply to each daemon separately. They
    appear only in the rows of the replicas.
    """
    by_name: dict[str, list[tuple[str, pb.Tenant]]] = {}
    for each in found:
        for tenant in each.tenants:
            by_name.setdefault(tenant.name, []).append((each.history, tenant))
    totals = []
    for name, reporting in sorted(by_name.items()):
        figures: dict[str, Any] = {"name": name}
        for field in ("turns", "calls", "unread_bytes"):
            figures[field] = sum(getattr(tenant, field) for _, tenant in reporting)
        for field in ("stored_bytes", "prefixes"):
            figures[field] = once_per_history(
                [(history, getattr(tenant, field)) for history, tenant in reporting]
            )
        totals.append(figures)
    return totals


def _tier(found: Sequence[pb.Tier]) -> dict[str, int]:
    """Return a tier's size in tokens, because page sizes differ between daemons."""
    return {
        name: sum(getattr(each, pages) * each.chunk_tokens for each in found)
        for name, pages in (
            ("tokens", "pages"),
            ("tokens_used", "pages_used"),
            ("tokens_clean", "pages_clean"),
            ("tokens_free", "pages_free"),
        )
    }


def _service(found: Sequence[pb.Stats]) -> dict[str, Any]:
    services = [each.service for each in found]
    refusals: dict[str, int] = {}
    for each in services:
        for reason, count in each.refusals.items():
            refusals[reason] = refusals.get(reason, 0) + count
    return {
        **{name: sum(getattr(each, name) for each in services) for name in SERVICE_SUMS},
        "connections": sum(each.connections for each in services),
        **{
            name: max((getattr(each, name) for each in services), default=0.0)
            for name in SERVICE_WORST
        },
        "journal_bytes": once_per_history(
            (each.history, each.service.journal_bytes) for each in found
        ),
        "refusals": dict(sorted(refusals.items())),
        "erasure_pending": any(each.erasure_pending for each in services),
    }


def _more(found: Sequence[pb.Stats]) -> dict[str, float]:
    """Combine the figures in `more`, each over the daemons that report it."""
    totals: dict[str, float] = {}
    for name in sorted({name for each in found for name in each.more}):
        reporting = [each for each in found if name in each.more]
        values = [each.more[name] for each in reporting]
        if name.startswith("tenant_tokens."):  # even if the tenant's name ends with `_share`
            totals[name] = sum(values)
        elif name in WORST:
            totals[name] = max(values)
        elif name in PER_HISTORY:
            totals[name] = once_per_history(
                (each.history, int(each.more[name])) for each in reporting
            )
        elif name.endswith("_objective_seconds"):
            if len(set(values)) == 1:
                totals[name] = values[0]
        elif name not in NOT_SUMMED and not name.endswith(NOT_ADDITIVE):
            totals[name] = sum(values)
    for kind in ("tbt", "ttft"):
        share = _share_attained(found, kind)
        if share is not None:
            totals[f"{kind}_attained"] = share
    computed = totals.get("tokens_computed", 0.0) + totals.get("rows_padded", 0.0)
    if computed:
        idle = totals.get("tokens_idle", 0.0) + totals.get("rows_padded", 0.0)
        totals["idle_share"] = idle / computed
    if totals.get("iterations"):
        totals["tokens_per_iteration"] = totals.get("tokens_computed", 0.0) / totals["iterations"]
    return totals


def _share_attained(found: Sequence[pb.Stats], kind: str) -> float | None:
    """Return the share of samples within the objective. None if the daemons have different objectives."""
    name, count = f"{kind}_attained", f"{kind}_count"
    reporting = [each for each in found if name in each.more]
    if len({each.more[f"{kind}_objective_seconds"] for each in reporting}) != 1:
        return None
    total = sum(each.more[count] for each in reporting)
    return sum(each.more[name] * each.more[count] for each in reporting) / total if total else 1.0
