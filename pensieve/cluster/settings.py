"""The arguments of the Ray Serve application: what a cluster consists of, and the command lines that follow.

They are the `args` of the application in the YAML file, so `serve deploy`, KubeRay and `pensieve cluster
up` read the same thing.  Whatever Ray decides (where, how many, with which resources) may also stand under
`deployments`, in Ray's own words.

**Who may call.** Where the nodes are several machines, daemons listen on the network between them, without
TLS (`--insecure`): that network is private, as it has to be for Ray itself. Ray's proxies, which others
reach, ask DaemonReplica.may_call; a daemon's own port asks for tokens alone. So such a cluster has tokens, or
says `insecure`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pensieve.cluster.slots import Slot
from pensieve.config import (
    ENGINE,
    REMOVED_SETTINGS,
    SERVE,
    default_data_folder,
    removed,
    settings_for,
    settings_named,
)
from pensieve.errors import ConfigError

REPLICA = "Replica"  # the deployment of replicas
OURS = frozenset({"model", "address", "http", "ready_file", "data", "replica", "insecure"})
LOOPBACK = "127.0.0.1"
SERVE_SETTINGS = settings_for(SERVE, ENGINE)
(DRAIN,) = settings_named("drain_timeout")
(STORE,) = settings_named("store")
NO_TLS = (
    "Ray's proxies speak no TLS, nor do its replicas to their daemons: put a balancer before them"
)
PASSWORD = re.compile(r"//[^/?@]*:[^/?@]*@|[?&](?:ssl)?password=")


@dataclass(frozen=True)
class ClusterSettings:
    model: str = ""  # as in `pensieve serve`; empty for the one that ships
    replicas: int = 2
    data: str = ""  # a folder of each node, for batch jobs
    daemon_port: int = 0  # the first of those that daemons listen on; 0: any free ones
    cpus: float = 1.0  # of each replica, in Ray's bookkeeping
    gpus: float = 0.0
    insecure: bool = False  # let other machines call without tokens
    local: bool = False  # all nodes are this machine: daemons listen on 127.0.0.1
    serve: Mapping[str, Any] = field(default_factory=dict)  # settings of `pensieve serve`

    @property
    def needs_tokens(self) -> bool:
        return bool(self.serve.get("token_file"))

    @property
    def drain_seconds(self) -> float:
        """How long turns of a replica that is to end may go on."""
        return float(self.serve.get("drain_timeout", DRAIN.default))

    @property
    def data_folder(self) -> Path:
        return Path(self.data) if self.data else default_data_folder(os.environ) / "cluster"

    @property
    def store(self) -> str:
        """The database of the history, which every daemon opens."""
        own = f"sqlite://{self.data_folder}/history/conversations.db" if self.local else ""
        return str(self.serve.get("store") or own)


def settings_of(arguments: Mapping[str, Any]) -> ClusterSettings:
    """The arguments, checked; an error names the one that is wrong."""
    known = {each.name: each for each in fields(ClusterSettings)}
    for name in arguments:
        if name not in known:
            raise ConfigError(f"args: there is no {name!r}; there are {', '.join(known)}")
    for name, value in arguments.items():
        default = ClusterSettings.__dataclass_fields__[name].default
        kind = dict if name == "serve" else type(default)
        accepted = (int, float) if kind is float else kind
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise ConfigError(f"args: {name} is {value!r}, and has to be of type {kind.__name__}")
    settings = ClusterSettings(**arguments)
    if settings.replicas < 1:
        raise ConfigError("args: replicas has to be at least 1")
    if settings.data and not settings.data.startswith("/"):
        raise ConfigError(f"args: data is {settings.data!r}, and has to be a whole path")
    for name in ("tls_cert", "tls_key", "tls_client_ca"):
        if name in settings.serve:
            raise ConfigError(f"args: serve.{name}: {NO_TLS}")
    _check(settings.serve)
    for name in ("token_file", "cluster_secret"):
        if (file := settings.serve.get(name)) and not Path(str(file)).is_absolute():
            raise ConfigError(f"args: serve.{name} has to be a whole path")
    try:
        DRAIN.parse(str(settings.serve.get("drain_timeout", DRAIN.default)))
    except ValueError as error:
        raise ConfigError(f"args: serve.drain_timeout {error}") from None
    if not settings.local and not settings.needs_tokens and not settings.insecure:
        raise ConfigError(
            "args: whoever reaches a node can call its daemon: give serve.token_file, or say "
            "`insecure: true` (`local: true` where all nodes are this machine)"
        )
    _check_store(settings)
    return settings


def make_folders(settings: ClusterSettings) -> None:
    """Make those that this node's daemons need and may lack."""
    scheme, _, file = settings.store.partition("://")
    if scheme == "sqlite":
        Path(file).parent.mkdir(mode=0o700, parents=True, exist_ok=True)


def replica_command(settings: ClusterSettings, name: str, host: str, slot: Slot) -> list[str]:
    """Return `pensieve serve` of one replica. This is the only place that knows its flags."""
    first = settings.daemon_port and settings.daemon_port + 2 * slot.number
    command = [*(sys.executable, "-m", "pensieve", "serve"), "--address", f"{host}:{first}"]
    command += ["--http", f"{host}:{first and first + 1}", "--data", str(slot.folder)]
    command += ["--replica", name]
    command += _flags({name: value for name, value in settings.serve.items() if name != "store"})
    if settings.insecure or host != LOOPBACK:
        command.append("--insecure")
    return [*command, settings.model] if settings.model else command


def store_environment(settings: ClusterSettings) -> dict[str, str]:
    """Of the same process: the table of processes shows command lines to everybody."""
    return {STORE.variable: settings.store}


def _check_store(settings: ClusterSettings) -> None:
    if PASSWORD.search(settings.store):
        raise ConfigError(
            "args: serve.store has a password, and Ray shows args to whoever asks it: put that into a file "
            "of each node (~/.pgpass, or PGPASSFILE in Ray's environment; docs/postgresql.md)"
        )
    if not settings.local and not settings.store.startswith(("postgresql://", "postgres://")):
        raise ConfigError(
            "args: serve.store: several hosts need a postgresql://USER@HOST/NAME (docs/postgresql.md); say "
            "`local: true` where all nodes are this machine"
        )
    try:
        STORE.parse(settings.store)
    except ValueError as error:
        raise ConfigError(f"args: serve.store {settings.store!r} {error}") from None


def _flags(given: Mapping[str, Any]) -> list[str]:
    flags = {each.name: each for each in SERVE_SETTINGS}
    words: list[str] = []
    for name, value in given.items():
        if flags[name].metavar:
            words += [flags[name].flag, str(value)]
        elif value:
            words.append(flags[name].flag)
    return words


def _check(given: Mapping[str, Any]) -> None:
    names = {each.name for each in SERVE_SETTINGS}
    for name, value in given.items():
        if name in OURS:
            raise ConfigError(f"args: serve.{name} is the cluster's to decide")
        if name in REMOVED_SETTINGS:
            raise removed(f"args: serve.{name}", name)
        if name not in names:
            raise ConfigError(f"args: `pensieve serve` has no setting {name!r}")
        if not isinstance(value, str | int | float | bool):
            raise ConfigError(f"args: serve.{name} is {value!r}, and has to be one value")
