"""Sections `device` and `swap` of the GPU bench (its own rates, and those of page moves)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pensieve.bench.gpu_harness import Bench, share_of
from pensieve.errors import PensieveError
from pensieve.kernels import PAGE_SLOTS as PAGE
from pensieve.kernels import cuda_launch
from pensieve.model.kv.memory import KVMemory, PageMoves
from pensieve.model.shape import ModelShape

Move = Callable[[int, PageMoves], object]  # layer, moves


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
    bench.copy_bandwidth = 2 * size / bench.seconds([lambda: target.copy_(source)])
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


def memory_of(bench: Bench, pages: int) -> KVMemory:
    """Four times as many pages in both tiers, of an 8 B model's shape; no two hold the same."""
    shape = ModelShape(4 if bench.small else 32, 32, 8, 128, 1, 1, bench.dtype, 0, 0)
    memory = KVMemory(shape, 4 * pages, 4 * pages, PAGE, bench.device)
    memory.device_arena.normal_()
    memory.host_arena.copy_(memory.device_arena[:, : memory.host_pages])
    memory.device_arena.neg_()
    return memory


def scattered(bench: Bench, pages: int) -> tuple[KVMemory, PageMoves]:
    """Memory, and moves of scattered pages in it that are still to be prepared."""
    memory = memory_of(bench, pages)
    draw = torch.Generator().manual_seed(0)
    sources, targets = (torch.randperm(4 * pages, generator=draw)[:pages] for _ in range(2))
    return memory, PageMoves(sources, targets, torch.full((pages,), PAGE))


def section_swap(bench: Bench) -> None:
    tokens = 320 if bench.small else 4000
    pages = -(-tokens // PAGE)
    draw = torch.Generator().manual_seed(0)
    for direction in ("swap_in", "swap_out"):
        memory = memory_of(bench, pages)
        num_bytes = pages * memory.page_bytes
        move = memory.swap_in if direction == "swap_in" else memory.swap_out
        arenas = [memory.host_arena, memory.device_arena]
        source, target = arenas if direction == "swap_in" else arenas[::-1]
        sources, targets = (torch.randperm(4 * pages, generator=draw)[:pages] for _ in range(2))
        scattered = PageMoves(sources, targets, torch.full((pages,), PAGE))
        runs = torch.arange(pages)
        ways = {
            "scattered": memory.prepared(scattered),
            "neighbours": memory.prepared(PageMoves(runs, runs + pages, scattered.num_slots)),
        }
        if bench.device.type == "cuda":
            merged = scattered.in_runs(PAGE)
            ways["scattered, copy engine"] = ways["scattered"]._replace(runs=merged)
        for name, moves in ways.items():

            def layers(
                moves: PageMoves = moves, move: Move = move, memory: KVMemory = memory
            ) -> None:
                for layer in range(memory.shape.num_layers):
                    move(layer, moves)

            with bench.noting("swap", f"{direction}, {name}"):
                target.zero_()  # what another way has moved there
                seconds = bench.seconds([layers], graph=False)
                moved = target[:, moves.target_pages.to(target.device)].cpu()
                if not torch.equal(moved, source[:, moves.source_pages.to(source.device)].cpu()):
                    raise PensieveError(f"{direction}, {name}, moved something else")
                bus = bench.bus[direction] if bench.bus else None
                share, words = share_of(num_bytes / seconds, bus, "one large copy")
                bench.report(
                    "swap",
                    f"{direction}, {pages} pages, {name}: {num_bytes / seconds / 1e9:.1f} GB/s, "
                    f"{words}",
                    share=share,
                )
