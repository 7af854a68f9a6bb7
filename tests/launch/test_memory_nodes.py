"""Memory is spread over several nodes, an operator's policy is kept, and a refusal is reported."""

from __future__ import annotations

import os
import platform
import threading
from pathlib import Path

import pytest

from pensieve.launch import memory_nodes
from pensieve.launch.memory_nodes import (
    DEFAULT,
    INTERLEAVE,
    SYSTEM_CALLS,
    parsed_numbers,
    policy,
    set_policy,
    spread_memory,
    usable_nodes,
)


def may_set_policies() -> bool:
    """Return whether policies may be set. A container may forbid this."""
    try:
        set_policy(policy())  # changes nothing
    except OSError:
        return False
    return True


on_linux = pytest.mark.skipif(
    platform.system() != "Linux"
    or platform.machine() not in SYSTEM_CALLS
    or not may_set_policies(),
    reason="this process may not say where its memory lies",
)


def machine(folder: Path, cpus_of_nodes: list[str], with_memory: str, allowed: str) -> list[Path]:
    """Write the files that Linux would show on such a machine."""
    nodes, status = folder / "nodes", folder / "status"
    for number, cpus in enumerate(cpus_of_nodes):
        (nodes / f"node{number}").mkdir(parents=True)
        (nodes / f"node{number}" / "cpulist").write_text(f"{cpus}\n")
    (nodes / "has_memory").write_text(f"{with_memory}\n")
    status.write_text(f"Name:\tpython\nMems_allowed_list:\t{allowed}\n")
    return [nodes, status]


def test_numbers_as_linux_writes_them() -> None:
    assert parsed_numbers("0-2,5,8-9\n") == {0, 1, 2, 5, 8, 9}
    assert parsed_numbers("\n") == set()


@pytest.mark.parametrize(
    ("cpus", "with_memory", "allowed", "nodes"),
    [
        (["0-31", "32-63"], "0-1", "0-1", {0, 1}),
        (["0-31", "32-63"], "0-1", "1", {1}),  # limited by numactl --membind or a cpuset
        (["0-31", "32-63"], "1", "0-1", {1}),
        (["0-31", ""], "0-1", "0-1", {0}),  # node 1 has memory but no processors (CXL)
        (["0-15", "16-31", "32-47", "64-79"], "0-3", "0-3", {0, 1, 2}),
    ],
)
def test_nodes_count_that_have_processors_and_memory_for_this_process(
    cpus: list[str],
    with_memory: str,
    allowed: str,
    nodes: set[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    assert usable_nodes(*machine(tmp_path, cpus, with_memory, allowed)) == nodes


def test_a_system_without_such_files_has_no_nodes(tmp_path: Path) -> None:
    assert usable_nodes(tmp_path / "nothing", tmp_path / "nothing") == set()


def reported(
    monkeypatch: pytest.MonkeyPatch, nodes: set[int], before: int = DEFAULT
) -> tuple[list[str], memory_nodes.Policy]:
    """Return the reported lines and the policy that was set. Use a thread: policies are per thread."""
    lines: list[str] = []
    after: list[memory_nodes.Policy] = []
    monkeypatch.setattr(memory_nodes, "usable_nodes", lambda: frozenset(nodes))

    def run() -> None:
        if before != DEFAULT:
            set_policy((before, frozenset({0})))
        spread_memory(lines.append)
        after.append(policy())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return lines, after[0]


@on_linux
def test_one_node_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reported(monkeypatch, {0}) == ([], (DEFAULT, frozenset()))


@on_linux
def test_what_the_operator_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    bind = 2
    assert reported(monkeypatch, {0, 1}, before=bind) == ([], (bind, frozenset({0})))


@on_linux
def test_a_policy_that_the_kernel_refuses_is_said_and_the_engine_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines, after = reported(monkeypatch, {1000, 1001})  # no machine has these nodes
    assert after == (DEFAULT, frozenset())
    assert len(lines) == 1
    assert "allow the system call set_mempolicy" in lines[0]


@on_linux
def test_pages_are_spread_by_the_kernels_own_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = memory_nodes.set_policy
    monkeypatch.setattr(memory_nodes, "set_policy", lambda each: wanted((each[0], frozenset({0}))))
    lines, after = reported(monkeypatch, {0, 1})
    assert lines == ["memory is spread over 2 memory nodes"]
    assert after == (INTERLEAVE, frozenset({0}))
