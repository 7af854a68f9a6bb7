"""The arguments of the Ray Serve application, and the command lines that follow from them.

The arguments are the `args` of the application in the YAML file. `serve deploy`, KubeRay and `pensieve
cluster up` read the same file. The number of replicas and their resources may also be set under
`deployments`, in Ray's format.

**Who may call.** On several machines, daemons listen on the network between the nodes, without TLS
(`--insecure`). This network must be private; Ray requires that, too. A daemon's own port checks nothing but
tokens: without tokens, every machine that reaches the port may call. Other machines can also reach Ray's
proxies, which ask DaemonReplica.may_call. So a cluster of several machines needs tokens, or `insecure`.
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
    removed_setting_error,
    settings_for,
    settings_named,
)
from pensieve.errors import ConfigError

REPLICA = "Replica"  # name of the deployment
RESERVED_SETTINGS = frozenset(
    {"model", "address", "http", "ready_file", "data", "replica", "insecure"}
)
LOOPBACK = "127.0.0.1"
SERVE_SETTINGS = settings_for(SERVE, ENGINE)
(DRAIN,) = settings_named("drain_timeout")
(STORE,) = settings_named("store")
NO_TLS = "Ray's proxies and replicas do not use TLS: put a load balancer with TLS in front of them"
PASSWORD = re.compile(r"//[^/?@]*:[^/?@]*@|[?&](?:ssl)?password=")


@dataclass(frozen=True)
class ClusterSettings:
    model: str = ""  # as for `pensieve serve`; empty: the built-in model
    replicas: int = 2
    data: str = ""  # a folder on each node, for batch jobs
    daemon_port: int = 0  # first port of the daemons; 0: any free ports
    cpus: float = 1.0  # processors that Ray reserves for each replica
    gpus: float = 0.0
    insecure: bool = False  # let other machines call without tokens
    local: bool = False  # all nodes are this machine: daemons listen on 127.0.0.1
    serve: Mapping[str, Any] = field(default_factory=dict)  # settings of `pensieve serve`

    @property
    def needs_tokens(self) -> bool:
        return bool(self.serve.get("token_file"))

    @property
    def drain_seconds(self) -> float:
        """How long turns of an ending replica may continue."""
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
    """Check the arguments and return the settings. An error names the invalid argument."""
    known = {each.name: each for each in fields(ClusterSettings)}
    for name in arguments:
        if name not in known:
            raise ConfigError(
                f"args: unknown argument {name!r}; known arguments: {', '.join(known)}"
            )
    for name, value in arguments.items():
        default = ClusterSettings.__dataclass_fields__[name].default
        kind = dict if name == "serve" else type(default)
        accepted = (int, float) if kind is float else kind
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise ConfigError(f"args: {name} must be of type {kind.__name__}, not {value!r}")
    settings = ClusterSettings(**arguments)
    if settings.replicas < 1:
        raise ConfigError("args: replicas must be at least 1")
    if settings.data and not settings.data.startswith("/"):
        raise ConfigError(f"args: data must be an absolute path, not {settings.data!r}")
    for name in ("tls_cert", "tls_key", "tls_client_ca"):
        if name in settings.serve:
            raise ConfigError(f"args: serve.{name}: {NO_TLS}")
    _check_serve_settings(settings.serve)
    for name in ("token_file", "cluster_secret"):
        if (file := settings.serve.get(name)) and not Path(str(file)).is_absolute():
            raise ConfigError(f"args: serve.{name} must be an absolute path")
    try:
        DRAIN.parse(str(settings.serve.get("drain_timeout", DRAIN.default)))
    except ValueError as error:
        raise ConfigError(f"args: serve.drain_timeout {error}") from None
    if not settings.local and not settings.needs_tokens and not settings.insecure:
        raise ConfigError(
            "args: anybody who reaches a node could call its daemon. Set serve.token_file, or "
            "`insecure: true` (or `local: true` if all nodes are this machine)"
        )
    _check_store(settings)
    return settings


def make_folders(settings: ClusterSettings) -> None:
    """Create the folders that this node's daemons need."""
    scheme, _, file = settings.store.partition("://")
    if scheme == "sqlite":
        Path(file).parent.mkdir(mode=0o700, parents=True, exist_ok=True)


def replica_command(settings: ClusterSettings, name: str, host: str, slot: Slot) -> list[str]:
    """Return the `pensieve serve` command of a replica. No other function knows its flags."""
    first_port = settings.daemon_port and settings.daemon_port + 2 * slot.number
    command = [*(sys.executable, "-m", "pensieve", "serve"), "--address", f"{host}:{first_port}"]
    command += ["--http", f"{host}:{first_port and first_port + 1}", "--data", str(slot.folder)]
    command += ["--replica", name]
    command += _flags({name: value for name, value in settings.serve.items() if name != "store"})
    if settings.insecure or host != LOOPBACK:
        command.append("--insecure")
    return [*command, settings.model] if settings.model else command


def store_environment(settings: ClusterSettings) -> dict[str, str]:
    """Return the database's address as an environment variable, because all users can see command lines."""
    return {STORE.variable: settings.store}


def _check_store(settings: ClusterSettings) -> None:
    if PASSWORD.search(settings.store):
        raise ConfigError(
            "args: serve.store contains a password, but Ray shows args to everybody. Put the password in a "
            "file on each node (~/.pgpass, or PGPASSFILE in Ray's environment; docs/postgresql.md)"
        )
    if not settings.local and not settings.store.startswith(("postgresql://", "postgres://")):
        raise ConfigError(
            "args: serve.store: several hosts need a postgresql://USER@HOST/NAME (docs/postgresql.md). Set "
            "`local: true` if all nodes are this machine"
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


def _check_serve_settings(given: Mapping[str, Any]) -> None:
    names = {each.name for each in SERVE_SETTINGS}
    for name, value in given.items():
        if name in RESERVED_SETTINGS:
            raise ConfigError(f"args: serve.{name} cannot be set: the cluster decides it")
        if name in REMOVED_SETTINGS:
            raise removed_setting_error(f"args: serve.{name}", name)
        if name not in names:
            raise ConfigError(f"args: `pensieve serve` has no setting {name!r}")
        if not isinstance(value, str | int | float | bool):
            raise ConfigError(f"args: serve.{name} must be a single value, not {value!r}")
