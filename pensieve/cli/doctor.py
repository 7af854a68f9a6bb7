"""`pensieve doctor`: print what this machine has, and what is missing."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from pensieve import __version__
from pensieve.config import default_data_folder, resolve, settings_named
from pensieve.config.machine import available_memory_bytes, cpu_quota, num_cores
from pensieve.errors import PensieveError, one_line
from pensieve.extras import PACKAGES

UNKNOWN = "unknown: "
REFUSED = "cannot be loaded: "
# settings that affect loading a model
LOADING = settings_named("device", "dtype", "context_max", "weights", "kv_dtype", "chat_template")
# Disk space of a stored turn, and of each token in it. Measured with English text (docs/http.md).
TURN_BYTES, TOKEN_BYTES = 2000, 10
USUAL_TURNS, USUAL_TOKENS = 10, 250
OPTIONAL = ("cupy-cuda13x", "cupy-cuda12x", "accelerate", "gguf")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="print what this machine has, and what is missing",
        description="Print the facts that a bug report needs. Exit code 1 if something is wrong.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="also load this model, and say how its layers would run here",
    )
    for setting in LOADING:
        parser.add_argument(
            setting.flag, dest=setting.name, metavar=setting.metavar, help=setting.help
        )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    found = dict(findings())
    if arguments.model:
        found.update(_model(arguments))
    problems = list(problems_of(found))
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
    for name in (*PACKAGES.values(), "pysqlite3"):
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            yield name, "missing"
    for name in OPTIONAL:
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield name, metadata.version(name)
    yield "sqlite", _sqlite()
    quota = cpu_quota()
    yield "cpu cores", f"{num_cores()}" + (f", {quota:g} by quota" if quota is not None else "")
    yield "memory available", f"{available_memory_bytes() / 2**30:.1f} GiB"
    yield "cpu kernels", _cpu_kernels()
    yield "gpu", _gpu()
    yield "gpu kernels", _gpu_kernels()
    data = Path(os.environ.get("PENSIEVE_DATA") or default_data_folder(os.environ))
    yield "data folder", f"{data} ({_state(data)})"
    yield "disk", _room(data)


def _sqlite() -> str:
    try:
        from pensieve.store.connection import preferred_driver
    except ImportError as error:
        return f"{UNKNOWN}{error.name} is missing"
    return f"{preferred_driver.sqlite_version} ({preferred_driver.__name__})"


def _cpu_kernels() -> str:
    try:
        import torch

        from pensieve.kernels import cpu_library
    except ImportError:
        return f"{UNKNOWN}torch is missing"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        name = cpu_library.instruction_set(torch.float32, 64)
    if name is None:
        return "missing: there was no C++ compiler at installation; torch computes instead, slower"
    return f"{name}, {torch.get_num_threads()} threads"


def _gpu() -> str:
    try:
        import torch
    except ImportError:
        return f"{UNKNOWN}torch is missing"
    if not torch.cuda.is_available():
        built = (
            f"torch is built for CUDA {torch.version.cuda}"
            if torch.version.cuda
            else "torch is built without CUDA"
        )
        return f"no GPU found ({built}); the device tier is in main memory"
    names = [
        f"{found.name}, {found.total_memory / 2**30:.0f} GiB, compute capability "
        f"{found.major}.{found.minor}"
        for found in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]
    return f"{' · '.join(names)}; torch is built for CUDA {torch.version.cuda}"


def _gpu_kernels() -> str:
    """Return where the code of the kernels comes from. Compile a kernel if none is shipped."""
    try:
        import torch

        from pensieve.errors import DeviceError
        from pensieve.kernels import cuda_launch, nvrtc
    except ImportError:
        return f"{UNKNOWN}torch is missing"
    has_gpu = torch.cuda.is_available()
    kernel = nvrtc.Kernel("copy_pages.cu", "copy_pages")
    try:
        architecture = cuda_launch.architecture(0) if has_gpu else "sm_80"
        if nvrtc.shipped(kernel, architecture) is not None:
            return f"shipped for {architecture}"
        nvrtc.cubin(kernel, architecture)
        found = f"compiled for {architecture} by NVRTC {nvrtc.compiler_version()} (CuPy)"
        wrong_cuda = (
            has_gpu
            and nvrtc.compiler_version().split(".")[0] != str(torch.version.cuda).split(".")[0]
        )
        if wrong_cuda:
            wanted = f"a CuPy for torch's CUDA {torch.version.cuda}"
            return f"{found}; missing: {wanted} (the installed CuPy is for another version)"
        return f"{found}, kept in {nvrtc.cache_folder()}"
    except DeviceError as error:
        text = " ".join(str(error).split())
        return f"missing: {text}" if has_gpu else f"none: {text}"


def _model(arguments: argparse.Namespace) -> dict[str, str]:
    """Load a model, its tokenizer and its template as `serve` does, with settings from the environment."""
    try:
        from pensieve.launch import profiles
        from pensieve.launch.executor import check_vocabulary
        from pensieve.launch.model_folder import load_texts, resolve_model
        from pensieve.launch.model_ranks import load_model
    except ImportError as error:
        return {"model": f"{UNKNOWN}{error.name} is missing"}
    names = ("model", *(setting.name for setting in LOADING))
    flags = {name: getattr(arguments, name) for name in names}
    try:
        settings = resolve(flags, os.environ).settings
        folder = resolve_model(settings.model)
        texts = load_texts(folder, _ignore, settings.chat_template)
        with contextlib.ExitStack() as undo:
            loaded = load_model(settings, folder, _ignore, undo).model
            check_vocabulary(texts.template.tokenizer, loaded.shape)
            profile = profiles.stored_profile(profiles.key_of(settings, folder, loaded))
    except PensieveError as error:
        return {"model": f"{REFUSED}{one_line(error)}"}
    shape = loaded.shape
    kv = f"KV in {shape.kv_format.in_words}, {shape.kv_bytes_per_token:,} bytes a token"
    return {
        "model": f"{settings.model}, {loaded.flat.form}; {kv}",
        "profile": profile if isinstance(profile, str) else profile.in_words,
    }


def _ignore(line: str) -> None:
    """Drop a progress line."""


def _state(data: Path) -> str:
    if not data.exists():
        return "will be created"
    if not os.access(data, os.W_OK):
        return "cannot be written"
    database = data / "conversations.db"
    return f"history of {database.stat().st_size:,} bytes" if database.exists() else "empty"


def _room(data: Path) -> str:
    """Return how many typical conversations fit into the free disk space."""
    folder = next(each for each in (data, *data.absolute().parents) if each.exists())
    free = shutil.disk_usage(folder).free
    size = USUAL_TURNS * (TURN_BYTES + USUAL_TOKENS * TOKEN_BYTES)
    return (
        f"{free / 2**30:.1f} GiB free, room for about {_rounded(free // size):,} conversations of "
        f"{USUAL_TURNS} turns with {USUAL_TOKENS} tokens each ({size / 1000:g} KB)"
    )


def _rounded(count: int) -> int:
    """Return the number rounded to two significant digits."""
    unit: int = 10 ** max(len(str(count)) - 2, 0)
    return count // unit * unit


def problems_of(found: dict[str, str]) -> Iterator[str]:
    for name in PACKAGES.values():
        if found[name] == "missing":
            yield f"the package {name} is missing: pip install {name}"
    sqlite = found["sqlite"]
    if not sqlite.startswith(UNKNOWN) and _version(sqlite) < (3, 51, 3):
        yield (
            f"SQLite {sqlite} may damage a history when two connections checkpoint at once; "
            "install pysqlite3"
        )
    if "missing:" in found["gpu kernels"]:
        yield f"the GPU cannot be used: {found['gpu kernels']}"
    if (model := found.get("model", "")).startswith(REFUSED):
        yield f"the model {model}"
    if "cannot be written" in found["data folder"]:
        yield f"the data folder cannot be written: {found['data folder']}"


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split()[0].split("."))
