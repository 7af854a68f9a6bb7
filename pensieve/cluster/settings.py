"""The arguments of the Ray Serve application: what a cluster consists of, and the command lines that follow.

They are the `args` of the application in the YAML file, so `serve deploy`, KubeRay and `pensieve cluster
up` read the same thing.  Whatever Ray decides (where, how many, with which resources) may also stand under
`deployments`, in Ray's own words.

**Who may call.**  Where the nodes are several machines, daemons listen on the network between them, without
TLS (`--insecure`): that network is private, as it has to be for Ray itself.  Ray's proxies, which others
reach, ask Replica.may_call; a daemon's own port asks for tokens alone, and the history service for the secret
that it shares with the daemons.  So such a cluster has both, or says `insecure`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pensieve.config import (
    ENGINE,
    REMOVED,
    SERVE,
    Table,
    default_data_folder,
    removed,
    settings_for,
    settings_named,
)
from pensieve.config import HISTORY as FOR_HISTORY
from pensieve.errors import ConfigError

REPLICA = "Replica"  # the deployment of replicas
HISTORY = "History"  # that of the history service
OURS = frozenset({"model", "address", "http", "ready_file", "data", "store", "replica", "insecure"})
LOOPBACK = "127.0.0.1"
SERVE_SETTINGS = settings_for(SERVE, ENGINE)
HISTORY_SETTINGS = settings_for(FOR_HISTORY)
(DRAIN,) = settings_named("drain_timeout")
(STORE,) = settings_named("store")
NO_TLS = (
    "Ray's proxies speak no TLS, nor do its replicas to their daemons: put a balancer before them"
)
PASSWORD = re.compile(r"//[^/?@]*:[^/?@]*@|[?&](?:ssl)?password=")
OURS_OF_HISTORY = OURS | {"history_address", "cluster_secret"}  # the secret is that of `serve`


@dataclass(frozen=True)
class ClusterSettings:
    model: str = ""  # as in `pensieve serve`; empty for the one that ships
    replicas: int = 2
    history: str = ""  # a folder of the history's node, or postgresql://
    history_port: int = 50060
    cpus: float = 1.0  # of each replica, in Ray's bookkeeping
    gpus: float = 0.0
    insecure: bool = False  # let other machines call without tokens
    local: bool = False  # all nodes are this machine: daemons listen on 127.0.0.1
    serve: Mapping[str, Any] = field(default_factory=dict)  # settings of `pensieve serve`
    history_serve: Mapping[str, Any] = field(default_factory=dict)  # of `pensieve history`

    @property
    def needs_tokens(self) -> bool:
        return bool(self.serve.get("token_file"))

    @property
    def drain_seconds(self) -> float:
        """How long turns of a replica that is to end may go on."""
        return float(self.serve.get("drain_timeout", DRAIN.default))

    @property
    def cluster_secret(self) -> str:
        return str(self.serve.get("cluster_secret") or "")

    @property
    def history_ca(self) -> str:
        """The file of the authority that the history service's certificate is of, if it has one."""
        return str(self.serve.get("history_ca") or "")

    @property
    def is_elsewhere(self) -> bool:
        """Whether the history service is none of the cluster's."""
        return self.history.startswith(("history://", "historys://"))


def settings_of(arguments: Mapping[str, Any]) -> ClusterSettings:
    """The arguments, checked; an error names the one that is wrong."""
    known = {each.name: each for each in fields(ClusterSettings)}
    for name in arguments:
        if name not in known:
            raise ConfigError(f"args: there is no {name!r}; there are {', '.join(known)}")
    for name, value in arguments.items():
        default = ClusterSettings.__dataclass_fields__[name].default
        kind = dict if name in ("serve", "history_serve") else type(default)
        accepted = (int, float) if kind is float else kind
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise ConfigError(f"args: {name} is {value!r}, and has to be of type {kind.__name__}")
    settings = ClusterSettings(**arguments)
    if settings.replicas < 1:
        raise ConfigError("args: replicas has to be at least 1")
    if settings.history and "://" not in settings.history and not settings.history.startswith("/"):
        raise ConfigError(
            f"args: history is {settings.history!r}, and has to be a whole path or a URL"
        )
    for name in ("tls_cert", "tls_key", "tls_client_ca"):
        if name in settings.serve:
            raise ConfigError(f"args: serve.{name}: {NO_TLS}")
    if PASSWORD.search(settings.history):
        raise ConfigError(
            "args: history has a password, and Ray shows args to whoever asks it: put that into a file of "
            "Ray's head (~/.pgpass, or PGPASSFILE in its environment; docs/postgresql.md)"
        )
    _check("serve", settings.serve, SERVE_SETTINGS, OURS)
    _check("history_serve", settings.history_serve, HISTORY_SETTINGS, OURS_OF_HISTORY)
    for name in ("token_file", "cluster_secret", "history_ca"):
        if (file := settings.serve.get(name)) and not Path(str(file)).is_absolute():
            raise ConfigError(f"args: serve.{name} has to be a whole path")
    try:
        DRAIN.parse(str(settings.serve.get("drain_timeout", DRAIN.default)))
    except ValueError as error:
        raise ConfigError(f"args: serve.drain_timeout {error}") from None
    if not settings.local:
        _check_several(settings)
    return settings


def replica_command(
    settings: ClusterSettings, name: str, host: str, data: str, history: str
) -> list[str]:
    """`pensieve serve` of one replica.  The only place that knows its flags."""
    command = [*_program("serve"), "--address", f"{host}:0", "--http", f"{host}:0", "--data", data]
    command += ["--store", history, "--replica", name]
    command += _flags(settings.serve, SERVE_SETTINGS)
    if settings.insecure or host != LOOPBACK:
        command.append("--insecure")
    return [*command, settings.model] if settings.model else command


def history_command(settings: ClusterSettings, host: str, folder: str) -> list[str]:
    """`pensieve history`; without a folder of its own the history is in the user's."""
    command = [*_program("history"), "--address", f"{host}:{settings.history_port}"]
    if settings.cluster_secret:
        command += ["--cluster-secret", settings.cluster_secret]
    if host != LOOPBACK:
        command.append("--insecure")  # between nodes of a cluster, whose network is private
    command += _flags(settings.history_serve, HISTORY_SETTINGS)
    if "://" in settings.history:
        return [*command, "--data", folder]
    return [*command, "--data", str(Path(settings.history or folder) / "history")]


def history_environment(settings: ClusterSettings) -> dict[str, str]:
    """Of the same process: the table of processes shows command lines to everybody."""
    return {STORE.variable: settings.history} if "://" in settings.history else {}


def data_folder(settings: ClusterSettings) -> Path:
    """Of what a node keeps."""
    if settings.history and "://" not in settings.history:
        return Path(settings.history)
    return default_data_folder(os.environ) / "cluster"


def _check_several(settings: ClusterSettings) -> None:
    """What a cluster of several machines has to say."""
    if not settings.needs_tokens and not settings.insecure:
        raise ConfigError(
            "args: whoever reaches a node can call its daemon: give serve.token_file, or say "
            "`insecure: true` (`local: true` where all nodes are this machine)"
        )
    if not settings.insecure and not settings.is_elsewhere and not settings.cluster_secret:
        raise ConfigError(
            "args: whoever reaches Ray's head can read and write the history: give serve.cluster_secret, a "
            "file that all nodes have, or say `insecure: true`"
        )
    if not settings.history:
        raise ConfigError(
            "args: history: say where it is kept: a folder of Ray's head that outlives it, or a URL"
        )


def _program(command: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "pensieve", command)


def _flags(given: Mapping[str, Any], table: Table) -> list[str]:
    flags = {each.name: each for each in table}
    words: list[str] = []
    for name, value in given.items():
        if flags[name].metavar:
            words += [flags[name].flag, str(value)]
        elif value:
            words.append(flags[name].flag)
    return words


def _check(where: str, given: Mapping[str, Any], table: Table, ours: frozenset[str]) -> None:
    command = "serve" if where == "serve" else "history"
    names = {each.name for each in table}
    for name, value in given.items():
        if name in ours:
            raise ConfigError(f"args: {where}.{name} is the cluster's to decide")
        if name in REMOVED:
            raise removed(f"args: {where}.{name}", name)
        if name not in names:
            raise ConfigError(f"args: `pensieve {command}` has no setting {name!r}")
        if not isinstance(value, str | int | float | bool):
            raise ConfigError(f"args: {where}.{name} is {value!r}, and has to be one value")
