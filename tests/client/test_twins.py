"""The sync and async clients have the same methods and documentation."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import pensieve.client
from pensieve.client.admin import Admin
from pensieve.client.aio_base_client import AsyncBaseClient
from pensieve.client.aio_connection import AsyncConnection, AsyncStream
from pensieve.client.base_client import BaseClient
from pensieve.client.connection import Connection, Stream

ROOT = Path(__file__).resolve().parent.parent.parent
PUBLIC = [getattr(pensieve.client, name) for name in pensieve.client.__all__]


def public_members(kind: type) -> dict[str, object]:
    return {name: member for name, member in vars(kind).items() if not name.startswith("_")}


def test_the_sync_client_is_generated_from_the_async_client() -> None:
    script = ROOT / "scripts" / "generate_sync_client"
    checked = subprocess.run(
        [sys.executable, script, "--check"], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize(
    ("kind", "twin"),
    [
        (pensieve.client.Client, pensieve.client.AsyncClient),
        (pensieve.client.Conversation, pensieve.client.AsyncConversation),
        (pensieve.client.Prefix, pensieve.client.AsyncPrefix),
        (pensieve.client.Turn, pensieve.client.AsyncTurn),
        (pensieve.client.Jobs, pensieve.client.AsyncJobs),
        (BaseClient, AsyncBaseClient),
        (Connection, AsyncConnection),
        (Stream, AsyncStream),
    ],
)
def test_the_sync_and_async_classes_have_the_same_methods_arguments_and_docstrings(
    kind: type, twin: type
) -> None:
    methods, others = public_members(kind), public_members(twin)
    assert {name for name in others if not isinstance(others[name], property)} <= {*methods}
    for name, method in methods.items():
        other = others[name]
        if isinstance(method, property):
            assert (kind, name) == (pensieve.client.Turn, "reply") or isinstance(other, property)
            continue
        assert inspect.isfunction(method)
        assert inspect.isfunction(other)
        names = [*inspect.signature(method).parameters]
        assert [*inspect.signature(other).parameters] == names, name
        assert method.__doc__ is not None
        assert other.__doc__ is not None
        in_threads = other.__doc__.replace("task", "thread").replace("Async", "")
        assert method.__doc__.replace("Async", "").split() == in_threads.split(), name


@pytest.mark.parametrize("kind", [*PUBLIC, Admin], ids=lambda kind: kind.__name__)
def test_every_public_class_and_method_is_documented(kind: type) -> None:
    assert kind.__doc__
    assert not kind.__doc__.startswith(
        f"{kind.__name__}("
    )  # that would be the docstring which dataclass generates
    for name, member in public_members(kind).items():
        if callable(member) or isinstance(member, property):
            assert inspect.getdoc(member), f"{kind.__name__}.{name}"
