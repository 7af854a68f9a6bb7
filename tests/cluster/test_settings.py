"""What a cluster's arguments may say, and the command lines that come of them."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

from pensieve.cli.main import parser
from pensieve.cluster.settings import (
    history_command,
    history_environment,
    replica_command,
    settings_of,
)
from pensieve.config import resolve
from pensieve.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"modle": "smollm2"}, "args: there is no 'modle'; there are model, replicas"),
        ({"replicas": "two"}, "args: replicas is 'two', and has to be of type int"),
        ({"replicas": True}, "args: replicas is True, and has to be of type int"),
        ({"replicas": 0}, "args: replicas has to be at least 1"),
        ({"serve": {"adress": "x"}}, "args: `pensieve serve` has no setting 'adress'"),
        ({"serve": {"address": "x"}}, "args: serve.address is the cluster's to decide"),
        ({"serve": {"threads": [1]}}, "args: serve.threads is [1], and has to be one value"),
        ({"serve": {"token_file": "tokens"}}, "args: serve.token_file has to be a whole path"),
        ({"serve": {"drain_timeout": "soon"}}, "args: serve.drain_timeout is a number"),
        ({"history_serve": {"leese": 2}}, "args: `pensieve history` has no setting 'leese'"),
        (
            {"history_serve": {"history_address": "x"}},
            "args: history_serve.history_address is the cluster's to decide",
        ),
        ({"history_serve": 2}, "args: history_serve is 2, and has to be of type dict"),
        (
            {"serve": {"tls_cert": "/etc/pensieve/cert.pem"}},
            "args: serve.tls_cert: Ray's proxies speak no TLS",
        ),
        ({}, "args: whoever reaches a node can call its daemon: give serve.token_file, or say"),
        (
            {"serve": {"token_file": "/tokens"}, "history": "/data"},
            "args: whoever reaches Ray's head can read and write the history: give serve.cluster_sec",
        ),
        ({"serve": {"history_ca": "ca.pem"}}, "args: serve.history_ca has to be a whole path"),
        ({"insecure": True}, "args: history: say where it is kept: a folder of Ray's head"),
        (
            {"history": "postgresql://u:pw@db/pensieve"},
            "args: history has a password, and Ray shows args to whoever asks it: put that into a f",
        ),
        ({"history": "postgresql://db/pensieve?password=pw"}, "args: history has a password"),
        ({"history": "data"}, "args: history is 'data', and has to be a whole path or a URL"),
    ],
)
def test_an_error_names_the_argument_that_is_wrong(arguments: dict[str, Any], message: str) -> None:
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
    history = "history://127.0.0.1:50060"
    command = replica_command(settings, "ada", "127.0.0.1", "/data/ada", history)
    assert command[:4] == [sys.executable, "-m", "pensieve", "serve"]
    assert command[4:] == [
        *("--address", "127.0.0.1:0", "--http", "127.0.0.1:0"),
        *("--data", "/data/ada", "--store", history, "--replica", "ada"),
        *("--threads", "2", "--traces", "smollm2"),
    ]


def test_the_history_service_gets_settings_of_its_own() -> None:
    settings = settings_of(
        {
            "history": "/data",
            "local": True,
            "history_serve": {"lease": 4.0, "event_log": "/data/events.jsonl"},
        }
    )
    command = history_command(settings, "127.0.0.1", "/elsewhere")
    assert command[:4] == [sys.executable, "-m", "pensieve", "history"]
    assert command[4:] == [
        *("--address", "127.0.0.1:50060", "--lease", "4.0"),
        *("--event-log", "/data/events.jsonl", "--data", "/data/history"),
    ]


def test_the_secret_of_the_history_is_the_daemons_and_the_services() -> None:
    serve = {"token_file": "/etc/tokens.toml", "cluster_secret": "/etc/history"}
    settings = settings_of({"history": "/data", "serve": serve})
    service = history_command(settings, "10.0.0.5", "/elsewhere")
    daemon = replica_command(settings, "ada", "10.0.0.6", "/data/ada", "history://10.0.0.5:50060")
    for command in (service, daemon):
        at = command.index("--cluster-secret")
        assert command[at + 1] == "/etc/history"


def test_a_history_that_is_not_the_clusters_has_its_own_rules() -> None:
    serve = {"token_file": "/etc/tokens.toml"}
    assert settings_of({"history": "historys://10.0.0.9:50060", "serve": serve}).is_elsewhere


def test_the_address_of_a_database_is_in_no_command_line() -> None:
    settings = settings_of({"local": True, "history": "postgresql://ada@db:5432/pensieve"})
    command = history_command(settings, "127.0.0.1", "/data")
    assert command[4:] == ["--address", "127.0.0.1:50060", "--data", "/data"]
    environment = history_environment(settings)
    assert environment == {"PENSIEVE_STORE": "postgresql://ada@db:5432/pensieve"}
    arguments = parser().parse_args(command[3:])
    assert resolve({}, environment, None, arguments.table).settings.store == settings.history
    assert history_environment(settings_of({"local": True, "history": "/data"})) == {}
