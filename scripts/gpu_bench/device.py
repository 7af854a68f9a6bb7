"""Sections `versions`, `sanitizer`, `device` and `swap` of the GPU bench.

`versions` also loads one kernel, to find out first whether the device accepts any. `sanitizer` runs the
smallest shapes of attention under NVIDIA's compute-sanitizer, if it is installed (the package
nvidia-cuda-sanitizer-api, or a CUDA toolkit). `device` measures the device's own rates. `swap` times page
moves.
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
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from pensieve.bench.report import machine
from pensieve.errors import PensieveError
from pensieve.kernels import PAGE_SLOTS as PAGE
from pensieve.kernels import choices, cuda_launch, nvrtc
from pensieve.model.kv.memory import KVMemory, PageMoves
from pensieve.model.shape import ModelShape
from scripts.gpu_bench.harness import Bench, share_of


def section_device(bench: Bench) -> None:
    device = bench.device
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        bench.report(
            "device",
            f"{found.name}, {found.multi_processor_count} multiprocessors, "
            f"{found.total_memory / 2**30:.0f} GiB, {cuda_launch.architecture(device.index or 0)}, "
            f"torch {torch.__version__}, CUDA {torch.version.cuda}",
            name=found.name,
        )
    else:
        bench.report("device", f"CPU, torch {torch.__version__}")
    size = (64 << 20) if bench.small else (2 << 30)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    words = [each.view(torch.float32) for each in (source, target)]
    # One copy is made by the driver, the other by a kernel. The faster one is the device's rate.
    bench.copy_bandwidth = (
        2
        * size
        / min(
            bench.seconds([lambda: target.copy_(source)]),
            bench.seconds([lambda: torch.mul(words[0], 1.0, out=words[1])]),
        )
    )
    n = 512 if bench.small else 8192
    left = torch.randn(n, n, device=device).to(bench.dtype)
    right = torch.randn(n, n, device=device).to(bench.dtype)
    bench.matrix_rate = 2 * n**3 / bench.seconds([lambda: left @ right])
    bench.report(
        "device",
        f"copy {bench.copy_bandwidth / 1e9:.0f} GB/s (read + written), "
        f"product {bench.matrix_rate / 1e12:.1f} TFLOP/s",
        copy_bandwidth=bench.copy_bandwidth,
        matrix_rate=bench.matrix_rate,
    )
    if device.type == "cuda":
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        bench.bus = {
            name: size / bench.seconds([run], graph=False)
            for name, run in (
                ("swap_in", lambda: target.copy_(host, non_blocking=True)),
                ("swap_out", lambda: host.copy_(target, non_blocking=True)),
            )
        }
        rates = ", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in bench.bus.items())
        bench.report("device", f"one large pinned copy: {rates}", **bench.bus)


def scattered_pages(bench: Bench) -> tuple[KVMemory, PageMoves]:
    """Return memory of an 8 B model's shape, and unprepared moves of a history's scattered pages."""
    pages = -(-(320 if bench.small else 4000) // PAGE)
    shape = ModelShape(4 if bench.small else 32, 32, 8, 128, 1, 1, bench.dtype, 0, 0)
    memory = KVMemory(shape, 4 * pages, 4 * pages, PAGE, bench.device)
    memory.device_arena.normal_()  # no two pages have the same contents
    # Copy layer by layer, because no copy may cross from one layer's page-locked memory into another's.
    for layer in range(shape.num_layers):
        memory.host_arena[layer].copy_(memory.device_arena[layer, : memory.host_pages])
    memory.device_arena.neg_()
    draw = torch.Generator().manual_seed(0)
    sources, targets = (torch.randperm(4 * pages, generator=draw)[:pages] for _ in range(2))
    return memory, PageMoves(sources, targets, torch.full((pages,), PAGE))


def time_moves(bench: Bench, direction: str, memory: KVMemory, moves: PageMoves) -> float:
    """Move these pages layer by layer; return the seconds. Raises PensieveError if the contents are wrong."""
    move = memory.swap_in if direction == "swap_in" else memory.swap_out
    arenas = (memory.host_arena, memory.device_arena)
    source, target = arenas if direction == "swap_in" else arenas[::-1]

    def layers() -> None:
        for layer in range(memory.shape.num_layers):
            move(layer, moves)

    target.zero_()  # remove pages that an earlier measurement moved here
    seconds = bench.seconds([layers], graph=False)
    moved = target[:, moves.target_pages.to(target.device)].cpu()
    if not torch.equal(moved, source[:, moves.source_pages.to(source.device)].cpu()):
        raise PensieveError(f"{direction} moved wrong contents")
    return seconds


@contextmanager
def _separate_stream(device: torch.device) -> Iterator[None]:
    """Make a new stream the current one, as the copier does. The default stream takes no batched copies."""
    if device.type != "cuda":
        yield
        return
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def section_swap(bench: Bench) -> None:
    for direction in ("swap_in", "swap_out"):
        memory, moves = scattered_pages(bench)
        pages = len(moves.source_pages)
        consecutive = torch.arange(pages)
        ways = {
            "scattered": memory.prepared_for_swap(moves),
            "neighbours": memory.prepared_for_swap(
                PageMoves(consecutive, consecutive + pages, moves.num_slots)
            ),
        }
        if ways["scattered"].pieces is not None:
            ways["scattered, by the kernel"] = memory.prepared(moves)
        for name, ready in ways.items():
            with (
                bench.reporting_failure("swap", f"{direction}, {name}"),
                _separate_stream(bench.device),
            ):
                rate = pages * memory.page_bytes / time_moves(bench, direction, memory, ready)
                bus = bench.bus[direction] if bench.bus else None
                share, words = share_of(rate, bus, "one large copy")
                line = f"{direction}, {pages} pages, {name}: {rate / 1e9:.1f} GB/s, {words}"
                bench.report("swap", line, share=share)


PACKAGES = ("transformers", "tokenizers", "cupy-cuda13x", "cupy-cuda12x", "nvidia-cuda-nvrtc")
TOOLS = ("memcheck", "synccheck")
TOOL_SECONDS = 65
ROOT = Path(__file__).parents[2]


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
        f"loaded a kernel for {cuda_launch.architecture(index)}; found {shipped} compiled kernels",
    )


def section_sanitizer(bench: Bench) -> None:
    tool = shutil.which("compute-sanitizer") or _packaged_sanitizer()
    if tool is None or bench.device.type != "cuda":
        bench.report("sanitizer", "skipped: no compute-sanitizer or no GPU")
        return
    for name in TOOLS:
        command = [tool, "--tool", name, "--error-exitcode", "9", sys.executable, "-m"]
        command += ["scripts.gpu_bench.kernels", str(bench.device)]
        try:
            status, printed = run_program(command, TOOL_SECONDS)
        except subprocess.TimeoutExpired:
            bench.report("sanitizer", f"{name}: skipped, not done after {TOOL_SECONDS} s")
            continue
        if status:
            raise PensieveError(f"{name} found something: {printed[-2000:]}")
        bench.report("sanitizer", f"{name}: nothing found")


def run_program(command: list[str], seconds: float) -> tuple[int, str]:
    """Return a program's status and output; kill it and its children if it takes longer.

    The program gets its own process group but stays in this process's session, so `end_process` ends it, too.
    """
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        process_group=0,
    ) as running:
        try:
            printed, _ = running.communicate(timeout=seconds)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            raise
    return running.returncode, printed


def _packaged_sanitizer() -> str | None:
    for each in Path(sysconfig.get_path("purelib")).glob("nvidia/*/**/compute-sanitizer"):
        if each.is_file():
            return str(each)
    return None
