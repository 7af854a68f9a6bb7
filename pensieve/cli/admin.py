"""`pensieve admin` shows what a running daemon holds and why.

It talks to the socket in the data folder, which only its owner may open, or to --address with an admin
token.  It never opens the history itself.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pensieve.cli.flags import add_settings, tls_to, with_settings
from pensieve.config import DATA, REACHING, Resolved
from pensieve.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pensieve.client.admin import Admin
    from pensieve.v1 import admin_pb2 as pb

MIB = 2**20


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "admin",
        help="inspect and control a running daemon",
        description="Look into a running daemon. Without --address it uses the socket in the data "
        "folder.",
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")

    def command(name: str, act: Callable[[Admin, argparse.Namespace], int], text: str) -> Any:
        sub = kinds.add_parser(name, help=text, description=text)
        sub.add_argument("--json", action="store_true", help="print JSON")
        add_settings(sub, REACHING, (DATA,))
        sub.set_defaults(
            run=with_settings(lambda arguments, resolved: _run(act, arguments, resolved))
        )
        return sub

    command("stats", print_stats, "figures of the daemon, once")
    watching = command("watch", watch, "figures of the daemon, again and again")
    watching.add_argument(
        "--interval",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="time between figures (default: 1)",
    )
    listing = command("conversations", conversations, "which conversations hold KV-tokens")
    listing.add_argument(
        "--least-valuable",
        action="store_true",
        help="list what would be evicted first, not the largest",
    )
    listing.add_argument(
        "--limit", type=int, default=20, metavar="N", help="list at most so many (default: 20)"
    )
    for name, act, text in (
        ("explain", explain, "where the chunks of a conversation are, and what happened to them"),
        ("evict", evict, "drop the KV-tokens of a conversation; its history stays"),
    ):
        one = command(name, act, text)
        one.add_argument("conversation", metavar="ID", help="id of the conversation")
        one.add_argument("--tenant", default="", metavar="NAME", help="the tenant that owns it")
        if name == "evict":
            one.add_argument(
                "--to-host", action="store_true", help="move them to the host tier instead"
            )
    command("check", check, "recompute every invariant; exit code 1 if something is wrong")
    command("tenants", tenants, "what each tenant has taken, and its limits")
    command("drain", drain, "take no new turn, finish what runs, and exit")


def _run(
    act: Callable[[Admin, argparse.Namespace], int],
    arguments: argparse.Namespace,
    resolved: Resolved,
) -> int:
    from pensieve.client import Retry
    from pensieve.client.admin import Admin
    from pensieve.service.admin_socket import socket_address, socket_path

    address, data = resolved.values["daemon"], resolved.values["data"]
    if address is None:
        path = socket_path(data)
        if not path.exists():
            raise ConfigError(
                f"no daemon runs on {data} ({path} is missing); see --address and --data"
            )
        address = socket_address(path)
    token, tls = resolved.values["token"], tls_to(address, resolved)
    with Admin(address, token=token, tls=tls, timeout=30.0, retry=Retry(retries=0)) as admin:
        return act(admin, arguments)


def print_stats(admin: Admin, arguments: argparse.Namespace) -> int:
    stats = admin.stats()
    if arguments.json:
        print(json.dumps(_plain(stats)))
    else:
        _print(stats_table(stats))
    return 0


def watch(admin: Admin, arguments: argparse.Namespace) -> int:
    if arguments.json or not sys.stdout.isatty():
        for stats in admin.watch(arguments.interval):
            print(json.dumps(_plain(stats)), flush=True)
        return 0
    from rich.live import Live

    with Live(auto_refresh=False) as live:
        for stats in admin.watch(arguments.interval):
            live.update(stats_table(stats), refresh=True)
    return 0


def stats_table(stats: pb.Stats) -> RenderableType:
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column()
    state = "draining" if stats.draining else "serving" if stats.serving else "not serving"
    table.add_row(
        "daemon",
        f"{state}, up {_seconds(stats.daemon_seconds)}, {stats.engine_restarts} engine restarts",
    )
    for name, tier in (("device", stats.device), ("host", stats.host)):
        size, share = tier.chunk_tokens, tier.pages_used / max(tier.pages, 1)
        table.add_row(
            f"{name} tier",
            f"{share:4.0%} of {tier.pages * size:,} tokens used, "
            f"{tier.pages_clean * size:,} clean, {tier.pages_free * size:,} free",
        )
    table.add_row(
        "turns",
        f"{stats.turns_running} running, {stats.turns_queued} queued, {stats.turns_suspended} suspended",
    )
    table.add_row(
        "conversations", f"{stats.conversations_cached:,} cached of {stats.conversations_stored:,}"
    )
    if stats.more.get("erasure_pending"):
        table.add_row("", "the files still hold text that was deleted")
    _add_service(table, stats.service)
    if stats.more.get("history_problems"):
        table.add_row("", "the history is damaged and takes no changes")
    if stats.more.get("backup_failing"):
        age = _seconds(stats.more["backup_age_seconds"])
        table.add_row("", f"the backup lacks what came in the last {age}")
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
    return table


def _add_service(table: Any, service: pb.Service) -> None:
    known = f"{service.connections:,} of {service.connections_max:,} connections, "
    heard = f"{_seconds(service.heartbeat_age_seconds)} ago"
    table.add_row(
        "service",
        f"{known if service.HasField('connections') else ''}{service.calls:,} calls; engine heard of "
        f"{heard if service.HasField('heartbeat_age_seconds') else 'never'}",
    )
    table.add_row(
        "loop",
        f"late by at most {_milliseconds(service.loop_lag_max_seconds)} in the last minute, "
        f"p99 {_milliseconds(service.loop_lag_p99_seconds)}",
    )
    table.add_row(
        "store",
        f"{service.store_jobs:,} jobs, the oldest {_milliseconds(service.store_oldest_seconds)}; "
        f"commits p50 {_milliseconds(service.commit_p50_seconds)}, "
        f"p99 {_milliseconds(service.commit_p99_seconds)}, "
        f"max {_milliseconds(service.commit_max_seconds)}; "
        f"write-ahead log {service.journal_bytes / MIB:,.1f} MiB",
    )
    if service.audit_lines_lost:
        table.add_row("audit log", f"{service.audit_lines_lost:,} lines could not be written")
    for reason, count in sorted(service.refusals.items()):
        table.add_row("refused", f"{count:,} {reason}")


def conversations(admin: Admin, arguments: argparse.Namespace) -> int:
    found = admin.cached(arguments.least_valuable, arguments.limit)
    if arguments.json:
        print(json.dumps({"conversations": [_plain(each) for each in found]}))
        return 0
    from rich.table import Table

    table = Table("conversation", "tenant", "device", "host", "dropped", "idle", "value")
    for column in table.columns[2:]:
        column.justify = "right"
    for each in found:
        table.add_row(
            each.conversation_id,
            each.tenant,
            *(
                f"{tokens:,}"
                for tokens in (each.device_tokens, each.host_tokens, each.dropped_tokens)
            ),
            "running" if each.running else _seconds(each.idle_seconds),
            "" if each.running else f"{each.retention_value:.3g}",
        )
    _print(table)
    return 0


def explain(admin: Admin, arguments: argparse.Namespace) -> int:
    answer = admin.explain(arguments.conversation, arguments.tenant)
    if arguments.json:
        print(json.dumps(_plain(answer)))
        return 0
    if not answer.runs:
        print("nothing of it is cached; its next turn recomputes the whole history")
    for run in answer.runs:
        last = run.first_chunk + run.num_chunks - 1
        held = f", held by {run.num_holders} conversations" if run.num_holders > 1 else ""
        print(f"chunks {run.first_chunk:5} to {last:5}: {run.place}{held}")
    for event in answer.events:
        print(f"{_seconds(event.seconds_ago)} ago: {event.text}")
    return 0


def evict(admin: Admin, arguments: argparse.Namespace) -> int:
    num_chunks = admin.evict(arguments.conversation, arguments.tenant, arguments.to_host)
    what = "moved" if arguments.to_host else "dropped"
    figures = json.dumps({f"chunks_{what}": num_chunks})
    print(figures if arguments.json else f"{num_chunks} chunks {what}")
    return 0


def check(admin: Admin, arguments: argparse.Namespace) -> int:
    problems = admin.check()
    if arguments.json:
        print(json.dumps({"problems": problems}))
    else:
        print("\n".join(problems) or "nothing is wrong")
    return 1 if problems else 0


def tenants(admin: Admin, arguments: argparse.Namespace) -> int:
    found = admin.tenants()
    if arguments.json:
        print(json.dumps({"tenants": [_plain(each) for each in found]}))
        return 0
    from rich.table import Table

    table = Table(
        *("tenant", "turns", "calls", "stored", "not read"),
        *("tokens saved", "requests saved", "weight"),
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for each in found:
        limits = each.limits
        table.add_row(
            each.name or "(none)",
            _of(each.turns, limits.turns_max),
            _of(each.calls, limits.calls_max),
            _of(each.stored_bytes / MIB, limits.storage_bytes / MIB, "MiB"),
            _of(each.unread_bytes / MIB, limits.unread_bytes / MIB, "MiB"),
            _of(each.tokens_saved, limits.tokens_per_second, "/s")
            if limits.tokens_per_second
            else "",
            _of(each.requests_saved, limits.requests_per_second, "/s")
            if limits.requests_per_second
            else "",
            f"{limits.weight:g}",
        )
    _print(table)
    return 0


def _of(taken: float, most: float, unit: str = "") -> str:
    """What was taken of a limit; 0: there is none."""
    words = f"{taken:,.4g}" + (f" of {most:,.4g}" if most else "")
    return f"{words} {unit}" if unit else words


def drain(admin: Admin, arguments: argparse.Namespace) -> int:
    running = admin.drain()
    print(
        json.dumps({"turns_running": running})
        if arguments.json
        else f"draining; {running} turns run"
    )
    return 0


def _print(what: RenderableType) -> None:
    from pensieve.bench.report import print_whole

    print_whole(what)


def _plain(message: Any) -> dict[str, Any]:
    """With every field, and numbers as numbers."""
    values: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            values[field.name] = dict(value)
        elif field.label == field.LABEL_REPEATED:
            values[field.name] = [_plain(each) for each in value]
        elif field.message_type is not None:
            values[field.name] = _plain(value)
        else:
            values[field.name] = value
    return values


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "0%"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"


def _seconds(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
