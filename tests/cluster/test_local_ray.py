"""The state of a local Ray cluster, without Ray."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pensieve.cluster import local_ray
from pensieve.cluster.local_ray import LocalRay, Node
from pensieve.errors import Unavailable


def ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def cluster_of(folder: Path, node: Node) -> LocalRay:
    (folder / "ray.json").write_text(json.dumps({"address": "127.0.0.1:1", "nodes": [node]}))
    return LocalRay(folder)


def test_a_node_that_died_before_its_start_time_was_read_does_not_count_as_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its start time is "gone", and so is the start time of every process that has ended."""
    pid = ended_pid()
    assert local_ray._start_time(pid) == local_ray.GONE
    node = Node(pid, local_ray.GONE)
    assert not node.runs
    ray = cluster_of(tmp_path, node)
    assert ray.address is None
    assert ray.stop() is False
    monkeypatch.setattr(LocalRay, "_start_node", lambda *_: node)
    (tmp_path / "ray-0.log").write_text("it failed")
    with pytest.raises(Unavailable, match="Ray did not start"):
        ray.start(1, 1)
    assert not (tmp_path / "ray.json").exists()


def test_a_node_may_end_before_it_is_signalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signalled: list[tuple[int, int]] = []

    def kill(pid: int, number: int) -> None:
        signalled.append((pid, number))
        started.clear()
        raise ProcessLookupError

    started = {17: "5"}
    monkeypatch.setattr(local_ray, "_start_time", lambda pid: started.get(pid, local_ray.GONE))
    monkeypatch.setattr(os, "kill", kill)
    ray = cluster_of(tmp_path, Node(17, "5"))
    assert ray.address == "127.0.0.1:1"
    assert ray.stop() is True
    assert signalled == [(17, signal.SIGTERM)]
