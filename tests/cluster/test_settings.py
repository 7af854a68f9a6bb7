"""The settings of a cluster, and the command lines made from them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from pensieve.cli.main import parser
from pensieve.cluster.settings import replica_command, settings_of, store_environment
from pensieve.cluster.slots import Slot
from pensieve.config import resolve
from pensieve.errors import ConfigError

SLOT = Slot(3, Path("/data/replicas/3"), -1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"modle": "smollm2"}, "args: unknown argument 'modle'; known arguments: model, replicas"),
        ({"replicas": "two"}, "args: replicas must be of type int, not 'two'"),
        ({"replicas": True}, "args: replicas must be of type int, not True"),
        ({"replicas": 0}, "args: replicas must be at least 1"),
        ({"serve": {"adress": "x"}}, "args: `pensieve serve` has no setting 'adress'"),
        ({"serve": {"address": "x"}}, "args: serve.address cannot be set"),
        ({"serve": {"threads": [1]}}, "args: serve.threads must be a single value, not [1]"),
        ({"serve": {"token_file": "tokens"}}, "args: serve.token_file must be an absolute path"),
        ({"serve": {"drain_timeout": "soon"}}, "args: serve.drain_timeout must be a number"),
        (
            {"serve": {"tls_cert": "/etc/pensieve/cert.pem"}},
            "args: serve.tls_cert: Ray's proxies and replicas do not use TLS",
        ),
        ({}, "args: anybody who reaches a node could call its daemon. Set serve.token_file"),
        (
            {"serve": {"cluster_secret": "key"}},
            "args: serve.cluster_secret must be an absolute path",
        ),
        ({"insecure": True}, "args: serve.store: several hosts need a postgresql://USER@HOST/NAME"),
        (
            {"insecure": True, "serve": {"store": "sqlite:///data/history.db"}},
            "args: serve.store: several hosts need a postgresql://USER@HOST/NAME",
        ),
        (
            {"local": True, "serve": {"store": "mysql://db/pensieve"}},
            "args: serve.store 'mysql://db/pensieve' must be an address such as postgresql://user@host/name",
        ),
        (
            {"insecure": True, "serve": {"store": "postgresql://u:pw@db/pensieve"}},
            "args: serve.store contains a password, but Ray shows args to everybody",
        ),
        (
            {"insecure": True, "serve": {"store": "postgresql://db/pensieve?password=pw"}},
            "args: serve.store contains a password",
        ),
        ({"data": "data"}, "args: data must be an absolute path, not 'data'"),
        (
            {"history": "/data"},
            "args: unknown argument 'history'; known arguments: model, replicas, data",
        ),
    ],
)
def test_the_error_names_the_invalid_argument(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        settings_of(arguments)


def test_a_replica_is_an_ordinary_daemon() -> None:
    settings = settings_of(
        {
            "model": "smollm2",
            "local": True,
            "serve": {"threads": 2, "traces": True},
        }
    )
    command = replica_command(settings, "ada", "127.0.0.1", SLOT)
    assert command[:4] == [sys.executable, "-m", "pensieve", "serve"]
    assert command[4:] == [
        *("--address", "127.0.0.1:0", "--http", "127.0.0.1:0"),
        *("--data", "/data/replicas/3", "--replica", "ada"),
        *("--threads", "2", "--traces", "smollm2"),
    ]


def test_the_ports_of_a_nodes_daemons_follow_from_daemon_port_and_the_slot() -> None:
    settings = settings_of({"local": True, "daemon_port": 51000})
    command = replica_command(settings, "ada", "127.0.0.1", SLOT)
    assert command[4:8] == ["--address", "127.0.0.1:51006", "--http", "127.0.0.1:51007"]


def test_a_local_cluster_has_its_history_in_its_folder() -> None:
    settings = settings_of({"local": True, "data": "/data"})
    assert settings.store == "sqlite:///data/history/conversations.db"


def test_no_command_line_contains_the_database_address() -> None:
    url = "postgresql://ada@db:5432/pensieve"
    settings = settings_of({"insecure": True, "serve": {"store": url}})
    command = replica_command(settings, "ada", "10.0.0.6", SLOT)
    assert url not in command
    assert "--insecure" in command
    environment = store_environment(settings)
    assert environment == {"PENSIEVE_STORE": url}
    arguments = parser().parse_args(command[3:])
    assert resolve({}, environment, None, arguments.table).settings.store == url
