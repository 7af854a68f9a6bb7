"""`pensieve doctor`: what this machine has, and what of it Pensieve can use."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from pensieve import __version__
from pensieve.config import available_memory_bytes, default_data_folder

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "grpcio",
    "protobuf",
    "sqlite-utils",
    "pysqlite3",
)


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="what this machine has, and what is missing",
        description="Print what a report of a problem should contain. Exit code 1 if something is wrong.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    found = dict(findings())
    problems = list(wrong(found))
    if arguments.json:
        print(json.dumps({"findings": found, "problems": problems}))
    else:
        for name, value in found.items():
            print(f"{name:20} {value}")
        for problem in problems:
            print(f"! {problem}")
        if not problems:
            print("nothing is wrong")
    return 1 if problems else 0


def findings() -> Iterator[tuple[str, str]]:
    yield "pensieve", __version__
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield "platform", platform.platform()
    for name in PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            yield name, "missing"
    from pensieve.store.connection import preferred_driver

    yield "sqlite", f"{preferred_driver.sqlite_version} ({preferred_driver.__name__})"
    yield (
        "cpu cores",
        str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
    )
    yield "memory available", f"{available_memory_bytes() / 2**30:.1f} GiB"
    yield "cpu kernels", _cpu_kernels()
    yield "accelerator", _accelerator()
    data = Path(os.environ.get("PENSIEVE_DATA") or default_data_folder(os.environ))
    yield "data folder", f"{data} ({_state(data)})"


def _cpu_kernels() -> str:
    try:
        import torch

        from pensieve.kernels import cpu
    except ImportError:
        return "unknown: torch is missing"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        name = cpu.instruction_set(torch.float32, 64)
    if name is None:
        return "missing: installed without a C++ compiler; everything runs in torch, and slower"
    return f"{name}, {torch.get_num_threads()} threads"


def _accelerator() -> str:
    try:
        import torch
    except ImportError:
        return "unknown: torch is missing"
    if not torch.cuda.is_available():
        return "none; the device tier is in memory"
    return f"{torch.cuda.get_device_name(0)}; this version computes on the CPU"


def _state(data: Path) -> str:
    if not data.exists():
        return "will be made"
    if not os.access(data, os.W_OK):
        return "cannot be written"
    database = data / "conversations.db"
    return f"history of {database.stat().st_size:,} bytes" if database.exists() else "empty"


def wrong(found: dict[str, str]) -> Iterator[str]:
    for name in PACKAGES[:-1]:
        if found[name] == "missing":
            yield f"the package {name} is missing"
    version = tuple(int(part) for part in found["sqlite"].split()[0].split("."))
    if version < (3, 51, 3):
        yield (
            f"SQLite {found['sqlite']} may damage a history when two connections checkpoint at once; "
            "install pysqlite3"
        )
    if "cannot be written" in found["data folder"]:
        yield f"the data folder cannot be written: {found['data folder']}"
