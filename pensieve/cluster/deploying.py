"""Deploy a configuration to a Ray cluster, and read the cluster's state.

Ray's controller does the work, and continues if this process ends. `Report` receives its progress as readable
lines. The environment must contain Ray's credentials before Ray is imported.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import ray
from ray.serve._private import api as serve_api
from ray.serve.config import gRPCOptions
from ray.serve.schema import ServeDeploySchema

from pensieve.cluster.serve_config import (
    APPLICATION,
    check_options,
    with_generation_of,
    with_next_generation,
)
from pensieve.cluster.settings import REPLICA
from pensieve.errors import Unavailable

POLL_SECONDS = 0.5
SHUTDOWN_SECONDS = 30.0  # for Ray's own processes, after the replicas
Report = Callable[[str], None]


class ReplicaState(NamedTuple):
    deployment: str
    name: str
    state: str
    node: str
    pid: int


class ClusterState(NamedTuple):
    # Ray's name of the state: DEPLOYING, RUNNING, UNHEALTHY, DEPLOY_FAILED, …; "" if nothing is deployed
    status: str
    message: str
    wanted: int  # number of replicas that should run
    replicas: tuple[ReplicaState, ...]
    proxies: tuple[tuple[str, str], ...]  # (node, status)

    @property
    def running(self) -> int:
        return sum(each.state == "RUNNING" for each in self.replicas)


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect this process to the Ray cluster at `address` until the end of the block."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        ray.init(
            address=address,
            namespace="serve",
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=True,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise Unavailable(f"cannot reach Ray at {address}: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def deploy(config: ServeDeploySchema) -> None:
    """Pass the configuration to Ray's controller. Unchanged replicas keep running.

    Ray's proxies read their options only when Serve starts. Ray silently ignores changed options, so
    `check_options` refuses them.

    `roll` changes an environment variable (the generation), which the user's configuration file does not
    contain. Without this variable, Ray would see a change and replace the replicas. So the generation is
    copied from the running application.
    """
    existing = serve_api._get_global_client(raise_if_no_controller_running=False)
    if existing is not None:
        details = existing.get_serve_details()
        check_options(config, details)
        application = details["applications"].get(APPLICATION) or {}
        config = with_generation_of(application.get("deployed_app_config"), config)
    client = serve_api.serve_start(
        http_options=config.http_options.model_dump(),
        grpc_options=gRPCOptions(**config.grpc_options.model_dump()),
        proxy_location=config.proxy_location,
        controller_options=config.controller_options,
    )
    client.deploy_apps(config)


def wait_until_running(seconds: float, report: Report) -> ClusterState:
    """Report each step until the application runs. Raises Unavailable if Ray gives up or time runs out."""
    return _wait(seconds, report, lambda state: _progress(state, set()))


def roll(seconds: float, report: Report) -> ClusterState:
    """Replace every replica with Ray's rolling update: each old replica ends when it has drained.

    Ray updates the replicas because an environment variable of the application changes.
    """
    before = read_state()
    if before.status != "RUNNING":
        raise Unavailable(f"cannot roll: the cluster is {before.status.lower() or 'not deployed'}")
    client = serve_api._get_global_client()
    application = client.get_serve_details()["applications"][APPLICATION]
    config = with_next_generation(application["deployed_app_config"])
    client.deploy_apps(ServeDeploySchema.model_validate({"applications": [config]}))
    old = {each.name for each in before.replicas if each.deployment == REPLICA}
    return _wait(seconds, report, lambda state: _progress(state, old))


def read_state() -> ClusterState:
    client = serve_api._get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return ClusterState("", "", 0, (), ())
    details: Mapping[str, Any] = client.get_serve_details()
    proxies = tuple(
        (str(each.get("node_ip") or ""), _word(each["status"]))
        for each in details["proxies"].values()
    )
    application = details["applications"].get(APPLICATION)
    if application is None:
        return ClusterState("", "", 0, (), proxies)
    deployments = application["deployments"].values()
    replicas = tuple(
        ReplicaState(
            str(deployment["name"]),
            str(each["replica_id"]),
            _word(each["state"]),
            str(each.get("node_ip") or ""),
            int(each.get("pid") or 0),
        )
        for deployment in deployments
        for each in deployment["replicas"]
    )
    messages = [each["message"] for each in (*deployments, application) if each["message"]]
    return ClusterState(
        _word(application["status"]),
        messages[0] if messages else "",
        sum(each["target_num_replicas"] for each in deployments),
        replicas,
        proxies,
    )


def take_down() -> None:
    """Drain and end the replicas, then everything else.

    Ray's own shutdown ends the proxies first, which would cut off all calls.
    """
    client = serve_api._get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return
    application = client.get_serve_details()["applications"].get(APPLICATION) or {}
    seconds = SHUTDOWN_SECONDS + sum(
        each["deployment_config"]["graceful_shutdown_timeout_s"]
        for each in (application.get("deployments") or {}).values()
    )
    client.delete_apps([APPLICATION], blocking=False)
    deadline = time.monotonic() + seconds
    while read_state().status and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    client.shutdown(timeout_s=SHUTDOWN_SECONDS)


def _wait(
    seconds: float, report: Report, progress: Callable[[ClusterState], tuple[bool, str]]
) -> ClusterState:
    deadline = time.monotonic() + seconds
    before = ""
    while True:
        state = read_state()
        done, line = progress(state)
        if line != before:
            before = line
            report(line)
        if done:
            return state
        if state.status == "DEPLOY_FAILED":
            raise Unavailable(f"the cluster could not start: {_cause(state.message)}")
        if time.monotonic() > deadline:
            raise Unavailable(
                f"the cluster was not ready after {seconds:g} s: {_cause(state.message)}"
            )
        time.sleep(POLL_SECONDS)


def _progress(state: ClusterState, old: set[str]) -> tuple[bool, str]:
    """Return whether all wanted processes run and none of `old` does, and a readable line about it."""
    status = state.status.lower() or "waiting"
    line = f"{status}: {state.running} of {state.wanted} processes running"
    num_old = sum(each.name in old for each in state.replicas)
    if old:
        line += f", {num_old} of {len(old)} to be replaced"
    return status == "running" and state.running == state.wanted and num_old == 0, line


def _word(value: Any) -> str:
    return str(getattr(value, "value", value))


def _cause(message: str) -> str:
    """Return the last line of a traceback, which names the error."""
    lines = [each.strip() for each in message.splitlines() if each.strip()]
    ours = [each for each in lines if each.startswith("pensieve.errors.")]
    return (ours or lines or ["Ray gives no reason"])[-1].removeprefix("pensieve.errors.")
