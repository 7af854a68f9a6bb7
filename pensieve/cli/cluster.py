"""`pensieve cluster`: run replicas of the daemon on Ray Serve, with a shared history."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pensieve.config import default_data_folder
from pensieve.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from pensieve.cluster.local_ray import LocalRay

WAIT_SECONDS = 1800.0
NO_CLUSTER = "no cluster runs here; `pensieve cluster up` starts one"


def add_parser(commands: Any) -> None:
    cluster = commands.add_parser(
        "cluster",
        help="run replicas on several hosts, with Ray Serve",
        description="Run replicas of the daemon on Ray Serve, behind one address. A conversation stays with "
        "one replica, and moves to another if that replica drains or dies. Needs the extra `cluster`.",
    )
    actions = cluster.add_subparsers(dest="kind", required=True, metavar="ACTION")
    up = actions.add_parser(
        "up",
        help="start a cluster, or apply a new configuration",
        description="Deploy CONFIG, a Ray Serve file (docs/ray.md), to the Ray cluster at --ray, or to a Ray "
        "cluster that the command starts on this machine. --local N needs no file.",
    )
    up.add_argument("config", type=Path, nargs="?", metavar="CONFIG", help="a Ray Serve YAML file")
    up.add_argument("--local", type=int, metavar="N", help="run N replicas on this machine")
    up.add_argument("--model", default="", help="model of --local, as for `pensieve serve`")
    up.add_argument(
        "--grpc",
        type=int,
        default=50051,
        metavar="PORT",
        help="gRPC port of --local (default: 50051)",
    )
    up.add_argument(
        "--http",
        type=int,
        default=8000,
        metavar="PORT",
        help="HTTP port of --local (default: 8000)",
    )
    up.add_argument(
        "--nodes",
        type=int,
        default=1,
        metavar="N",
        help="number of Ray nodes to start here (default: 1)",
    )
    up.add_argument(
        "--cpus",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="processors of each of these nodes (default: all)",
    )
    up.add_argument(
        "--timeout",
        type=float,
        default=WAIT_SECONDS,
        metavar="SECONDS",
        help="give up after this time (default: 1800)",
    )
    up.set_defaults(run=_up)
    status = actions.add_parser("status", help="show the replicas, their states and their nodes")
    status.set_defaults(run=_status)
    roll = actions.add_parser(
        "roll",
        help="restart the replicas one after the other, without losing a turn",
        description="Restart the replicas one after the other, with the software that is installed now. Each "
        "replica first drains and hands its conversations over. At worst, a client has to retry a turn.",
    )
    roll.add_argument(
        "--timeout",
        type=float,
        default=WAIT_SECONDS,
        metavar="SECONDS",
        help="give up after this time (default: 1800)",
    )
    roll.set_defaults(run=_roll)
    down = actions.add_parser(
        "down",
        help="stop the cluster",
        description="Drain and stop the replicas, and the Ray cluster that `up` started. The history stays.",
    )
    down.set_defaults(run=_down)
    for each in (up, status, roll, down):
        each.add_argument(
            "--ray",
            metavar="HOST:PORT",
            help="a running Ray cluster (its token: RAY_AUTH_TOKEN_PATH)",
        )
        each.add_argument(
            "--data",
            type=Path,
            metavar="DIR",
            help="folder of the cluster on this machine (default: `cluster` in the user's data folder)",
        )


def _up(arguments: argparse.Namespace) -> int:
    began = time.monotonic()
    folder = _folder(arguments)
    local = _local_ray(arguments)
    from pensieve.cluster import deploying, serve_config
    from pensieve.cluster.local_ray import check_free

    if (arguments.config is None) == (arguments.local is None):
        raise ConfigError("give either CONFIG or --local N")
    if arguments.local is not None:
        if arguments.local < 1:
            raise ConfigError("--local must be at least 1")
        config = serve_config.checked(
            serve_config.local(
                arguments.local, folder, arguments.grpc, arguments.http, {"model": arguments.model}
            ),
            "--local",
        )
    else:
        config = serve_config.read(arguments.config)
    address = arguments.ray or local.address
    is_new = address is None
    if address is None:
        check_free(config.http_options.host, config.http_options.port)
        check_free("0.0.0.0", config.grpc_options.port)  # because Ray listens on all interfaces
        print("starting Ray on this machine", flush=True)
        address = local.start(arguments.nodes, arguments.cpus)
    try:
        with deploying.connected(address):
            deploying.deploy(config)
            deploying.wait_until_running(arguments.timeout, lambda line: print(line, flush=True))
    except Exception:
        if is_new:
            local.stop()
        raise
    host = config.http_options.host
    print(
        f"ready grpc://{'127.0.0.1' if not arguments.ray else _host(address)}:{config.grpc_options.port}, "
        f"http://{host}:{config.http_options.port} ({time.monotonic() - began:.0f} s)"
    )
    return 0


def _status(arguments: argparse.Namespace) -> int:
    local = _local_ray(arguments)
    from pensieve.cluster import deploying

    address = arguments.ray or local.address
    if address is None:
        print(NO_CLUSTER)
        return 1
    with deploying.connected(address):
        state = deploying.read_state()
    print(f"{state.status.lower() or 'nothing deployed'}: {state.running} of {state.wanted} run")
    for each in state.replicas:
        print(
            f"  {each.deployment:<8} {each.name:<10} {each.state.lower():<10} {each.node} pid {each.pid}"
        )
    for node, status in state.proxies:
        print(f"  {'Proxy':<8} {'':<10} {status.lower():<10} {node}")
    return 0 if state.status == "RUNNING" else 1


def _roll(arguments: argparse.Namespace) -> int:
    local = _local_ray(arguments)
    from pensieve.cluster import deploying

    address = arguments.ray or local.address
    if address is None:
        raise Unavailable(NO_CLUSTER)
    with deploying.connected(address):
        deploying.roll(arguments.timeout, lambda line: print(line, flush=True))
    print("all replicas were restarted")
    return 0


def _down(arguments: argparse.Namespace) -> int:
    local = _local_ray(arguments)
    from pensieve.cluster import deploying

    address = arguments.ray or local.address
    if address is None:
        print(NO_CLUSTER)
        return 0
    with deploying.connected(address):
        print("draining and stopping the replicas", flush=True)
        deploying.take_down()
    if not arguments.ray:
        local.stop()
    print("stopped")
    return 0


def _local_ray(arguments: argparse.Namespace) -> LocalRay:
    """Return the Ray of this machine. Sets environment variables that the first import of ray reads."""
    from pensieve.cluster.local_ray import LocalRay
    from pensieve.extras import need

    local = LocalRay(_folder(arguments))
    if arguments.ray:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    else:
        os.environ.update(local.environment())
    need("cluster", "ray.serve", "`pensieve cluster`")
    return local


def _folder(arguments: argparse.Namespace) -> Path:
    folder: Path = arguments.data or default_data_folder(os.environ) / "cluster"
    return folder.absolute()


def _host(address: str) -> str:
    return address.removeprefix("ray://").rpartition(":")[0]
