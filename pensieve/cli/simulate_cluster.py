"""The options and the output of `pensieve simulate --cluster`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING

from pensieve.errors import InvalidArgument

if TYPE_CHECKING:
    from pensieve.sim.cluster.cluster import Setting
    from pensieve.sim.cost import CostModel

REPLICAS = 1000
REPLICAS_MAX = 10_000
RATE_EACH = 0.5  # conversations per second of a replica, where --rate is left out
WORKLOAD = "sharegpt"
SIMULATED = 8
STORES = "131,430,2080"  # turns/s that were measured, docs/postgresql.md
EVENTS = "60:fail:1,150:fail:5%,300:join:10%,420:restart:2%"
ELSEWHERE = (
    *("traces", "batch", "streaming", "until", "stateless", "plot", "record", "count_from"),
    *("prompt_seconds", "tbt", "share"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "a cluster",
        "Many replicas under one placement (consistent hashing with bounded load, and owners that keep what "
        "they have), while replicas fail, drain and join: how even the load is, what moves, what is "
        "computed again, what the network carries, and how many replicas one history service does.",
    )
    group.add_argument(
        "--cluster",
        type=int,
        nargs="?",
        const=REPLICAS,
        metavar="N",
        help="simulate so many replicas (default: 1000), of conversations of a --workload (default: "
        f"{WORKLOAD}) that begin at --rate in all of them (default: {RATE_EACH:g} for each)",
    )
    group.add_argument(
        "--simulated",
        type=int,
        default=SIMULATED,
        metavar="K",
        help="replicas that have the daemon's scheduler; the others count their turns, which take what these "
        f"measure. First tokens are those of this sample, all other figures of all (default: {SIMULATED})",
    )
    group.add_argument(
        "--events",
        default=EVENTS,
        metavar="S:KIND:N,…",
        help="what happens, after so many seconds: fail, drain (for good), restart (drained, and back) or "
        "join, and to how many replicas, or what share of them (default: "
        + EVENTS.replace("%", "%%")
        + ")",
    )
    group.add_argument(
        "--network",
        type=float,
        default=100.0,
        metavar="Gb/s",
        help="of each host, each way: KV of conversations that move is sent where that is sooner than "
        "computing it; 0: never (default: 100)",
    )
    group.add_argument(
        "--lease",
        type=float,
        default=10.0,
        metavar="S",
        help="until it is known that a replica has failed (default: 10)",
    )
    group.add_argument(
        "--drain",
        type=float,
        default=60.0,
        metavar="S",
        help="that a replica which drains can be asked for KV; one that restarts is back as long after that "
        "(default: 60)",
    )
    group.add_argument(
        "--push",
        action="store_true",
        help="a replica that drains sends the KV of all that was active of late, at once (default: of what "
        "is wanted, with the next turn)",
    )
    group.add_argument(
        "--forks",
        type=float,
        default=0.05,
        metavar="SHARE",
        help="of new conversations that begin as a fork of another (default: 0.05)",
    )
    group.add_argument(
        "--history",
        default=STORES,
        metavar="TURNS/S,…",
        help="what one history service carries (default: what was measured of PostgreSQL and SQLite, "
        f"docs/postgresql.md: {STORES})",
    )
    group.add_argument(
        "--round-trip",
        default="0.2,70",
        metavar="MS,…",
        help="from a replica to the history service and back (default: 0.2,70: a rack, another region)",
    )


def fill_in(arguments: argparse.Namespace) -> None:
    if arguments.rate is None:
        arguments.rate = [RATE_EACH * arguments.cluster]
    if arguments.workload is None:
        arguments.workload = WORKLOAD


def run(
    arguments: argparse.Namespace, cost: CostModel, device_tokens: int, host_tokens: int
) -> int:
    from pensieve.sim.cluster import report
    from pensieve.sim.cluster.cluster import Cluster

    setting = _setting(arguments, cost, device_tokens, host_tokens)
    stores, trips = (_numbers(arguments, name) for name in ("history", "round_trip"))
    for line in _assumed(arguments, setting):
        print(line, file=sys.stderr)
    begun = reported = time.monotonic()

    def progress(now: float, turns: int) -> None:
        nonlocal reported
        if time.monotonic() - reported >= 5:
            reported = time.monotonic()
            print(
                f"{reported - begun:6.0f} s  at {now:,.0f} of {setting.seconds:g} s: {turns:,} turns",
                file=sys.stderr,
                flush=True,
            )

    cluster = Cluster(setting)
    cluster.run(progress)
    found = report.result(cluster, stores, [each / 1000 for each in trips])
    if arguments.json:
        print(json.dumps({"assumed": _assumed(arguments, setting), **found}))
    else:
        print("\n".join(report.text(found)))
    if found["refused"]:
        print(f"{found['refused']} turns were larger than the device tier", file=sys.stderr)
    return 0


def _setting(
    arguments: argparse.Namespace, cost: CostModel, device_tokens: int, host_tokens: int
) -> Setting:
    from pensieve.core.policies.registry import DEFAULT, POLICIES
    from pensieve.sim.cluster.cluster import Setting
    from pensieve.sim.cluster.conversations import Talk
    from pensieve.sim.cluster.replica import Machine
    from pensieve.sim.cluster.script import parse
    from pensieve.sim.workload import HABITS

    for name in ELSEWHERE:
        if getattr(arguments, name):
            raise InvalidArgument(name, "is not for --cluster")
    if arguments.phases != "unified":
        raise InvalidArgument("phases", "are for a single simulation, not for --cluster")
    if arguments.hardware == "instant" and arguments.cost is None:
        raise InvalidArgument("hardware", "with `instant` nothing takes time: no latency")
    for name in ("rate", "seed", "device_tokens", "host_tokens"):
        if len(set(getattr(arguments, name))) > 1:
            raise InvalidArgument(name, "one is simulated with --cluster")
    policy = arguments.policy or DEFAULT
    if policy not in POLICIES:
        raise InvalidArgument("policy", f"{policy!r} is none of {', '.join(POLICIES)}")
    if not 2 <= arguments.cluster <= REPLICAS_MAX:
        raise InvalidArgument("cluster", f"is 2 to {REPLICAS_MAX:,} replicas")
    if not 0 <= arguments.simulated <= arguments.cluster:
        raise InvalidArgument("simulated", f"is at most the {arguments.cluster} of --cluster")
    if not 0 <= arguments.forks <= 1 or min(arguments.network, arguments.lease) < 0:
        raise InvalidArgument("forks, network, lease", "are 0 or more, forks at most 1")
    if not arguments.drain > 0:
        raise InvalidArgument("drain", "is above 0")
    try:
        script = parse(arguments.events)
    except ValueError as error:
        raise InvalidArgument("events", str(error)) from error
    if script and script[-1].at >= arguments.seconds:
        raise InvalidArgument("events", f"the last one is before --seconds {arguments.seconds:g}")
    machine = Machine(
        cost, device_tokens, host_tokens, policy, arguments.token_budget, arguments.turns_max
    )
    talk = Talk(
        HABITS[arguments.workload],
        arguments.rate[0],
        arguments.seed[0],
        arguments.reaction,
        arguments.forks,
    )
    return Setting(
        machine,
        talk,
        script,
        arguments.cluster,
        arguments.simulated,
        arguments.seconds,
        link_bytes_per_second=arguments.network * 1e9 / 8,
        lease_seconds=arguments.lease,
        drain_seconds=arguments.drain,
        restart_seconds=arguments.drain,
        push=arguments.push,
    )


def _numbers(arguments: argparse.Namespace, name: str) -> list[float]:
    try:
        found = [float(each) for each in getattr(arguments, name).split(",")]
    except ValueError:
        found = [-1.0]
    if not min(found) > 0:
        raise InvalidArgument(name, f"{getattr(arguments, name)!r}: numbers above 0")
    return found


def _assumed(arguments: argparse.Namespace, setting: Setting) -> list[str]:
    machine, talk = setting.machine, setting.talk
    counted = setting.replicas - setting.simulated
    how = "all of them with the daemon's scheduler"
    if counted:
        how = (
            f"{setting.simulated:,} of them with the daemon's scheduler, of the other {counted:,} turns are "
            "counted (sampled, not scaled: the placement and the conversations are those of all)"
        )
    return [
        f"costs: {machine.cost.source}; {machine.device_tokens:,} tokens of KV on the device and "
        f"{machine.host_tokens:,} on the host, policy {machine.policy}",
        f"load: {talk.rate:g} conversations a second like {arguments.workload}, reactions of "
        f"{talk.reaction:g} s, {talk.forks:.0%} forks; seed {talk.seed}",
        f"{setting.replicas:,} replicas, {how}",
        f"no new conversation above {setting.bound:g} x the mean, given away above {setting.keep_bound:g} x; "
        f"active in the last {setting.active_seconds:g} s counts",
    ]
