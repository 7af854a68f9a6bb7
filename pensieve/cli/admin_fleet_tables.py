"""Several daemons in tables, a row for each; as wide as the terminal, or WIDTH where there is none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pensieve.cli.admin_stats import MIB, seconds_text
from pensieve.errors import NotFound

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pensieve.client.fleet import Answer
    from pensieve.client.fleet.holdings import Held, Owner
    from pensieve.v1 import admin_pb2 as pb

WIDTH = 100


def show(what: RenderableType) -> None:
    """On a terminal as wide as that is; elsewhere WIDTH."""
    import sys

    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else WIDTH).print(what)


def silent(found: Sequence[Answer[Any]]) -> Iterator[str]:
    """A line for each replica that did not answer."""
    for each in found:
        if each.error is not None and not isinstance(each.error, NotFound):
            yield f"{each.replica.name} does not answer: {each.reason}"


def stats(found: Sequence[Answer[pb.Stats]]) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from pensieve.client.fleet.totals import total_of
    from pensieve.client.values import STATES

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("replica", overflow="fold")
    table.add_column("state", no_wrap=True)
    for column in ("up", "run", "wait", "cached", "device", "host", "first p99", "gap p99"):
        table.add_column(column, justify="right", no_wrap=True)
    values = [each.value for each in found if each.value is not None]
    for each in found:
        name = Text(each.replica.name)
        if each.value is None:
            table.add_row(name, Text("no answer", style="red"))
            continue
        value = each.value
        waiting = value.turns_queued + value.turns_suspended
        state = STATES.get(value.server.state, "not serving").replace("_", " ")
        table.add_row(
            name,
            state,
            seconds_text(value.daemon_seconds),
            *(f"{number:,}" for number in (value.turns_running, waiting)),
            f"{value.conversations_cached:,}",
            *(_share(tier.pages_used, tier.pages) for tier in (value.device, value.host)),
            *(_milliseconds(times) for times in map(_p99, (value.first_token, value.token_gap))),
        )
    total = total_of(values)
    waiting = total["turns_queued"] + total["turns_suspended"]
    table.add_row(
        Text(f"all ({len(values)} of {len(found)})"),
        f"{total['num_serving']} serving",
        "",
        *(f"{number:,}" for number in (total["turns_running"], waiting)),
        f"{total['conversations_cached']:,}",
        *(_share(tier["tokens_used"], tier["tokens"]) for tier in (total["device"], total["host"])),
        *(
            _milliseconds(times["p99_seconds"] if times["count"] else None)
            for times in (total["first_token"], total["token_gap"])
        ),
        style="bold",
    )
    lines = [*_total_lines(total), *_names_differ(found), *silent(found)]
    return Group(table, *(Text(line) for line in lines))


def _total_lines(total: Mapping[str, Any]) -> Iterator[str]:
    """Of all together, what has no column."""
    cached, stored = total["conversations_cached"], total["conversations_stored"]
    yield f"{cached:,} conversations cached of {stored:,}"
    yield (
        f"tokens: {total['new_tokens']:,} new, {total['device_tokens']:,} on the device, "
        f"{total['host_tokens']:,} on the host, {total['recomputed_tokens']:,} recomputed, "
        f"{total['output_tokens']:,} generated"
    )
    for name, times in (("first token", total["first_token"]), ("token gap", total["token_gap"])):
        if times["count"]:
            shown = ", ".join(
                f"{kind} {1000 * times[f'{kind}_seconds']:,.1f} ms"
                for kind in ("p50", "p95", "p99")
            )
            yield f"{name} of all: {shown} in the last 5 minutes"
    if total["engine_restarts"]:
        yield f"{total['engine_restarts']:,} engine restarts"
    refusals = total["service"]["refusals"]
    if refusals:
        yield "refused: " + ", ".join(f"{count:,} {reason}" for reason, count in refusals.items())
    if total["more"].get("history_problems"):
        yield "the history is damaged and takes no changes"


def _names_differ(found: Sequence[Answer[pb.Stats]]) -> Iterator[str]:
    for each in found:
        own = each.value.replica if each.value is not None else ""
        if own and each.replica.is_named and own != each.replica.name:
            yield f"{each.replica.name} ({each.replica.address}) calls itself {own}"


def conversations(
    found: Sequence[Answer[pb.ListCachedConversationsResponse]], held: Sequence[Held]
) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("conversation", "tenant", "replica"):
        table.add_column(name, overflow="fold")
    for name in ("device", "host", "dropped", "idle", "value"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("also on", overflow="fold")
    for row in held:
        each = row.conversation
        tokens = (each.device_tokens, each.host_tokens, each.dropped_tokens)
        table.add_row(
            *(Text(text) for text in (each.conversation_id, each.tenant, row.replica)),
            *(f"{number:,}" for number in tokens),
            "running" if each.running else seconds_text(each.idle_seconds),
            "" if each.running else f"{each.retention_value:.3g}",
            Text(", ".join(row.also_on)),
        )
    return Group(table, *(Text(line) for line in silent(found)))


def explained(
    conversation_id: str,
    found: Sequence[Answer[pb.ExplainConversationResponse]],
    owner: Owner | None,
) -> Iterator[str]:
    from pensieve.client.fleet.holdings import holds_kv, num_histories

    tenants = {each.value.tenant for each in found if each.value is not None}
    whose = "".join(f" of tenant {name}" for name in sorted(tenants) if name)
    who = f"{owner.name} serves it: {owner.known_by}" if owner else "nobody knows who serves it"
    if owner is None and (count := num_histories(found)) > 1:
        who = f"there are {count} of this id, in histories of their own"
    yield f"conversation {conversation_id}{whose}: {who}"
    for each in found:
        if each.value is None:
            continue
        value = each.value
        is_stale = owner is not None and owner.name != each.replica.name and holds_kv(value)
        running = ", a turn of it runs" if value.running else ""
        if not value.runs:
            yield f"{each.replica.name}: nothing of it is cached{running}"
        else:
            yield f"{each.replica.name}:{' stale,' * is_stale} KV is cached{running}"
        for run in value.runs:
            last = run.first_chunk + run.num_chunks - 1
            shared = f", held by {run.num_holders} conversations" if run.num_holders > 1 else ""
            yield f"  chunks {run.first_chunk:5} to {last:5}: {run.place}{shared}"
        for event in value.events:
            yield f"  {seconds_text(event.seconds_ago)} ago: {event.text}"
    unknown = [each.replica.name for each in found if isinstance(each.error, NotFound)]
    if unknown:
        yield f"not known to {', '.join(unknown)}"
    yield from silent(found)


def tenants(
    found: Sequence[Answer[pb.ListTenantsResponse]], total: Sequence[Mapping[str, Any]]
) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("tenant", overflow="fold")
    for name in ("turns", "calls", "stored", "prefixes", "not read"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("turns on", overflow="fold")
    for each in total:
        on = [
            f"{answer.replica.name} {tenant.turns}"
            for answer in found
            for tenant in (answer.value.tenants if answer.value is not None else ())
            if tenant.name == each["name"] and tenant.turns
        ]
        table.add_row(
            Text(each["name"] or "(none)"),
            f"{each['turns']:,}",
            f"{each['calls']:,}",
            f"{each['stored_bytes'] / MIB:,.4g} MiB",
            f"{each['prefixes']:,}",
            f"{each['unread_bytes'] / MIB:,.4g} MiB",
            Text(", ".join(on)),
        )
    return Group(table, *(Text(line) for line in silent(found)))


def _p99(times: pb.Latency) -> float | None:
    return times.p99_seconds if times.count else None


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else ""


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:,.1f} ms"
