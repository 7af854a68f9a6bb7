"""Limits of control groups (versions 1 and 2), as containers and service managers set them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pensieve.config import machine


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine, "GROUPS", tmp_path)
    monkeypatch.setattr(machine, "OWN_GROUPS", tmp_path / "own")
    return tmp_path


def write(groups: Path, own: str, **files: str) -> None:
    """Write files of a control group. In a name, `__` stands for a slash."""
    (groups / "own").write_text(own)
    for name, text in files.items():
        path = groups / name.replace("__", "/").replace("DOT", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("own", "files", "quota"),
    [
        ("0::/a/b\n", {}, None),
        ("0::/a/b\n", {"a__b__cpuDOTmax": "max 100000\n"}, None),
        ("0::/a/b\n", {"a__b__cpuDOTmax": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a__b__cpuDOTmax": "400000 100000", "a__cpuDOTmax": "50000 100000"}, 0.5),
        ("0::/\n", {"cpuDOTmax": "200000 100000"}, 2.0),  # in a container
        ("0::/../host/path\n", {"cpuDOTmax": "200000 100000"}, 2.0),
        ("1:cpuset:/a\n4:memory:/a\n", {"cpu__a__cpuDOTcfs_quota_us": "1"}, None),
        (
            "3:cpu,cpuacct:/docker/x\n0::/\n",
            {
                "cpu,cpuacct__cpuDOTcfs_quota_us": "150000",
                "cpu,cpuacct__cpuDOTcfs_period_us": "100000",
            },
            1.5,
        ),
        (
            "1:cpu:/a\n",
            {"cpu__a__cpuDOTcfs_quota_us": "-1", "cpu__a__cpuDOTcfs_period_us": "100000"},
            None,
        ),
        (
            "1:cpu:/a\n",
            {"cpu__a__cpuDOTcfs_quota_us": "25000", "cpu__a__cpuDOTcfs_period_us": "50000"},
            0.5,
        ),
    ],
)
def test_the_smallest_quota_of_the_group_and_its_parents_counts(
    groups: Path, own: str, files: dict[str, str], quota: float | None
) -> None:
    write(groups, own, **files)
    assert machine.cpu_quota() == quota


def test_without_control_groups_there_is_no_quota(groups: Path) -> None:
    assert machine.cpu_quota() is None
    assert machine.available_memory_bytes() > 0


@pytest.mark.parametrize(
    ("own", "files"),
    [
        ("0::/a\n", {"a__memoryDOTmax": "5000", "a__memoryDOTcurrent": "2000"}),
        (
            "4:memory:/a\n",
            {
                "memory__a__memoryDOTlimit_in_bytes": "5000",
                "memory__a__memoryDOTusage_in_bytes": "2000",
            },
        ),
    ],
)
def test_available_memory_is_the_rest_of_the_groups_limit(
    groups: Path, own: str, files: dict[str, str]
) -> None:
    free = machine.available_memory_bytes()
    write(groups, own, **dict.fromkeys(files, "max"))
    assert machine.available_memory_bytes() > free / 2
    write(groups, own, **files)
    assert machine.available_memory_bytes() == 3000


@pytest.mark.parametrize(
    ("own", "files"),
    [
        (
            "0::/a\n",
            {
                "a__memoryDOTmax": "5000",
                "a__memoryDOTcurrent": "4900",
                "a__memoryDOTstat": "anon 900\nfile 4000\ninactive_anon 100\ninactive_file 3500\n",
            },
        ),
        (
            "4:memory:/a\n",
            {
                "memory__a__memoryDOTlimit_in_bytes": "5000",
                "memory__a__memoryDOTusage_in_bytes": "4900",
                # Version 1 has the group's own figures. Figures with `total_` include the subgroups.
                "memory__a__memoryDOTstat": "inactive_file 7\ntotal_inactive_file 3500\n",
            },
        ),
        (
            "0::/a\n",
            {
                "a__memoryDOTmax": "3600",
                "a__memoryDOTcurrent": "1",
                "a__memoryDOTstat": "inactive_file 9999\nbroken\n",  # read later than the usage
            },
        ),
    ],
)
def test_cached_files_do_not_count_as_used_memory_of_the_group(
    groups: Path, own: str, files: dict[str, str]
) -> None:
    write(groups, own, **files)
    assert machine.available_memory_bytes() == 3600
