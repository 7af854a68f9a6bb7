"""`pensieve admin` for several daemons: those of --replicas, or of several addresses in --address.

What each command does with one daemon it does with all at once, and shows a row for each beside what they
make together.  A replica that does not answer is a row that says why; the others are shown, and the exit code
is PARTIAL.  What changes something, or is of one daemon by its nature, needs to be told which (--replica).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from pensieve.cli import admin_fleet_tables as tables
from pensieve.cli.plain_values import plain
from pensieve.config import Resolved, read_secret
from pensieve.errors import InvalidArgument, NotFound

if TYPE_CHECKING:
    from pensieve.client.fleet import Answer, Discovery, Fleet, Replica

PARTIAL = 7  # exit code: not all replicas answered
WAIT_SECONDS = {"metrics": 3.0, "check": 60.0, "conversations": 30.0, "explain": 30.0}
OTHERS_SECONDS = 5.0


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Of the command `name`."""
    parser.add_argument(
        "--replica", default="", metavar="NAME", help="of --replicas, this one alone"
    )
    if name not in ACTS:
        return
    seconds = WAIT_SECONDS.get(name, OTHERS_SECONDS)
    parser.add_argument(
        "--wait",
        type=float,
        default=seconds,
        metavar="SECONDS",
        help=f"how long each of several replicas may take to answer (default: {seconds:g})",
    )
    if name == "metrics":
        parser.add_argument(
            "--listen",
            default="",
            metavar="HOST:PORT",
            help="serve those of all replicas there, for Prometheus, until Ctrl-C (port 0: any free one)",
        )
        parser.add_argument(
            "--insecure", action="store_true", help="let other machines reach what --listen serves"
        )


def several(resolved: Resolved) -> Discovery | None:
    """Who knows the replicas that were named; None where it is one daemon."""
    from pensieve.client.fleet import FixedReplicas, HistoryReplicas, replicas_of
    from pensieve.client.fleet.discovery import SCHEMES

    replicas, address = resolved.settings.replicas, resolved.settings.daemon
    if replicas and resolved.sources["daemon"] == "flag":
        raise InvalidArgument("--address", "names daemons and so does --replicas: leave out one")
    if replicas and replicas.startswith(SCHEMES):
        settings = resolved.settings
        return HistoryReplicas(
            replicas, secret=read_secret(settings.cluster_secret), ca=settings.history_ca or True
        )
    if replicas:
        return FixedReplicas(replicas_of(replicas, "--replicas"))
    if address and "," in address:
        return FixedReplicas(replicas_of(address, "--address"))
    return None


def named(discovery: Discovery, name: str) -> Replica:
    replicas = asyncio.run(listed(discovery))
    for each in replicas:
        if each.name == name:
            return each
    raise NotFound(f"there is no replica {name!r}: {_names(replicas)}")


def check_alone(arguments: argparse.Namespace) -> None:
    """Of a command to one daemon: flags that would be ignored."""
    for flag in ("replica", "listen"):
        if getattr(arguments, flag, ""):
            raise InvalidArgument(f"--{flag}", "is for several daemons (--replicas NAME=A,…)")


async def listed(discovery: Discovery) -> Sequence[Replica]:
    return await discovery.list_replicas()


def run(arguments: argparse.Namespace, resolved: Resolved, discovery: Discovery) -> int:
    act = ACTS.get(arguments.kind)
    if act is None:
        replicas = asyncio.run(listed(discovery))
        raise InvalidArgument(
            "--replica", f"must say which, for {arguments.kind} is of one: {_names(replicas)}"
        )
    if not 0 < arguments.wait <= 3600:
        raise InvalidArgument("--wait", "is a number of seconds above 0, at most 3600")

    async def go() -> int:
        from pensieve.client.fleet import Fleet, HistoryReplicas

        tls = resolved.settings.tls_ca or bool(resolved.settings.tls)
        token = resolved.settings.token
        locate = discovery.locate if isinstance(discovery, HistoryReplicas) else None
        async with Fleet(
            discovery, token=token, tls=tls, seconds=arguments.wait, locate=locate
        ) as fleet:
            return await act(fleet, arguments)

    return asyncio.run(go())


async def stats(fleet: Fleet, arguments: argparse.Namespace) -> int:
    found = await fleet.stats()
    if arguments.json:
        print(json.dumps(_stats_values(found)))
    else:
        tables.show(tables.stats(found))
    return _code(found)


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
                live.update(tables.stats(found), refresh=True)
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
        for line in tables.silent(found):
            print(line, file=sys.stderr)
    return _code(found)


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
        tables.show(tables.conversations(found, held))
    return _code(found)


async def explain(fleet: Fleet, arguments: argparse.Namespace) -> int:
    from pensieve.client.fleet.holdings import holds_kv, owner_of

    wanted = arguments.conversation, arguments.tenant
    found = await fleet.explain(*wanted)
    for answer in found:
        if isinstance(answer.error, InvalidArgument):  # a tenant must be named
            raise answer.error
    denials = [answer.error for answer in found if isinstance(answer.error, NotFound)]
    if denials and len(denials) == len(found):
        raise denials[0]
    owner = owner_of(found, await fleet.located(*wanted))
    if arguments.json:
        rows = []
        for answer, row in zip(found, _rows(found), strict=True):
            is_known = answer.value is not None
            row["answered"] = is_known or isinstance(answer.error, NotFound)
            row["holds_kv"] = answer.value is not None and holds_kv(answer.value)
            row["conversation"] = plain(answer.value) if answer.value is not None else None
            rows.append(row)
        whose = {"name": owner.name, "known_by": owner.known_by.name.lower()} if owner else None
        print(json.dumps({"replicas": rows, "partial": _is_partial(found), "owner": whose}))
    else:
        print("\n".join(tables.explained(arguments.conversation, found, owner)))
    return _code(found)


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
        fine = [each.replica.name for each in found if each.value == []]
        if fine:
            print(f"nothing is wrong on {', '.join(fine)}")
        print("".join(f"{line}\n" for line in tables.silent(found)), end="")
    return 1 if problems else _code(found)


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
        tables.show(tables.tenants(found, total))
    return _code(found)


Act = Callable[["Fleet", argparse.Namespace], Awaitable[int]]
ACTS: dict[str, Act] = {
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


def _rows(found: Sequence[Answer[Any]]) -> list[dict[str, Any]]:
    """What every JSON output has of each replica."""
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


def _stats_values(found: Sequence[Answer[Any]]) -> dict[str, Any]:
    from pensieve.client.fleet.totals import total_of

    rows = []
    for answer, row in zip(found, _rows(found), strict=True):
        row["stats"] = plain(answer.value) if answer.value is not None else None
        rows.append(row)
    total = total_of([each.value for each in found if each.value is not None])
    return {"replicas": rows, "partial": _is_partial(found), "total": total}


def _is_partial(found: Sequence[Answer[Any]]) -> bool:
    """Whether somebody's answer is missing; that a conversation is not there is an answer."""
    return any(each.error is not None and not isinstance(each.error, NotFound) for each in found)


def _code(found: Sequence[Answer[Any]]) -> int:
    return PARTIAL if _is_partial(found) else 0
