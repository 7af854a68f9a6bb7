"""Sections `versions` and `sanitizer` of the GPU bench (what is installed, and whether the kernels behave).

`versions` also loads one kernel, so that a device that takes none is known before anything else.
`sanitizer` runs the smallest shapes of attention under NVIDIA's compute-sanitizer, where that is installed
(the package nvidia-cuda-sanitizer-api, or a CUDA toolkit).
"""

from __future__ import annotations

import platform
import shutil
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
TOOL_SECONDS = 50


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
                done = subprocess.run(
                    command,
                    capture_output=True,
                    text=True,
                    timeout=TOOL_SECONDS,
                    cwd=folder,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                bench.report("sanitizer", f"{name}: not done after {TOOL_SECONDS} s, left out")
                continue
        if done.returncode:
            raise PensieveError(f"{name} found something: {(done.stdout + done.stderr)[-2000:]}")
        bench.report("sanitizer", f"{name}: nothing found")


def _packaged() -> str | None:
    for each in Path(sysconfig.get_path("purelib")).glob("nvidia/*/**/compute-sanitizer"):
        if each.is_file():
            return str(each)
    return None
