"""Decide which of the collected tests run (hooks of tests/conftest.py).

Two kinds of tests are left out. The summary has one line for each kind:

* EXPENSIVE tests, which find something only when their corner of the code changes, are divided into three
  parts. `scripts/test` runs one part each day, and `--part all` runs every part. Plain pytest runs every
  part.
* Tests that need something that this machine lacks, such as a GPU: `@pytest.mark.needs("gpu")`, or
  `leave_out` from the conftest.py of a folder.
"""

from __future__ import annotations

import shutil
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable

import pytest

NUM_PARTS = 3
ALL = "all"
# Prefixes of test ids.
EXPENSIVE = (
    "tests/kernels/test_cross.py",  # an emulated ARM processor
    "tests/kernels/tiles/",  # emulated AMX
    "tests/kernels/attention/test_emulated.py",  # emulated CUDA threads
    "tests/kernels/attention/test_packs.py",
    "tests/kernels/attention/test_fp8.py",
    "tests/kernels/attention/test_cpu.py",  # every shape, type and instruction set
    "tests/kernels/layer/",
    "tests/kernels/test_threads.py",
    "tests/kernels/test_nvrtc.py",  # CUDA kernels, compiled
    "tests/model/fuse/",  # every family, type and instruction set
    "tests/model/parallel/",  # ranks and stages
    "tests/launch/test_remote_rank.py",
    "tests/conversations/test_exactness.py::test_every_reply_equals",  # of each family and policy
    "tests/conversations/test_exactness.py::test_every_reply_of",
    "tests/conversations/test_exactness.py::test_every_reply_under",
    "tests/conversations/test_constraints.py",
    "tests/cluster/test_ray_up.py::test_two_replicas",
    "tests/cluster/test_ray_nemesis.py",  # storms
    "tests/cluster/test_nemesis.py",
    "tests/cluster/test_moves.py",
    "tests/conversations/test_chaos.py",  # clients that stall, abandon and flood
    "tests/conversations/test_overload.py",
    "tests/api/http/test_slow_clients.py",
    "tests/conversations/test_hung_engine.py",  # waits until the daemon gives up an engine
    "tests/conversations/test_suspects.py",
    "tests/conversations/test_crashes.py",  # killed at random moments
    "tests/api/grpc/test_peers.py",
    "tests/conversations/test_backing_up.py",
    "tests/jobs/test_job_crash.py",
    "tests/store/test_postgres_crash.py",
    "tests/store/test_power_loss.py",
    "tests/cli/test_ctrl_c.py",
    "tests/api/grpc/test_fuzz.py",  # thousands of broken messages
    "tests/api/grpc/test_structured_fuzz.py",
    "tests/api/openai/test_any_body.py",
    "tests/text/test_tool_calls_hostile.py",  # time and memory of hostile replies
    "tests/sim/",  # crowds in the simulator
    "tests/cli/test_simulate.py",
    "tests/cli/test_simulate_journal.py",
    "tests/scripts/test_papers.py",
    "tests/scripts/test_gpu_bench.py",
    "tests/scripts/test_machines.py",
    "tests/scripts/test_batch_sharing.py",
    "tests/scripts/test_measurements.py",
    "tests/scripts/test_schedules.py",
    "tests/scripts/test_servers.py",
    "tests/bench/",  # measurements
    "tests/cli/test_profile.py",
    "tests/faults/test_fault_search.py::test_nothing_acknowledged_is_lost",
    "tests/faults/test_every_store_call.py",
    "tests/faults/test_planted_faults.py",
    "tests/core/test_planted_faults.py",
    "tests/core/test_small_worlds.py",
    "tests/core/test_traffic.py::test_every_reply",  # random worlds of the scheduler
    "tests/store/test_compaction.py",  # each statement of each step fails once
    "tests/store/test_backup.py",  # each moment of a backup is restored
    "tests/cli/test_chat_terminal.py",
)
# Files whose tests share a slow start, or depend on each other. Each file is in one part as a whole.
EXPENSIVE_TOGETHER = (
    "tests/cluster/test_ray_cluster.py",
    "tests/doc_commands/test_doc_commands.py",  # every command of the documents
    "tests/test_newcomer.py",
    "tests/cluster/test_scenes.py",
)

LEFT_OUT = pytest.StashKey[Counter[str]]()  # reason -> number of tests


def lacks_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "no GPU"


def lacks_browser() -> str | None:
    return None if shutil.which("chromium") or shutil.which("chromium-browser") else "no Chromium"


LACKS: dict[str, Callable[[], str | None]] = {"gpu": lacks_gpu, "browser": lacks_browser}


def pytest_addoption(parser: pytest.Parser) -> None:
    choices = (*map(str, range(1, NUM_PARTS + 1)), ALL)
    parser.addoption(
        "--part", choices=choices, default=ALL, help="which third of the expensive sets runs"
    )


def pytest_report_header(config: pytest.Config) -> str:
    return f"expensive sets: part {config.getoption('part')} of {NUM_PARTS}"


@pytest.hookimpl(tryfirst=True)  # so that the part of a test does not depend on -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    parts = parts_of(items)
    leave_out(config, items, _lacking)
    if (part := config.getoption("part")) != ALL:
        other = f"of other parts of the expensive sets (this is part {part})"
        leave_out(config, items, lambda item: other if parts.get(item, part) != part else None)
    long = {_file_of(item) for item in parts}
    items.sort(
        key=lambda item: _file_of(item) not in long
    )  # run short files last, so that all processes end at about the same time


def parts_of(items: list[pytest.Item]) -> dict[pytest.Item, str]:
    """Return the part of each expensive test.

    Within a file, tests are assigned to the parts in rotation. So a new test does not move tests of other
    files. Nightly tests rotate separately, so that each part also gets its share of the daytime tests.
    """
    parts: dict[pytest.Item, str] = {}
    positions: defaultdict[tuple[str, bool], int] = defaultdict(int)
    for item in items:
        file = _file_of(item)
        if file in EXPENSIVE_TOGETHER:
            parts[item] = str(EXPENSIVE_TOGETHER.index(file) % NUM_PARTS + 1)
        elif item.nodeid.startswith(EXPENSIVE):
            kind = (file, item.get_closest_marker("full") is not None)
            parts[item] = str((zlib.crc32(file.encode()) + positions[kind]) % NUM_PARTS + 1)
            positions[kind] += 1
    return parts


def _file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def leave_out(
    config: pytest.Config, items: list[pytest.Item], why: Callable[[pytest.Item], str | None]
) -> None:
    """Deselect each test for which `why` gives a reason, and count the reasons."""
    reasons = [why(item) for item in items]
    dropped = [item for item, reason in zip(items, reasons, strict=True) if reason]
    if dropped:
        _left_out(config).update(reason for reason in reasons if reason)
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item, reason in zip(items, reasons, strict=True) if not reason]


def _lacking(item: pytest.Item) -> str | None:
    needed = (name for mark in item.iter_markers("needs") for name in mark.args)
    return next((why for name in needed if (why := LACKS[name]())), None)


def _left_out(config: pytest.Config) -> Counter[str]:
    return config.stash.setdefault(LEFT_OUT, Counter())


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["left_out"] = dict(_left_out(session.config))


@pytest.hookimpl(optionalhook=True)  # a hook of xdist; all workers collect the same tests
def pytest_testnodedown(node: object, error: object) -> None:
    config: pytest.Config = getattr(node, "config")  # noqa: B009
    found: dict[str, int] = getattr(node, "workeroutput", {}).get("left_out", {})
    config.stash[LEFT_OUT] = Counter(found)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    found = _left_out(config)
    reasons = "; ".join(f"{count:,} {reason}" for reason, count in sorted(found.items()))
    if reasons:
        terminalreporter.write_line(f"left out: {reasons}")
