"""`pensieve admin`: inspect and control a running daemon.

The command connects to the socket in the data folder, which only the folder's owner may open, or to --address
with an admin token. It never opens the history itself. With --replicas or several addresses, it shows several
daemons (admin_fleet.py), or with --replica only one daemon."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pensieve.cli import admin_fleet
from pensieve.cli.admin_stats import MIB, seconds_text, stats_table
from pensieve.cli.flags import add_settings, tls_to, with_settings
from pensieve.cli.plain_values import plain
from pensieve.cli.reaching import address_of
from pensieve.config import LOOK, REACH, Resolved, settings_for, settings_named
from pensieve.errors import InvalidArgument, NotFound
from pensieve.sampling import Sampling

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pensieve.client import Job, ServerInfo
    from pensieve.client.admin import Admin

ACTIONS = ("list", "pause", "resume", "cancel", "delete")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "admin",
        help="inspect and control a running daemon",
        description="Inspect and control a running daemon. Without --address, the command uses the daemon "
        "that has the data folder. With --replicas or several addresses it covers several daemons at once, "
        "and the exit code is 7 if some did not answer.",
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")

    def command(name: str, act: Callable[[Admin, argparse.Namespace], int], text: str) -> Any:
        sub = kinds.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        sub.add_argument("--json", action="store_true", help="print JSON")
        add_settings(sub, (*settings_for(REACH, LOOK), *settings_named("data")))
        admin_fleet.add_arguments(sub, name)
        sub.set_defaults(
            run=with_settings(lambda arguments, resolved: _run(act, arguments, resolved))
        )
        return sub

    command("info", info, "show which model the daemon serves, and how")
    command("stats", print_stats, "print the figures of the daemon once")
    watch_parser = command("watch", watch, "show the figures of the daemon, and update them")
    watch_parser.add_argument(
        "--interval",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="time between updates (default: 1)",
    )
    command("metrics", metrics, "print the metrics that Prometheus scrapes")
    conversations_parser = command(
        "conversations", conversations, "list the conversations that are cached"
    )
    conversations_parser.add_argument(
        "--least-valuable",
        action="store_true",
        help="list the conversations that would be evicted first, instead of the largest",
    )
    conversations_parser.add_argument(
        "--limit", type=int, default=20, metavar="N", help="list at most N (default: 20)"
    )
    for name, act, text in (
        (
            "explain",
            explain,
            "show where the chunks of a conversation are, and their latest events",
        ),
        ("evict", evict, "drop the KV cache of a conversation; its history stays"),
    ):
        subcommand = command(name, act, text)
        subcommand.add_argument("conversation", metavar="ID", help="id of the conversation")
        subcommand.add_argument(
            "--tenant",
            default="",
            metavar="NAME",
            help="tenant of the conversation, if several tenants have a conversation with this ID",
        )
        if name == "evict":
            subcommand.add_argument(
                "--to-host", action="store_true", help="move the KV to the host tier instead"
            )
    command("check", check, "check all invariants of the daemon; exit code 1 if one is violated")
    command("tenants", tenants, "show what each tenant uses, and its limits")
    add_job_arguments(
        command(
            "jobs",
            jobs,
            "list the batch jobs of all tenants, or pause, resume, cancel or delete some",
        )
    )
    prefixes_parser = command(
        "prefixes", prefixes, "list the declared prefixes of all tenants, or delete one"
    )
    prefixes_parser.add_argument(
        "--delete",
        metavar="ID",
        help="delete this prefix; conversations that began with it are unchanged",
    )
    prefixes_parser.add_argument(
        "--tenant", default="", metavar="NAME", help="tenant of the prefix to delete"
    )
    command("drain", drain, "let the daemon finish its running turns and exit")


def _run(
    act: Callable[[Admin, argparse.Namespace], int],
    arguments: argparse.Namespace,
    resolved: Resolved,
) -> int:
    from pensieve.client import Retry
    from pensieve.client.admin import Admin

    discovery = admin_fleet.discovery_of(resolved)
    if discovery is not None and not arguments.replica:
        return admin_fleet.run(arguments, resolved, discovery)
    if discovery is not None:
        address = admin_fleet.replica_named(discovery, arguments.replica).address
        tls = tls_to(address, resolved)
    else:
        admin_fleet.refuse_fleet_flags(arguments)
        address, tls = address_of(resolved)
    token = resolved.settings.token
    with Admin(address, token=token, tls=tls, timeout=30.0, retry=Retry(retries=0)) as admin:
        return act(admin, arguments)


def info(admin: Admin, arguments: argparse.Namespace) -> int:
    found = admin.server_info()
    if arguments.json:
        print(json.dumps(asdict(found)))
        return 0
    rows = {
        "model": found.model,
        "fingerprint": found.fingerprint,
        "state": f"{found.state.replace('_', ' ')}, up {seconds_text(found.uptime_seconds)}",
        "computes": f"{found.dtype}, {found.weights} weights, {_kv_text(found.kv_dtype)}on {found.device}",
        "runs": found.layers,
        "context": f"{found.context_max_tokens:,} tokens at most",
        "sampling": _sampling_text(found),
        "pensieve": found.version,
        "torch": found.torch_version,
        "transformers": found.transformers_version,
    }
    if not found.device:  # no model is loaded yet, or the engine runs without a model
        del rows["computes"]
    if not found.layers:
        del rows["runs"]
    if not found.context_max_tokens:
        del rows["context"]
    if found.sampling is None:
        del rows["sampling"]
    for name, text in rows.items():
        print(f"{name:<13} {text}")
    return 0


def _kv_text(kv_dtype: str) -> str:
    return f"{kv_dtype} KV, " if kv_dtype else ""  # earlier versions do not report the type


def _sampling_text(info: ServerInfo) -> str:
    """Show temperature, and the other values that are not neutral."""
    neutral = asdict(Sampling())
    values = ", ".join(
        f"{name} {value:g}"
        for name, value in (info.sampling or {}).items()
        if name == "temperature" or value != neutral[name]
    )
    return f"{values} (" + ("the model's own)" if info.sampling_from_model else "default)")


def print_stats(admin: Admin, arguments: argparse.Namespace) -> int:
    stats = admin.stats()
    if arguments.json:
        print(json.dumps(plain(stats)))
    else:
        _print(stats_table(stats))
    return 0


def watch(admin: Admin, arguments: argparse.Namespace) -> int:
    if arguments.json or not sys.stdout.isatty():
        for stats in admin.watch(arguments.interval):
            print(json.dumps(plain(stats)), flush=True)
        return 0
    from rich.live import Live

    with Live(auto_refresh=False) as live:
        for stats in admin.watch(arguments.interval):
            live.update(stats_table(stats), refresh=True)
    return 0


def metrics(admin: Admin, arguments: argparse.Namespace) -> int:
    text = admin.metrics()
    if arguments.json:
        print(json.dumps({"text": text}))
    else:
        print(text, end="")
    return 0


def conversations(admin: Admin, arguments: argparse.Namespace) -> int:
    found = admin.cached(arguments.least_valuable, arguments.limit)
    if arguments.json:
        print(json.dumps({"conversations": [plain(each) for each in found]}))
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
            "running" if each.running else seconds_text(each.idle_seconds),
            "" if each.running else f"{each.retention_value:.3g}",
        )
    _print(table)
    return 0


def explain(admin: Admin, arguments: argparse.Namespace) -> int:
    answer = admin.explain(arguments.conversation, arguments.tenant)
    if arguments.json:
        print(json.dumps(plain(answer)))
        return 0
    if answer.tenant:
        print(f"conversation {arguments.conversation} of tenant {answer.tenant}")
    if not answer.runs:
        print("nothing is cached; the next turn recomputes the whole history")
    for run in answer.runs:
        last = run.first_chunk + run.num_chunks - 1
        held = f", held by {run.num_holders} conversations" if run.num_holders > 1 else ""
        print(f"chunks {run.first_chunk:5} to {last:5}: {run.place}{held}")
    for event in answer.events:
        print(f"{seconds_text(event.seconds_ago)} ago: {event.text}")
    return 0


def evict(admin: Admin, arguments: argparse.Namespace) -> int:
    num_chunks = admin.evict(arguments.conversation, arguments.tenant, arguments.to_host)
    result = "moved" if arguments.to_host else "dropped"
    figures = json.dumps({f"chunks_{result}": num_chunks})
    print(figures if arguments.json else f"{num_chunks} chunks {result}")
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
        print(json.dumps({"tenants": [plain(each) for each in found]}))
        return 0
    from rich.table import Table

    table = Table(
        *("tenant", "turns", "calls", "stored", "prefixes", "not read"),
        *("token credit", "request credit", "weight"),
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for each in found:
        limits = each.limits
        table.add_row(
            each.name or "(none)",
            _amount_text(each.turns, limits.turns_max),
            _amount_text(each.calls, limits.calls_max),
            _amount_text(each.stored_bytes / MIB, limits.storage_bytes / MIB, "MiB"),
            _amount_text(each.prefixes, limits.prefixes_max),
            _amount_text(each.unread_bytes / MIB, limits.unread_bytes / MIB, "MiB"),
            _amount_text(each.tokens_saved, limits.tokens_per_second, "/s")
            if limits.tokens_per_second
            else "",
            _amount_text(each.requests_saved, limits.requests_per_second, "/s")
            if limits.requests_per_second
            else "",
            f"{limits.weight:g}",
        )
    _print(table)
    return 0


def _amount_text(used: float, limit: float, unit: str = "") -> str:
    """Format a used amount and its limit. A limit of 0 means that there is no limit."""
    words = f"{used:,.4g}" + (f" of {limit:,.4g}" if limit else "")
    return f"{words} {unit}" if unit else words


def prefixes(admin: Admin, arguments: argparse.Namespace) -> int:
    if arguments.delete is not None:
        admin.delete_tenant_prefix(arguments.delete, arguments.tenant)
        deleted = json.dumps({"deleted": arguments.delete})
        print(deleted if arguments.json else f"deleted prefix {arguments.delete}")
        return 0
    found = admin.tenant_prefixes()
    if arguments.json:
        print(json.dumps({"prefixes": [plain(each) for each in found]}))
        return 0
    from rich.table import Table

    table = Table("prefix", "tenant", "messages", "tokens", "conversations", "kept warm")
    for column in table.columns[2:5]:
        column.justify = "right"
    for each in found:
        prefix = each.prefix
        table.add_row(
            prefix.prefix_id,
            each.tenant or "(none)",
            *(f"{n:,}" for n in (prefix.num_messages, prefix.num_tokens, prefix.num_conversations)),
            "yes" if prefix.keep_warm else "no",
        )
    _print(table)
    return 0


def drain(admin: Admin, arguments: argparse.Namespace) -> int:
    running = admin.drain()
    print(
        json.dumps({"turns_running": running})
        if arguments.json
        else f"draining; {running} turns are running"
    )
    return 0


def _print(table: RenderableType) -> None:
    from pensieve.bench.report import print_whole

    print_whole(table)


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        nargs="?",
        choices=ACTIONS,
        default="list",
        metavar="ACTION",
        help="list (default), pause, resume, cancel (keeps the answers so far) or delete (keeps nothing)",
    )
    parser.add_argument(
        "jobs", nargs="*", metavar="ID", help="ids of the jobs; with list: only these"
    )
    parser.add_argument(
        "--tenant",
        default="",
        metavar="NAME",
        help="tenant of the jobs, if several tenants have a job with this ID; with list: only its jobs",
    )


def jobs(admin: Admin, arguments: argparse.Namespace) -> int:
    action, wanted, tenant = arguments.action, arguments.jobs, arguments.tenant
    found = list(admin.jobs.list(all_tenants=True))
    if tenant:
        found = [job for job in found if job.tenant == tenant]
    if action == "list":
        shown = [job for job in found if not wanted or job.job_id in wanted]
        _print_jobs(shown, arguments.json)
        return 0
    if not wanted:
        raise InvalidArgument("ID", f"name the jobs to {action}; `pensieve admin jobs` lists them")
    chosen = [_job_with_id(found, job_id) for job_id in wanted]  # check all before changing any
    done = [_change_job(admin, action, job) for job in chosen]
    if arguments.json:
        print(json.dumps({"jobs": done}))
    else:
        for each in done:
            print(f"{each['job_id']}: {each['state']}")
    return 0


def _job_with_id(found: list[Job], job_id: str) -> Job:
    """Return the job with this id. Raises InvalidArgument if several tenants have a job with this id."""
    matching = [job for job in found if job.job_id == job_id]
    if not matching:
        raise NotFound(f"there is no job {job_id!r}")
    if len(matching) > 1:
        tenants = ", ".join(sorted(job.tenant or "(none)" for job in matching))
        raise InvalidArgument(
            "--tenant", f"is missing: several tenants have a job {job_id!r}: {tenants}"
        )
    return matching[0]


def _change_job(admin: Admin, action: str, job: Job) -> dict[str, Any]:
    if action == "delete":
        admin.jobs.delete(job.job_id, tenant=job.tenant)
        return {"job_id": job.job_id, "tenant": job.tenant, "state": "deleted"}
    calls = {"pause": admin.jobs.pause, "resume": admin.jobs.resume, "cancel": admin.jobs.cancel}
    return _plain(calls[action](job.job_id, tenant=job.tenant))


def _plain(job: Job) -> dict[str, Any]:
    """Return a job as a dict, with times in seconds."""
    return {
        name: value.timestamp() if hasattr(value, "timestamp") else value
        for name, value in asdict(job).items()
    }


def _print_jobs(shown: list[Job], is_json: bool) -> None:
    if is_json:
        print(json.dumps({"jobs": [_plain(each) for each in shown]}))
        return
    if not shown:
        print("no jobs")
        return
    from rich.table import Table

    from pensieve.bench.report import print_whole

    table = Table("job", "tenant", "name", "state", "lines", "answered", "refused", "saved", "left")
    for column in table.columns[4:]:
        column.justify = "right"
    for job in shown:
        saved = job.saved_tokens / job.prompt_tokens if job.prompt_tokens else 0.0
        table.add_row(
            job.job_id,
            job.tenant,
            job.name,
            job.outcome or job.state,
            f"{job.num_lines:,}",
            f"{job.num_answered:,}",
            f"{job.num_refused:,}",
            f"{saved:.0%}" if job.prompt_tokens else "",
            "" if job.seconds_left is None else seconds_text(job.seconds_left),
        )
    print_whole(table)
