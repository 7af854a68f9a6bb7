"""Sections `versions` and `sanitizer` of the GPU bench (what is installed, and whether the kernels behave).

`versions` also loads one kernel, so that a device that takes none is known before anything else.
`sanitizer` runs the smallest shapes of attention under NVIDIA's compute-sanitizer, where that is installed
(the package nvidia-cuda-sanitizer-api, or a CUDA toolkit).
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from pensieve.bench.gpu_harness import Bench
from pensieve.bench.machine import machine
from pensieve.errors import PensieveError
from pensieve.kernels import choices, cuda_launch, nvrtc

PACKAGES = ("transformers", "tokenizers", "cupy-cuda13x", "cupy-cuda12x", "nvidia-cuda-nvrtc")
TOOLS = ("memcheck", "synccheck")
TOOL_SECONDS = 65


def section_versions(bench: Bench) -> None:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    bench.report("versions", ", ".join(f"{name} {each}" for name, each in found.items()), **found)
    bench.report("versions", machine(str(bench.device)))
    bench.report("versions", f"choices: {choices.current}")
    if bench.device.type != "cuda":
        return
    index = bench.device.index or 0
    cuda_launch.prepare(index)
    shipped = len(list(nvrtc.SHIPPED.glob("*.cubin")))
    bench.report(
        "versions",
        f"a kernel was loaded for {cuda_launch.architecture(index)}; {shipped} compiled kernels came along",
    )


def section_sanitizer(bench: Bench) -> None:
    tool = shutil.which("compute-sanitizer") or _packaged()
    if tool is None or bench.device.type != "cuda":
        bench.report("sanitizer", "left out: there is no compute-sanitizer here, or no GPU")
        return
    for name in TOOLS:
        with tempfile.TemporaryDirectory() as folder:
            command = [tool, "--tool", name, "--error-exitcode", "9", sys.executable, "-m"]
            command += ["pensieve.bench.gpu_smallest", str(bench.device)]
            try:
                status, printed = outcome(command, folder, TOOL_SECONDS)
            except subprocess.TimeoutExpired:
                bench.report("sanitizer", f"{name}: not done after {TOOL_SECONDS} s, left out")
                continue
        if status:
            raise PensieveError(f"{name} found something: {printed[-2000:]}")
        bench.report("sanitizer", f"{name}: nothing found")


def outcome(command: list[str], folder: str, seconds: float) -> tuple[int, str]:
    """A program's status and what it printed; one that takes longer is ended with whatever it started.

    For that it has a group of its own, in the session of this process, which `gpu.end_process` ends.
    """
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        process_group=0,
    ) as running:
        try:
            printed, _ = running.communicate(timeout=seconds)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            raise
    return running.returncode, printed


def _packaged() -> str | None:
    for each in Path(sysconfig.get_path("purelib")).glob("nvidia/*/**/compute-sanitizer"):
        if each.is_file():
            return str(each)
    return None
