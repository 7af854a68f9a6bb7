"""`pensieve admin` for several daemons, given by --replicas or by several addresses.

Each command asks all replicas concurrently, and shows a row for each replica and a total. If a replica does
not answer, its row shows the reason, and the exit code is PARTIAL. Commands that change something, or that
make sense only for one daemon, need --replica."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from pensieve.cli.admin_stats import MIB, seconds_text
from pensieve.cli.plain_values import plain
from pensieve.cli.reaching import address_of
from pensieve.config import MOVED_HISTORY, Resolved
from pensieve.errors import InvalidArgument, NotFound

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pensieve.client.fleet import Discovery, Fleet, Replica, ReplicaAnswer
    from pensieve.client.fleet.holdings import HeldConversation, ServingReplica
    from pensieve.v1 import admin_pb2 as pb

ALL = "all"  # value of --replicas
PARTIAL = 7  # exit code if some replicas did not answer
WAIT_SECONDS = {"metrics": 3.0, "check": 60.0, "conversations": 30.0, "explain": 30.0}
OTHERS_SECONDS = 5.0  # for the other commands
WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the flags for several daemons to the command `name`."""
    parser.add_argument(
        "--replica", default="", metavar="NAME", help="ask only this replica of several"
    )
    if name not in HANDLERS:
        return
    seconds = WAIT_SECONDS.get(name, OTHERS_SECONDS)
    parser.add_argument(
        "--wait",
        type=float,
        default=seconds,
        metavar="SECONDS",
        help=f"how long to wait for each replica (default: {seconds:g})",
    )
    if name == "metrics":
        parser.add_argument(
            "--listen",
            default="",
            metavar="HOST:PORT",
            help="serve the metrics of all replicas for Prometheus, until Ctrl-C (port 0: any free port)",
        )
        parser.add_argument(
            "--insecure", action="store_true", help="let other machines reach --listen"
        )


def discovery_of(resolved: Resolved) -> Discovery | None:
    """Return the discovery of the given replicas, or None if the command is for one daemon."""
    from pensieve.client.fleet import FixedReplicas, SharedReplicas, replicas_of

    replicas, address = resolved.settings.replicas, resolved.settings.daemon
    if replicas and replicas.startswith(("history://", "historys://")):
        raise InvalidArgument("--replicas", f"names a history service: {MOVED_HISTORY}")
    if replicas == ALL:
        known_address, tls = address_of(resolved)
        return SharedReplicas(known_address, token=resolved.settings.token, tls=tls)
    if replicas and resolved.sources["daemon"] == "flag":
        raise InvalidArgument(
            "--address", "cannot be combined with --replicas, which already names the daemons"
        )
    if replicas:
        return FixedReplicas(replicas_of(replicas, "--replicas"))
    if address and "," in address:
        return FixedReplicas(replicas_of(address, "--address"))
    return None


def replica_named(discovery: Discovery, name: str) -> Replica:
    replicas = asyncio.run(list_replicas(discovery))
    for each in replicas:
        if each.name == name:
            return each
    raise NotFound(f"there is no replica {name!r}; there are {_names(replicas)}")


def refuse_fleet_flags(arguments: argparse.Namespace) -> None:
    """Raise InvalidArgument for flags that have no effect with one daemon."""
    for flag in ("replica", "listen"):
        if getattr(arguments, flag, ""):
            raise InvalidArgument(f"--{flag}", "needs several daemons: pass --replicas NAME=A,…")


async def list_replicas(discovery: Discovery) -> Sequence[Replica]:
    return await discovery.list_replicas()


def run(arguments: argparse.Namespace, resolved: Resolved, discovery: Discovery) -> int:
    handler = HANDLERS.get(arguments.kind)
    if handler is None:
        replicas = asyncio.run(list_replicas(discovery))
        raise InvalidArgument(
            "--replica", f"is missing: {arguments.kind} works on one of {_names(replicas)}"
        )
    if not 0 < arguments.wait <= 3600:
        raise InvalidArgument("--wait", "must be a number of seconds above 0, and at most 3600")

    async def go() -> int:
        from pensieve.client.fleet import Fleet

        tls = resolved.settings.tls_ca or bool(resolved.settings.tls)
        token = resolved.settings.token
        async with Fleet(discovery, token=token, tls=tls, seconds=arguments.wait) as fleet:
            return await handler(fleet, arguments)

    return asyncio.run(go())


async def stats(fleet: Fleet, arguments: argparse.Namespace) -> int:
    found = await fleet.stats()
    if arguments.json:
        print(json.dumps(_stats_values(found)))
    else:
        show(stats_table(found))
    return _exit_code(found)


async def watch(fleet: Fleet, arguments: argparse.Namespace) -> int:
    if not 0.1 <= arguments.interval <= 3600.0:
        raise InvalidArgument("--interval", "must lie in 0.1..3600")
    async with aclosing(fleet.watch(arguments.interval)) as snapshots:
        if arguments.json or not sys.stdout.isatty():
            async for found in snapshots:
                print(json.dumps(_stats_values(found)), flush=True)
            return 0
        from rich.live import Live

        with Live(auto_refresh=False) as live:
            async for found in snapshots:
                live.update(stats_table(found), refresh=True)
    return 0


async def metrics(fleet: Fleet, arguments: argparse.Namespace) -> int:
    if arguments.listen:
        from pensieve.launch.fleet_metrics import serve_until_cancelled

        def say(address: str) -> None:
            print(f"metrics of all replicas at http://{address}/metrics", flush=True)

        await serve_until_cancelled(fleet, arguments.listen, arguments.insecure, say)
        return 0
    from pensieve.client.fleet.exposition import merged

    found = await fleet.metrics()
    text = merged((answer.replica, answer.value) for answer in found)
    if arguments.json:
        print(json.dumps({"replicas": _rows(found), "partial": _is_partial(found), "text": text}))
    else:
        print(text, end="")
        for line in no_answer_lines(found):
            print(line, file=sys.stderr)
    return _exit_code(found)


async def conversations(fleet: Fleet, arguments: argparse.Namespace) -> int:
    from pensieve.client.fleet.holdings import held_of

    if not 1 <= arguments.limit <= 1000:
        raise InvalidArgument("--limit", "must lie in 1..1000")
    found = await fleet.cached(arguments.least_valuable)
    held = held_of(found, arguments.least_valuable, arguments.limit)
    if arguments.json:
        listed = [
            {"replica": each.replica, **plain(each.conversation), "also_on": list(each.also_on)}
            for each in held
        ]
        head = {"replicas": _rows(found), "partial": _is_partial(found)}
        print(json.dumps({**head, "conversations": listed}))
    else:
        show(conversations_table(found, held))
    return _exit_code(found)


async def explain(fleet: Fleet, arguments: argparse.Namespace) -> int:
    from pensieve.client.fleet.holdings import holds_kv, owner_of

    found = await fleet.explain(arguments.conversation, arguments.tenant)
    for answer in found:
        if isinstance(answer.error, InvalidArgument):  # --tenant is missing
            raise answer.error
    not_found = [answer.error for answer in found if isinstance(answer.error, NotFound)]
    if not_found and len(not_found) == len(found):
        raise not_found[0]
    owner = owner_of(found)
    if arguments.json:
        rows = []
        for answer, row in zip(found, _rows(found), strict=True):
            is_known = answer.value is not None
            row["answered"] = is_known or isinstance(answer.error, NotFound)
            row["holds_kv"] = answer.value is not None and holds_kv(answer.value)
            row["conversation"] = plain(answer.value) if answer.value is not None else None
            rows.append(row)
        owner_fields = (
            {"name": owner.name, "known_by": owner.known_by.name.lower()} if owner else None
        )
        print(json.dumps({"replicas": rows, "partial": _is_partial(found), "owner": owner_fields}))
    else:
        print("\n".join(explain_lines(arguments.conversation, found, owner)))
    return _exit_code(found)


async def check(fleet: Fleet, arguments: argparse.Namespace) -> int:
    found = await fleet.check()
    problems = [(each.replica.name, text) for each in found for text in each.value or ()]
    if arguments.json:
        rows = [
            {**row, "problems": answer.value}
            for answer, row in zip(found, _rows(found), strict=True)
        ]
        print(json.dumps({"replicas": rows, "partial": _is_partial(found)}))
    else:
        for name, text in problems:
            print(f"{name}: {text}")
        healthy = [each.replica.name for each in found if each.value == []]
        if healthy:
            print(f"nothing is wrong on {', '.join(healthy)}")
        print("".join(f"{line}\n" for line in no_answer_lines(found)), end="")
    return 1 if problems else _exit_code(found)


async def tenants(fleet: Fleet, arguments: argparse.Namespace) -> int:
    from pensieve.client.fleet.totals import tenants_of

    found = await fleet.tenants()
    total = tenants_of([each.value for each in found if each.value is not None])
    if arguments.json:
        rows = []
        for answer, row in zip(found, _rows(found), strict=True):
            value = answer.value
            row["tenants"] = [plain(each) for each in value.tenants] if value is not None else None
            rows.append(row)
        print(json.dumps({"replicas": rows, "partial": _is_partial(found), "tenants": total}))
    else:
        show(tenants_table(found, total))
    return _exit_code(found)


Handler = Callable[["Fleet", argparse.Namespace], Awaitable[int]]
HANDLERS: dict[str, Handler] = {
    "stats": stats,
    "watch": watch,
    "metrics": metrics,
    "conversations": conversations,
    "explain": explain,
    "check": check,
    "tenants": tenants,
}


def _names(replicas: Sequence[Replica]) -> str:
    return ", ".join(each.name for each in replicas)


def _rows(found: Sequence[ReplicaAnswer[Any]]) -> list[dict[str, Any]]:
    """Return the fields that JSON output has for each replica in all commands."""
    return [
        {
            "name": each.replica.name,
            "address": each.replica.address,
            "metrics_address": each.replica.metrics_address,
            "state": each.replica.state,
            "answered": each.error is None,
            "error": each.error.reason if each.error is not None else "",
            "reason": each.reason,
        }
        for each in found
    ]


def _stats_values(found: Sequence[ReplicaAnswer[Any]]) -> dict[str, Any]:
    from pensieve.client.fleet.totals import total_of

    rows = []
    for answer, row in zip(found, _rows(found), strict=True):
        row["stats"] = plain(answer.value) if answer.value is not None else None
        rows.append(row)
    total = total_of([each.value for each in found if each.value is not None])
    return {"replicas": rows, "partial": _is_partial(found), "total": total}


def _is_partial(found: Sequence[ReplicaAnswer[Any]]) -> bool:
    """Return whether a replica did not answer. NotFound counts as an answer."""
    return any(each.error is not None and not isinstance(each.error, NotFound) for each in found)


def _exit_code(found: Sequence[ReplicaAnswer[Any]]) -> int:
    return PARTIAL if _is_partial(found) else 0


def show(table: RenderableType) -> None:
    """Print a table with the width of the terminal. Without a terminal, it has WIDTH columns."""
    import sys

    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)


def no_answer_lines(found: Sequence[ReplicaAnswer[Any]]) -> Iterator[str]:
    """Yield a line for each replica that did not answer."""
    for each in found:
        if each.error is not None and not isinstance(each.error, NotFound):
            yield f"{each.replica.name} does not answer: {each.reason}"


def stats_table(found: Sequence[ReplicaAnswer[pb.Stats]]) -> RenderableType:
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
    lines = [*_total_lines(total), *_name_mismatch_lines(found), *no_answer_lines(found)]
    return Group(table, *(Text(line) for line in lines))


def _total_lines(total: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each total that has no column in the table."""
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
        yield "the history is damaged and read-only"


def _name_mismatch_lines(found: Sequence[ReplicaAnswer[pb.Stats]]) -> Iterator[str]:
    for each in found:
        own_name = each.value.replica if each.value is not None else ""
        if own_name and each.replica.is_named and own_name != each.replica.name:
            yield f"{each.replica.name} ({each.replica.address}) calls itself {own_name}"


def conversations_table(
    found: Sequence[ReplicaAnswer[pb.ListCachedConversationsResponse]],
    held: Sequence[HeldConversation],
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
    return Group(table, *(Text(line) for line in no_answer_lines(found)))


def explain_lines(
    conversation_id: str,
    found: Sequence[ReplicaAnswer[pb.ExplainConversationResponse]],
    owner: ServingReplica | None,
) -> Iterator[str]:
    from pensieve.client.fleet.holdings import holds_kv, num_histories

    tenants = {each.value.tenant for each in found if each.value is not None}
    tenant_text = "".join(f" of tenant {name}" for name in sorted(tenants) if name)
    owner_text = f"{owner.name} serves it: {owner.known_by}" if owner else "its owner is unknown"
    if owner is None and (count := num_histories(found)) > 1:
        owner_text = f"there are {count} conversations with this id, in separate histories"
    yield f"conversation {conversation_id}{tenant_text}: {owner_text}"
    for each in found:
        if each.value is None:
            continue
        value = each.value
        is_stale = owner is not None and owner.name != each.replica.name and holds_kv(value)
        running = ", a turn is running" if value.running else ""
        if not value.runs:
            yield f"{each.replica.name}: nothing is cached{running}"
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
        yield f"these replicas do not have this conversation: {', '.join(unknown)}"
    yield from no_answer_lines(found)


def tenants_table(
    found: Sequence[ReplicaAnswer[pb.ListTenantsResponse]], total: Sequence[Mapping[str, Any]]
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
        turns_by_replica = [
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
            Text(", ".join(turns_by_replica)),
        )
    return Group(table, *(Text(line) for line in no_answer_lines(found)))


def _p99(times: pb.Latency) -> float | None:
    return times.p99_seconds if times.count else None


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else ""


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:,.1f} ms"
