"""Show the figures of a daemon as a table (`pensieve admin stats` and `watch`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pensieve.v1 import admin_pb2 as pb

MIB = 2**20
TENANTS_SHOWN = 8


def stats_table(stats: pb.Stats) -> RenderableType:
    from rich.table import Table

    from pensieve.client.values import STATES

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column()
    state = "draining" if stats.draining else "serving" if stats.serving else "not serving"
    state = STATES.get(stats.server.state, state).replace("_", " ")
    table.add_row(
        "daemon",
        f"{state}, up {seconds_text(stats.daemon_seconds)}, {stats.engine_restarts} engine restarts",
    )
    server = stats.server
    table.add_row("model", " ".join(filter(None, (server.model, server.dtype, server.device))))
    for name, tier in (("device", stats.device), ("host", stats.host)):
        size, share = tier.chunk_tokens, tier.pages_used / max(tier.pages, 1)
        table.add_row(
            f"{name} tier",
            f"{share:4.0%} of {tier.pages * size:,} tokens used, "
            + (f"{tier.pages_clean * size:,} also on the host, " if name == "device" else "")
            + f"{tier.pages_free * size:,} free",
        )
    table.add_row(
        "turns",
        f"{stats.turns_running} running, {stats.turns_queued} queued, {stats.turns_suspended} suspended",
    )
    for name, times in (("first token", stats.first_token), ("token gap", stats.token_gap)):
        if times.count:
            table.add_row(name, _latency(times))
    _add_objectives(table, stats.more)
    table.add_row(
        "conversations", f"{stats.conversations_cached:,} cached of {stats.conversations_stored:,}"
    )
    if stats.more.get("erasure_pending"):
        table.add_row("", "deleted text is not erased from the files yet")
    _add_service(table, stats.service)
    if stats.more.get("history_problems"):
        table.add_row("", "the history is damaged and read-only")
    if stats.more.get("disk_full"):
        table.add_row(
            "", "the disk of the history is full: conversations can only be read and deleted"
        )
    if stats.more.get("backup_failing"):
        age = seconds_text(stats.more["backup_age_seconds"])
        table.add_row("", f"the backup fails: changes of the last {age} are not backed up")
    history = stats.device_tokens + stats.host_tokens + stats.recomputed_tokens
    table.add_row(
        "history from",
        f"device {_share(stats.device_tokens, history)}, host {_share(stats.host_tokens, history)}, "
        f"recomputed {_share(stats.recomputed_tokens, history)} of {history:,} tokens",
    )
    table.add_row("new and output", f"{stats.new_tokens:,} and {stats.output_tokens:,} tokens")
    table.add_row(
        "swapped",
        f"{stats.bytes_swapped_out / MIB:,.1f} MiB out, {stats.bytes_swapped_in / MIB:,.1f} MiB in",
    )
    table.add_row(
        "iterations",
        f"{stats.iterations:,}, {stats.iterations_per_second:,.1f}/s, "
        f"{stats.tokens_per_iteration:.1f} tokens each, {stats.idle_tokens:,} tokens discarded",
    )
    _add_work(table, stats.more)
    return table


def _add_objectives(table: Any, more: Mapping[str, float]) -> None:
    """Add rows that show how well the engine met its objectives."""
    for name, kind in (("tbt", "tokens"), ("ttft", "first tokens")):
        if (objective := more.get(f"{name}_objective_seconds", 0.0)) and more[f"{name}_count"]:
            table.add_row(
                f"objective {name}",
                f"{more[f'{name}_attained']:.1%} of {kind} within {_milliseconds(objective)}, "
                f"p99 {_milliseconds(more[f'{name}_p99_seconds'])} in the last 5 minutes",
            )
    refused = more.get("refused_for_ttft", 0)
    if refused or more.get("queue_wait_seconds"):
        waits = _milliseconds(more["queue_wait_seconds"])
        table.add_row(
            "",
            f"a new turn would wait {waits}; {refused:,.0f} turns were refused because of the wait",
        )
    if stalls := more.get("stalls", 0):
        table.add_row("stalls", f"{stalls:,.0f} long gaps between tokens since the engine started")
    if more.get("suspensions") or more.get("preemptions"):
        table.add_row(
            "suspended",
            f"{more['suspensions']:,.0f} times, {more['preemptions']:,.0f} for turns with priority; "
            f"p50 {_milliseconds(more['suspended_p50_seconds'])}, "
            f"p99 {_milliseconds(more['suspended_p99_seconds'])} in the last 5 minutes",
        )


def _add_work(table: Any, more: Mapping[str, float]) -> None:
    """Add rows about iteration times, the token budget, and the tenants' tokens."""
    if more.get("iterations_predicted"):
        table.add_row(
            "predicted",
            f"iteration times, with an error of {more['iteration_error_p50']:.0%} (median) and "
            f"{more['iteration_error_p90']:.0%} (p90)",
        )
        table.add_row(
            "budget",
            f"{more['token_budget_used']:.0%} of the token budget used; wasted compute "
            f"{more['idle_share']:.1%}, {more['rows_padded']:,.0f} padded rows",
        )
    prefix = "tenant_tokens."
    tokens_by_tenant = {
        name.removeprefix(prefix): num
        for name, num in more.items()
        if name.startswith(prefix) and num
    }
    if len(tokens_by_tenant) > 1:
        total = sum(tokens_by_tenant.values())
        largest = sorted(tokens_by_tenant.items(), key=lambda each: (-each[1], each[0]))[
            :TENANTS_SHOWN
        ]
        shown = ", ".join(f"{name or '(none)'} {_share(num, total)}" for name, num in largest)
        others = (
            f" and {len(tokens_by_tenant) - len(largest)} more"
            if len(tokens_by_tenant) > len(largest)
            else ""
        )
        table.add_row("tenants", f"{shown}{others} of {total:,.0f} tokens computed")


def _add_service(table: Any, service: pb.Service) -> None:
    connections = f"{service.connections:,} of {service.connections_max:,} connections, "
    heartbeat = f"{seconds_text(service.heartbeat_age_seconds)} ago"
    table.add_row(
        "service",
        f"{connections if service.HasField('connections') else ''}{service.calls:,} calls in progress; "
        f"engine heartbeat {heartbeat if service.HasField('heartbeat_age_seconds') else 'never'}",
    )
    table.add_row(
        "loop",
        f"late by at most {_milliseconds(service.loop_lag_max_seconds)} in the last minute, "
        f"p99 {_milliseconds(service.loop_lag_p99_seconds)}",
    )
    table.add_row(
        "store",
        f"{service.store_jobs:,} unfinished calls, "
        f"the oldest for {_milliseconds(service.store_oldest_seconds)}; "
        f"commits p50 {_milliseconds(service.commit_p50_seconds)}, "
        f"p99 {_milliseconds(service.commit_p99_seconds)}, "
        f"max {_milliseconds(service.commit_max_seconds)}; "
        f"write-ahead log {service.journal_bytes / MIB:,.1f} MiB",
    )
    if service.audit_lines_lost:
        table.add_row("audit log", f"{service.audit_lines_lost:,} lines could not be written")
    for reason, count in sorted(service.refusals.items()):
        table.add_row("refused", f"{count:,} {reason}")


def _latency(times: pb.Latency) -> str:
    shares = {"p50": times.p50_seconds, "p95": times.p95_seconds, "p99": times.p99_seconds}
    shown = ", ".join(f"{name} {_milliseconds(seconds)}" for name, seconds in shares.items())
    return f"{shown} in the last 5 minutes"


def _share(part: float, total: float) -> str:
    return f"{part / total:.0%}" if total else "0%"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"


def seconds_text(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
