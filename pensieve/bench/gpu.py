"""scripts/bench_gpu: everything that there is to know about a GPU, in one run of at most nine minutes.

    device       what it is; how fast a large copy, a large product and a large pinned copy are, each way
    kernels      every kernel against the float32 reference, over shapes, types and scattered pages
    attention    figure 3.17: eight queries over scattered pages against torch on keys in one piece (M5)
    decode       bytes of KV read over time, as a share of the large copy's bandwidth (M6)
    prefill      against the better of torch's flash and cuDNN, and the large product's rate (M7)
    swap         scattered pages over the bus, by kernel and by copy engine, against one large copy (M8)
    hidden       512 new tokens on an 8 B model, their history of 4,000 in either tier (M8)
    exactness    a model with swaps, drops and recompute says what it says without pressure
    load         ShareGPT-like conversations: throughput at equal P90 normalized latency (M11)

Correctness comes first; what is wrong is not timed. A section that fails says why, and the next one
runs. All figures go to `--out` as JSON lines as they come, so that a run that is cut off has told what it
knew. On a GPU each call is captured in a graph and replayed over inputs that take turns, so neither
Python nor the cache is measured. `--small` runs every section on small shapes, on any device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from pensieve.errors import PensieveError
from pensieve.kernels import PAGE_SLOTS as PAGE
from pensieve.kernels import copy_pages, cuda_launch, multi_token_attention, write_kv
from pensieve.kernels.attention import cuda, reference
from pensieve.kernels.attention.plan import Work

SECTIONS = (
    *("device", "kernels", "attention", "decode", "prefill", "swap", "hidden", "exactness", "load"),
)
ROTATED_BYTES = 512 << 20  # of inputs that take turns: several times the cache
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}
Run = Callable[[], Any]


@dataclass
class Bench:
    device: torch.device
    small: bool
    out: Any  # a file
    minutes: float
    began: float
    copy_bandwidth: float = 0.0  # bytes read and written a second
    matrix_rate: float = 0.0  # operations a second
    bus: dict[str, float] | None = None  # bytes a second, "swap_in" and "swap_out"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    @property
    def seconds_left(self) -> float:
        return self.minutes * 60 - (time.perf_counter() - self.began)

    def tell(self, section: str, line: str, **figures: Any) -> None:
        print(f"{section:10} {line}", flush=True)
        self.out.write(json.dumps({"section": section, "line": line, **figures}) + "\n")
        self.out.flush()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, runs: list[Run], repeats: int = 5, *, graph: bool = True) -> float:
        """The median time of one call, the runs by turns."""
        if self.device.type == "cuda" and graph:
            runs = [captured(run) for run in runs]
        for run in runs:
            run()
        self.synchronize()
        if self.device.type != "cuda":
            times = []
            for _ in range(repeats):
                begin = time.perf_counter()
                for run in runs:
                    run()
                times.append((time.perf_counter() - begin) / len(runs))
            return statistics.median(times)
        times = []
        rounds = max(1, 8 // len(runs))
        for _ in range(repeats):
            first: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            last: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            first.record()
            for _ in range(rounds):
                for run in runs:
                    run()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last) / 1e3 / (rounds * len(runs)))
        return statistics.median(times)


def captured(run: Run) -> Run:
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        run()
    torch.cuda.current_stream().wait_stream(aside)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


# -- inputs --


@dataclass
class Paged:
    """Slices over pages in random order, and what a kernel is given for them."""

    query: torch.Tensor
    arena: torch.Tensor
    table: torch.Tensor
    offsets: torch.Tensor
    turns: torch.Tensor
    starts: torch.Tensor
    work: Work | None
    out: torch.Tensor

    @classmethod
    def of(
        cls,
        device: torch.device,
        slices: list[tuple[int, int]],  # (start, length), each of a turn of its own
        heads: int,
        kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        seed: int = 0,
    ) -> Paged:
        draw = torch.Generator(device=device).manual_seed(seed)
        ends = [start + length for start, length in slices]
        per_turn = -(-max(ends) // PAGE)
        num_pages = len(slices) * per_turn + 1
        arena = torch.randn(
            (num_pages, 2, kv_heads, PAGE, head_size), generator=draw, device=device
        ).to(dtype)
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed))
        table = order[: len(slices) * per_turn].view(len(slices), per_turn).int()
        for index, end in enumerate(ends):  # what nobody wrote is NaN
            if end % PAGE:
                arena[int(table[index, end // PAGE]), :, :, end % PAGE :] = float("nan")
        lengths = [length for _, length in slices]
        tokens = sum(lengths)
        query = torch.randn((tokens, heads, head_size), generator=draw, device=device).to(dtype)

        def column(numbers: list[int]) -> torch.Tensor:
            return torch.tensor(numbers, dtype=torch.int32, device=device)

        work = None
        if device.type == "cuda" and cuda.takes(dtype, PAGE, head_size):
            starts = [start for start, _ in slices]
            plan = cuda.plan(
                lengths, starts, heads, kv_heads, head_size, cuda.blocks_at_once(device, head_size)
            )
            above = cuda.wide_above(head_size, device)
            work = Work.of(plan, kv_heads, head_size, device, above)
        return cls(
            query,
            arena,
            table.to(device),
            torch.tensor([0, *lengths]).cumsum(0).int().to(device),
            column(list(range(len(slices)))),
            column([start for start, _ in slices]),
            work,
            torch.full_like(query, float("nan")),
        )

    def run(self) -> torch.Tensor:
        multi_token_attention(
            *(self.query, self.arena[:, 0], self.arena[:, 1]),
            *(self.table, self.offsets, self.turns, self.starts),
            self.scaling,
            self.out,
            self.work,
        )
        return self.out

    @property
    def scaling(self) -> float:
        return float(self.query.shape[2] ** -0.5)

    def right(self) -> torch.Tensor:
        out = torch.empty(self.query.shape, device=self.query.device)
        wide = self.arena.float()
        reference.multi_token_attention(
            *(self.query.float(), wide[:, 0], wide[:, 1]),
            *(self.table, self.offsets, self.turns, self.starts),
            self.scaling,
            out,
        )
        return out

    def contiguous(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in one piece, (batch, kv_heads, context, D); all slices of one length."""
        context = int(self.starts[0]) + int(self.offsets[1])
        gathered = self.arena[self.table.long()]  # (batch, pages, 2, kv_heads, 32, D)
        batch, pages, _, kv_heads, _, head_size = gathered.shape
        whole = gathered.permute(2, 0, 3, 1, 4, 5).reshape(
            2, batch, kv_heads, pages * PAGE, head_size
        )[:, :, :, :context]
        return whole[0].contiguous(), whole[1].contiguous()


def check(name: str, answer: torch.Tensor, right: torch.Tensor) -> float:
    worst = float((answer.float() - right).abs().max())
    if not worst <= TOLERANCE[answer.dtype]:  # nor NaN
        raise PensieveError(f"{name} is off by {worst}")
    return worst


def baselines(
    query: torch.Tensor,  # (batch, queries, heads, D): the last rows of the context
    keys: torch.Tensor,  # (batch, kv_heads, context, D)
    values: torch.Tensor,
) -> dict[str, Run]:
    """Torch's fused attention on contiguous keys and values, every way that it might take."""
    from torch.nn.attention.bias import causal_lower_right

    batch, queries, heads, head_size = query.shape
    kv_heads, context = keys.shape[1:3]
    rows = query.transpose(1, 2)  # (batch, heads, queries, D)
    bias = causal_lower_right(queries, context)
    visible = torch.arange(context)[None] <= torch.arange(context - queries, context)[:, None]
    mask = torch.zeros(visible.shape).masked_fill_(~visible, float("-inf")).to(query)
    group = heads // kv_heads
    folded_query = (
        query.view(batch, queries, kv_heads, group, head_size)
        .permute(0, 2, 3, 1, 4)
        .reshape(batch, kv_heads, group * queries, head_size)
    )
    folded_mask = mask.repeat(group, 1)

    def grouped(backend: SDPBackend, first: int, last: int, attn_mask: Any) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                rows[first:last],
                keys[first:last],
                values[first:last],
                attn_mask=attn_mask,
                enable_gqa=group > 1,
            ).transpose(1, 2)

    def folded(backend: SDPBackend, first: int, last: int) -> torch.Tensor:
        with sdpa_kernel(backend):
            attended = F.scaled_dot_product_attention(
                folded_query[first:last],
                keys[first:last],
                values[first:last],
                attn_mask=folded_mask if queries > 1 else None,
            )
        unfolded = attended.view(last - first, kv_heads, group, queries, head_size)
        return unfolded.permute(0, 3, 1, 2, 4).reshape(last - first, queries, heads, head_size)

    def loop(backend: SDPBackend, attn_mask: Any) -> torch.Tensor:
        return torch.cat([grouped(backend, i, i + 1, attn_mask) for i in range(batch)])

    ways: dict[str, Run] = {}
    kinds: dict[str, tuple[SDPBackend, Any]] = {
        "flash": (SDPBackend.FLASH_ATTENTION, bias),
        "cudnn": (SDPBackend.CUDNN_ATTENTION, mask if queries > 1 else None),
    }
    if query.device.type == "cpu":
        kinds = {"fused": (SDPBackend.FLASH_ATTENTION, mask)}
    for name, (backend, attn_mask) in kinds.items():
        ways[f"{name}, batch"] = partial(grouped, backend, 0, batch, attn_mask)
        if batch > 1:
            ways[f"{name}, loop"] = partial(loop, backend, attn_mask)
        if group > 1:
            ways[f"{name}, folded"] = partial(folded, backend, 0, batch)
    return ways


def usable(ways: dict[str, Run], right: torch.Tensor) -> dict[str, Run]:
    """Those that this torch can do here, and does right."""
    found = {}
    for name, run in ways.items():
        try:
            answer = run().reshape(right.shape).clone()
            if right.is_cuda:
                torch.cuda.set_sync_debug_mode("error")  # what waits cannot be captured
                run()
        except Exception:  # no such kernel for these shapes
            continue
        finally:
            if right.is_cuda:
                torch.cuda.set_sync_debug_mode("default")
        check(f"torch ({name})", answer, right)
        found[name] = run
    if not found:
        raise PensieveError("none of torch's fused kernels takes this shape")
    return found


# -- sections --


def section_device(bench: Bench) -> None:
    device = bench.device
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        bench.tell(
            "device",
            f"{found.name}, {found.multi_processor_count} multiprocessors, "
            f"{found.total_memory / 2**30:.0f} GiB, {cuda_launch.architecture(device.index or 0)}, "
            f"torch {torch.__version__}, CUDA {torch.version.cuda}",
            name=found.name,
        )
    else:
        bench.tell("device", f"CPU, torch {torch.__version__}")
    size = (64 << 20) if bench.small else (2 << 30)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bench.copy_bandwidth = 2 * size / bench.seconds([lambda: target.copy_(source)])
    n = 512 if bench.small else 8192
    left = torch.randn(n, n, device=device).to(bench.dtype)
    right = torch.randn(n, n, device=device).to(bench.dtype)
    bench.matrix_rate = 2 * n**3 / bench.seconds([lambda: left @ right])
    bench.tell(
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
        told = ", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in bench.bus.items())
        bench.tell("device", f"one large pinned copy: {told}", **bench.bus)


def section_kernels(bench: Bench) -> None:
    device = bench.device
    lattice = [
        (dtype, head_size, heads, kv_heads)
        for dtype in (torch.bfloat16, torch.float16)
        for head_size in ((64, 128) if bench.small else cuda.HEAD_SIZES)
        for heads, kv_heads in ((16, 16), (16, 4), (8, 1))
    ]
    slices = [(0, 1), (0, 33), (31, 1), (32, 8), (500, 130), (63, 1), (4000, 3), (2000, 0), (7, 40)]
    worst = 0.0
    for index, (dtype, head_size, heads, kv_heads) in enumerate(lattice):
        paged = Paged.of(device, slices, heads, kv_heads, head_size, dtype, index)
        answer = paged.run().clone()
        where = f"attention {dtype}, head {head_size}, {heads}/{kv_heads}"
        worst = max(worst, check(where, answer, paged.right()))
        if device.type == "cuda":
            paged.out.fill_(float("nan"))
            captured(paged.run)()
            if not torch.equal(paged.out, answer):
                raise PensieveError(f"{where}: a captured graph says something else")
    for dtype in (torch.bfloat16, torch.float16):
        _check_write(device, dtype)
        _check_copy(device, dtype)
    bench.tell("kernels", f"{len(lattice)} shapes agree, worst {worst:.1e}", worst=worst)


def _check_write(device: torch.device, dtype: torch.dtype) -> None:
    arena = torch.zeros(9, 2, 4, PAGE, 128, device=device, dtype=dtype)
    right = arena.clone()
    key = torch.randn(4, 50, 128, device=device).to(dtype).transpose(0, 1)
    value = torch.randn(50, 4, 128, device=device).to(dtype)
    slots = torch.randperm(9 * PAGE)[:50].to(device)
    write_kv(key, value, slots, arena[:, 0], arena[:, 1])
    reference.write_kv(key, value, slots, right[:, 0], right[:, 1])
    if not torch.equal(arena, right):
        raise PensieveError(f"write_kv {dtype} writes something else")


def _check_copy(device: torch.device, dtype: torch.dtype) -> None:
    source = torch.randn(40, 2, 4, PAGE, 128, device=device).to(dtype)
    target, right = torch.zeros_like(source), torch.zeros_like(source)
    sources, targets = (torch.randperm(40)[:33].to(device) for _ in range(2))
    num_slots = torch.randint(1, PAGE + 1, (33,)).to(device)
    copy_pages(source, target, sources, targets, num_slots)
    reference.copy_pages(source, right, sources, targets, num_slots)
    if not torch.equal(target, right):
        raise PensieveError(f"copy_pages {dtype} copies something else")


def section_attention(bench: Bench) -> None:
    contexts = (128, 200) if bench.small else (128, 512, 1024, 2048, 4096)
    ratios: dict[str, list[float]] = {}
    for heads, kv_heads in ((16, 16), (16, 4)):
        for head_size in (64, 128):
            for batch in (2,) if bench.small else (32, 8):
                for context in contexts:
                    ratio = _against_torch(bench, batch, 8, context, heads, kv_heads, head_size)
                    ratios.setdefault(f"{heads}/{kv_heads}", []).append(ratio)
    for name, each in ratios.items():
        mean = statistics.geometric_mean(each)
        bench.tell("attention", f"bf16 {name}: geometric mean {mean:.2f}, worst {max(each):.2f}")


def _against_torch(
    bench: Bench, batch: int, queries: int, context: int, heads: int, kv_heads: int, head_size: int
) -> float:
    kv_bytes = 2 * batch * context * kv_heads * head_size * 2
    copies = 1 if bench.small else max(2, min(8, ROTATED_BYTES // kv_bytes))
    slices = [(context - queries, queries)] * batch
    inputs = [
        Paged.of(bench.device, slices, heads, kv_heads, head_size, bench.dtype, seed)
        for seed in range(copies)
    ]
    right = inputs[0].right()
    check("multi_token_attention", inputs[0].run(), right)
    ways: dict[str, list[Run]] = {}
    for index, one in enumerate(inputs):
        found = baselines(one.query.view(batch, queries, heads, head_size), *one.contiguous())
        if index == 0:
            found = usable(found, right)
            ways = {name: [] for name in found}
        for name in ways:
            ways[name].append(found[name])
    seconds = bench.seconds([one.run for one in inputs])
    times = {name: bench.seconds(runs) for name, runs in ways.items()}
    best = min(times, key=lambda name: times[name])
    ratio = seconds / times[best]
    share = kv_bytes / seconds / bench.copy_bandwidth if bench.copy_bandwidth else 0.0
    bench.tell(
        "attention",
        f"batch {batch}, {queries} queries, context {context}, {heads}/{kv_heads} x {head_size}: "
        f"{seconds * 1e6:.1f} us, {ratio:.2f} x torch ({best}), {share:.0%} of the bandwidth",
        ratio=ratio,
        seconds=seconds,
        best=best,
        share=share,
    )
    return ratio


def section_decode(bench: Bench) -> None:
    shapes = [(64, 4096), (16, 8192), (4, 32_768), (1, 65_536)]
    for batch, context in [(2, 300)] if bench.small else shapes:
        kv_bytes = 2 * batch * context * 8 * 128 * 2
        slices = [(context - 1, 1)] * batch
        copies = 1 if bench.small else max(1, ROTATED_BYTES // kv_bytes)
        inputs = [Paged.of(bench.device, slices, 32, 8, 128, bench.dtype, i) for i in range(copies)]
        check("decode", inputs[0].run(), inputs[0].right())
        seconds = bench.seconds([one.run for one in inputs])
        share = kv_bytes / seconds / bench.copy_bandwidth if bench.copy_bandwidth else 0.0
        bench.tell(
            "decode",
            f"batch {batch}, context {context}, 32/8 x 128: {seconds * 1e6:.1f} us, "
            f"{kv_bytes / seconds / 1e9:.0f} GB/s, {share:.0%} of the copy's bandwidth",
            seconds=seconds,
            share=share,
        )


def section_prefill(bench: Bench) -> None:
    shapes = [(0, 4096, 1), (0, 4096, 4), (16_384 - 512, 512, 1)]
    for start, length, batch in [(100, 70, 1)] if bench.small else shapes:
        heads, kv_heads, head_size = 32, 8, 128
        slices = [(start, length)] * batch
        one = Paged.of(bench.device, slices, heads, kv_heads, head_size, bench.dtype)
        right = one.right()
        check("prefill", one.run(), right)
        ways = usable(
            baselines(one.query.view(batch, length, heads, head_size), *one.contiguous()), right
        )
        times = {name: bench.seconds([run]) for name, run in ways.items()}
        best = min(times, key=lambda name: times[name])
        seconds = bench.seconds([one.run])
        pairs = batch * (length * start + length * (length + 1) / 2)
        rate = 4 * pairs * heads * head_size / seconds
        share = rate / bench.matrix_rate if bench.matrix_rate else 0.0
        bench.tell(
            "prefill",
            f"{batch} x {length} queries over {start + length}: {seconds * 1e6:.0f} us, "
            f"{times[best] / seconds:.2f} x the speed of torch ({best}), {rate / 1e12:.0f} TFLOP/s = "
            f"{share:.0%} of the product's rate",
            speed=times[best] / seconds,
            share=share,
        )


def section_swap(bench: Bench) -> None:
    from pensieve.model.kv.memory import KVMemory, PageMoves
    from pensieve.model.shape import ModelShape

    tokens = 320 if bench.small else 4000
    pages = -(-tokens // PAGE)
    shape = ModelShape(4 if bench.small else 32, 32, 8, 128, 1, 1, bench.dtype, 0, 0)
    memory = KVMemory(shape, 4 * pages, 4 * pages, PAGE, bench.device)
    memory.device_arena.normal_()
    memory.host_arena.copy_(memory.device_arena[:, : memory.host_pages])
    memory.device_arena.neg_()  # both hold something, and not the same
    num_bytes = pages * memory.page_bytes
    draw = torch.Generator().manual_seed(0)
    for direction, move in (("swap_in", memory.swap_in), ("swap_out", memory.swap_out)):
        sources, targets = (torch.randperm(4 * pages, generator=draw)[:pages] for _ in range(2))
        scattered = PageMoves(sources, targets, torch.full((pages,), PAGE))
        runs = torch.arange(pages)
        ways = {
            "scattered": memory.prepared(scattered),
            "neighbours": memory.prepared(PageMoves(runs, runs + pages, scattered.num_slots)),
        }
        if bench.device.type == "cuda":
            joined = scattered.in_runs(PAGE)
            ways["scattered, copy engine"] = ways["scattered"]._replace(runs=joined)
        for name, moves in ways.items():

            def layers(moves: PageMoves = moves, move: Any = move) -> None:
                for layer in range(shape.num_layers):
                    move(layer, moves)

            seconds = bench.seconds([layers], graph=False)
            arenas = [memory.host_arena, memory.device_arena]
            source, target = arenas if direction == "swap_in" else arenas[::-1]
            brought = target[:, moves.target_pages.to(target.device)].cpu()
            if not torch.equal(brought, source[:, moves.source_pages.to(source.device)].cpu()):
                raise PensieveError(f"{direction}, {name}, brought something else")
            share = num_bytes / seconds / bench.bus[direction] if bench.bus else 0.0
            bench.tell(
                "swap",
                f"{direction}, {pages} pages, {name}: {num_bytes / seconds / 1e9:.1f} GB/s, "
                f"{share:.0%} of one large copy",
                share=share,
            )


def sections_of_models(bench: Bench, wanted: list[str]) -> Iterator[tuple[str, Run]]:
    from pensieve.bench import gpu_load as bench_load

    model = bench_load.random_model(bench.device, bench.small)
    for name in wanted:
        function = getattr(bench_load, f"section_{name}")
        yield name, partial(function, bench, model)


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/bench_gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--sections", default=",".join(SECTIONS), metavar="NAME,…", help="(default: all)"
    )
    parser.add_argument("--out", type=Path, default=Path("bench_gpu.jsonl"), metavar="FILE")
    parser.add_argument("--minutes", type=float, default=9.0, help="(default: 9)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="small shapes, to try it out")
    arguments = parser.parse_args(given)
    wanted = arguments.sections.split(",")
    if unknown := sorted(set(wanted) - set(SECTIONS)):
        parser.error(f"no such section: {', '.join(unknown)}")
    device = torch.device(arguments.device)
    if device.type == "cpu" and not arguments.small:
        parser.error("there is no GPU here; --small tries it out on the CPU")
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    failed = []
    with arguments.out.open("a", encoding="utf-8") as out, torch.inference_mode():
        bench = Bench(device, arguments.small, out, arguments.minutes, time.perf_counter())

        def attempt(name: str, run: Run) -> None:
            began = time.perf_counter()
            try:
                run()
            except Exception as error:
                failed.append(name)
                bench.tell(name, f"FAILED: {type(error).__name__}: {error}", failed=True)
                traceback.print_exc(file=sys.stderr)
            print(f"{'':10} ({time.perf_counter() - began:.0f} s)", flush=True)

        of_models = [name for name in ("hidden", "exactness", "load") if name in wanted]
        for name in wanted:
            if name not in of_models:
                attempt(name, partial(globals()[f"section_{name}"], bench))
        if of_models:
            try:
                for name, run in sections_of_models(bench, of_models):
                    attempt(name, run)
            except Exception as error:
                failed += of_models
                bench.tell("model", f"FAILED: {type(error).__name__}: {error}", failed=True)
                traceback.print_exc(file=sys.stderr)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
