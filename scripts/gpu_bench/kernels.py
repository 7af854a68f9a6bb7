"""Sections `kernels`, `attention`, `decode` and `prefill` of the GPU bench.

`kernels` only checks. The other sections check their shapes again and time them. If a shape fails,
the other shapes still run. KV in fp8 comes last.

As a program (`python -m scripts.gpu_bench.kernels DEVICE`), the module runs the kernels that read KV and the
kernels that write KV. It uses small shapes that still reach all parts of these kernels, because a kernel
takes seconds under compute-sanitizer.
"""

from __future__ import annotations

import statistics
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

import torch

from pensieve.bench.attention import check_close
from pensieve.errors import PensieveError
from pensieve.kernels import PAGE_SLOTS as PAGE
from pensieve.kernels import choices, copy_pages, cuda_launch, write_kv
from pensieve.kernels.attention import cuda, reference
from pensieve.kernels.choices import chosen
from pensieve.kernels.kv_format import FP8, to_fp8
from pensieve.kernels.layer.cuda import add_and_norm_launch, gate_and_multiply_launch
from pensieve.model.sampling.draw import draw
from pensieve.model.sampling.penalties import Row, TurnLog
from pensieve.sampling import Sampling
from scripts.gpu_bench.harness import Bench, Run, capture, check, share_of
from scripts.gpu_bench.pages import Paged, baselines, usable
from scripts.gpu_bench.stages import OPTIONAL

# Slices (start, length). For up to eight query heads per KV head, each narrow slice has at most 32 rows.
SLICES = {
    "narrow": [(0, 1), (31, 1), (63, 1), (700, 3), (200, 0), (500, 4), (4000, 3), (12_000, 1)],
    "wide": [(0, 1), (0, 33), (32, 8), (500, 130), (200, 0), (7, 40), (4000, 3), (3000, 300)],
}
ROTATED_BYTES = 512 << 20  # total size of a timing's alternating inputs: several times the L2 cache


class Timed(NamedTuple):
    """A timed shape, with KV in the dtype of the bench. `_time_with_fp8` times the shape again."""

    what: str
    slices: list[tuple[int, int]]
    copies: int  # number of alternating inputs for KV in fp8
    seconds: float


def section_kernels(bench: Bench) -> None:
    device = bench.device
    shapes = [
        (dtype, head_size, heads, kv_heads)
        for dtype in (torch.bfloat16, torch.float16)
        for head_size in ((64, 128) if bench.small else cuda.HEAD_SIZES)
        for heads, kv_heads in ((16, 16), (16, 4), (8, 1))
    ]
    for kind, slices in SLICES.items():
        slices = [each for each in slices if not bench.small or each[0] + each[1] <= 800]
        worst = 0.0
        for index, (dtype, head_size, heads, kv_heads) in enumerate(shapes):
            paged = Paged.of(device, slices, heads, kv_heads, head_size, dtype, index)
            where = f"attention of {kind} items, {dtype}, head {head_size}, {heads}/{kv_heads}"
            with _naming(
                kind if paged.plan is not None and len(paged.plan.wide_items) else "narrow"
            ):
                worst = max(worst, _check_attention(paged, where))
        agree = f"{kind}: {len(shapes)} shapes agree, worst {worst:.1e}"
        bench.report("kernels", agree, worst=worst, kind=kind)
    checks: dict[str, Callable[[torch.device, torch.dtype], None]]
    checks = {"write": check_write, "copy": _check_copy}
    if device.type == "cuda":
        checks |= {"draw": _check_draw, "fused": _check_fused}
    checks["fp8"] = partial(_check_fp8, small=bench.small)
    failure_reports = {
        kind: partial(bench.reporting_failure, "kernels", kind, kind=kind) for kind in OPTIONAL
    }
    for kind, check_kernel in checks.items():
        if kind == "draw" and not choices.current.radix:
            bench.report("kernels", "draw: skipped, tokens are drawn by sorting", kind=kind)
            continue
        with failure_reports.get(kind, nullcontext)(), _naming(kind):
            for dtype in (torch.bfloat16, torch.float16):
                check_kernel(device, dtype)
            bench.report("kernels", f"{kind}: agrees", kind=kind)


@contextmanager
def _naming(kind: str) -> Iterator[None]:
    """Add to each exception the kind of kernel that it is about (`stages.KERNELS`)."""
    try:
        yield
    except Exception as error:
        error.kind = kind  # type: ignore[attr-defined]
        raise


def _check_attention(paged: Paged, where: str) -> float:
    answer = paged.run().clone()
    worst = check(where, answer, paged.right())
    if answer.is_cuda:
        paged.out.fill_(float("nan"))
        capture(paged.run)()
        if not torch.equal(paged.out, answer):
            raise PensieveError(f"{where}: a captured graph gives another result")
    return worst


def check_write(device: torch.device, dtype: torch.dtype) -> None:
    arena = torch.zeros(9, 2, 4, PAGE, 128, device=device, dtype=dtype)
    right = arena.clone()
    key = torch.randn(4, 50, 128, device=device).to(dtype).transpose(0, 1)
    value = torch.randn(50, 4, 128, device=device).to(dtype)
    slots = torch.randperm(9 * PAGE)[:50].to(device)
    write_kv(key, value, slots, arena[:, 0], arena[:, 1])
    reference.write_kv(key, value, slots, right[:, 0], right[:, 1])
    if not torch.equal(arena, right):
        raise PensieveError(f"write_kv {dtype} writes wrong contents")
    if device.type == "cuda":
        check_rotation(device, dtype)


def check_rotation(device: torch.device, dtype: torch.dtype, *, fp8: bool = False) -> None:
    """Check the kernel of fused layers that rotates and writes keys. Half of each head is rotated."""
    rows = torch.randn(50, 16, 128, device=device).to(dtype)
    query, key, value = torch.split(rows, [8, 4, 4], dim=1)
    angles = (torch.rand(50, 32, device=device) * 6).repeat(1, 2)
    cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
    scales = torch.exp2(torch.arange(8, device=device) - 6.0).view(2, 4) if fp8 else None
    arena = torch.zeros(9, 2, 4, PAGE, 128, device=device).to(FP8.element if fp8 else dtype)
    slots, out = torch.randperm(9 * PAGE)[:50].to(device), torch.empty_like(query.contiguous())
    given = (query, key, value, cosine, sine, slots, out, arena[:, 0], arena[:, 1], scales)
    cuda_launch.launch(cuda.rotate_and_write_kv_launch(*given), device)
    wide, factors = (key.float(), query.float()), (cosine.float(), sine.float())
    keys, queries = (_rotated(each, *factors) for each in wide)
    tolerance = dict.fromkeys((torch.bfloat16, torch.float16), 4e-2)
    check_close("rotate_and_write_kv of queries", out, queries, tolerance)
    by_slot = arena.transpose(2, 3).transpose(1, 2).flatten(0, 1)  # (slots, 2, kv_heads, 128)
    written = by_slot.float()[slots]
    if scales is None:
        check_close("rotate_and_write_kv of keys", written[:, 0].to(dtype), keys, tolerance)
        right = value.float()
    else:  # a sum that was rounded differently may give the neighbouring byte
        factor = scales[0, :, None]
        near = keys.clamp(-448 * factor, 448 * factor)
        limits = (near.abs() * 2**-4).maximum(factor * 2**-10) * 1.01
        if not ((written[:, 0] * factor - near).abs() <= limits).all():
            raise PensieveError(f"rotate_and_write_kv {dtype} writes wrong keys as fp8")
        right = to_fp8(value, scales[1]).float()
    if not torch.equal(written[:, 1], right):
        raise PensieveError(f"rotate_and_write_kv {dtype} writes wrong values")
    others = torch.ones(len(by_slot), dtype=torch.bool, device=device)
    others[slots] = False
    if by_slot.float()[others].any():
        raise PensieveError(f"rotate_and_write_kv {dtype} also writes elsewhere")


def _rotated(rows: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    part = rows[..., : cosine.shape[1]]
    low, high = part.chunk(2, dim=-1)
    turned = part * cosine[:, None] + torch.cat((-high, low), dim=-1) * sine[:, None]
    return torch.cat((turned, rows[..., cosine.shape[1] :]), dim=-1)


def _check_fp8(device: torch.device, dtype: torch.dtype, *, small: bool) -> None:
    """Check attention over fp8 pages with scales per head, and the kernels that write them."""
    slices = [each for each in SLICES["wide"] if not small or sum(each) <= 800]
    for head_size in (64, 128) if small else cuda.HEAD_SIZES:
        paged = Paged.of(device, slices, 8, 2, head_size, dtype, fp8=True)
        _check_attention(paged, f"attention over fp8, {dtype}, head {head_size}")
    check_write_fp8(device, dtype)


def check_write_fp8(device: torch.device, dtype: torch.dtype) -> None:
    """Check that fp8 bytes equal torch's. Too large values saturate, and non-finite values become NaN."""
    arena, right = (torch.zeros(9, 2, 4, PAGE, 128, device=device).to(FP8.element) for _ in "12")
    key, value = (torch.randn(50, 4, 128, device=device).to(dtype) * 3 for _ in range(2))
    most = torch.finfo(dtype).max
    extremes = [most, -most, float("inf"), -float("inf"), float("nan"), 0.0]
    key[:, :, :6] = torch.tensor(extremes, dtype=dtype, device=device)
    scales = torch.exp2(torch.arange(8, device=device) - 9.0).view(2, 4)
    slots = torch.randperm(9 * PAGE)[:50].to(device)
    write_kv(key, value, slots, arena[:, 0], arena[:, 1], scales)
    reference.write_kv(key, value, slots, right[:, 0], right[:, 1], scales)
    # 999 stands for NaN, because NaN does not equal itself.
    found, expected = (each.float().nan_to_num(999.0) for each in (arena, right))
    if not torch.equal(found, expected):
        raise PensieveError(f"write_kv {dtype} rounds to wrong fp8 bytes")
    if device.type == "cuda":
        check_rotation(device, dtype, fp8=True)


def _check_copy(device: torch.device, dtype: torch.dtype) -> None:
    source = torch.randn(40, 2, 4, PAGE, 128, device=device).to(dtype)
    target, right = torch.zeros_like(source), torch.zeros_like(source)
    sources, targets = (torch.randperm(40)[:33].to(device) for _ in range(2))
    num_slots = torch.randint(1, PAGE + 1, (33,)).to(device)
    copy_pages(source, target, sources, targets, num_slots)
    reference.copy_pages(source, right, sources, targets, num_slots)
    if not torch.equal(target, right):
        raise PensieveError(f"copy_pages {dtype} copies wrong contents")


def _check_draw(device: torch.device, dtype: torch.dtype) -> None:
    """Check that radix search and sorting draw the same tokens. Logits in 16 bits have many ties."""
    samplings = [
        Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
        for temperature in (0.3, 1.0, 5.0)
        for top_k in (0, 40, 1000)
        for top_p, min_p in ((1.0, 0.0), (0.9, 0.0), (1.0, 0.05))
        for seed in range(4)
    ]
    logits = (torch.randn(len(samplings), 50_000, device=device) * 3).to(dtype).float()
    context = array("I", [1, 2, 3])
    rows = [Row(TurnLog(each, context, 3), 3) for each in samplings]
    drawn = {}
    for radix in (0, 1):
        with chosen(choices.current._replace(radix=radix)):
            drawn[radix] = draw(logits, rows).tolist()
    if drawn[0] != drawn[1]:
        raise PensieveError(f"draw_tokens draws {drawn[1]}, sorting draws {drawn[0]}")


def _check_fused(device: torch.device, dtype: torch.dtype) -> None:
    residual, added = (torch.randn(70, 4096, device=device).to(dtype) for _ in range(2))
    weight = (torch.rand(4096, device=device) + 0.5).to(dtype)
    total, normed = torch.empty_like(residual), torch.empty_like(residual)
    launch = add_and_norm_launch(residual, added, weight, 1e-5, total, normed)
    cuda_launch.launch(launch, device)
    right = torch.nn.functional.rms_norm(
        (residual + added).float(), (4096,), weight.float(), eps=1e-5
    )
    if not torch.equal(total, residual + added):
        raise PensieveError(f"add_and_norm {dtype} gives a wrong sum")
    check_close("add_and_norm", normed, right, {dtype: 4e-2})
    out = torch.empty(70, 2048, dtype=dtype, device=device)
    cuda_launch.launch(gate_and_multiply_launch(residual, out), device)
    gate, up = torch.split(residual.float(), 2048, dim=-1)
    check_close("gate_and_multiply", out, torch.nn.functional.silu(gate) * up, {dtype: 1e-1})


def section_attention(bench: Bench) -> None:
    contexts = (128, 200) if bench.small else (128, 512, 1024, 2048, 4096)
    ratios: dict[str, list[float]] = {}
    for heads, kv_heads in ((16, 16), (16, 4)):
        for head_size in (64, 128):
            for batch in (2,) if bench.small else (32, 8):
                for context in contexts:
                    sizes = (batch, 8, context, heads, kv_heads, head_size)
                    what = "batch {}, {} queries, context {}, {}/{} x {}".format(*sizes)
                    with bench.reporting_failure("attention", what):
                        ratio = _against_torch(bench, what, *sizes)
                        ratios.setdefault(f"{heads}/{kv_heads}", []).append(ratio)
    for name, each in ratios.items():
        mean = statistics.geometric_mean(each)
        bench.report(
            "attention",
            f"bf16 {name}: time relative to torch: {mean:.2f} (geometric mean of {len(each)} shapes), "
            f"worst {max(each):.2f}",
            mean=mean,
            heads=name,
        )


def _against_torch(
    bench: Bench,
    what: str,
    batch: int,
    queries: int,
    context: int,
    heads: int,
    kv_heads: int,
    head_size: int,
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
            found = usable(found, right, partial(bench.report, "attention"))
            ways = {name: [] for name in found}
        for name in ways:
            ways[name].append(found[name])
    seconds = bench.seconds([one.run for one in inputs])
    times = {name: bench.seconds(runs) for name, runs in ways.items()}
    best = min(times, key=lambda name: times[name])
    ratio = seconds / times[best]
    share, words = share_of(kv_bytes / seconds, bench.copy_bandwidth, "the bandwidth")
    bench.report(
        "attention",
        f"{what}: {seconds * 1e6:.1f} us, {ratio:.2f} x torch's time ({best}), {words}",
        ratio=ratio,
        seconds=seconds,
        best=best,
        share=share,
    )
    return ratio


def section_decode(bench: Bench) -> None:
    shapes = [(64, 4096), (16, 8192), (4, 32_768), (1, 65_536)]
    found: list[Timed] = []
    for batch, context in [(2, 300)] if bench.small else shapes:
        what = f"batch {batch}, context {context}, 32/8 x 128"
        with bench.reporting_failure("decode", what):
            found.append(_decode(bench, what, batch, context))
    for batch in (3,) if bench.small else (32, 8):
        front, own = (6, 40) if bench.small else (64, 128)
        what = f"batch {batch}, {front * PAGE:,} shared and {own} own, 32/8 x 128"
        with bench.reporting_failure("decode", what):
            _decode_shared(bench, what, batch, front, own)
    _time_with_fp8(bench, "decode", found)


def _decode_shared(bench: Bench, what: str, batch: int, front: int, own: int) -> None:
    """Time the attention of slices that begin with the same `front` pages.

    Two times are measured: these pages are read once, or once for each slice.
    """
    slices = [(front * PAGE + own - 1, 1)] * batch
    times = {}
    for shared in (True, False):
        one = Paged.of(*(bench.device, slices, 32, 8, 128, bench.dtype), front=front, shared=shared)
        check(what, one.run(), one.right())
        times[shared] = bench.seconds([one.run])
    speed = times[False] / times[True]
    bench.report(
        "decode",
        f"{what}: {times[True] * 1e6:.1f} us, {speed:.2f} x the speed of separate reads",
        shared_seconds=times[True],
        shared_speed=speed,
    )


def _decode(bench: Bench, what: str, batch: int, context: int) -> Timed:
    kv_bytes = 2 * batch * context * 8 * 128 * 2
    slices = [(context - 1, 1)] * batch
    copies = 1 if bench.small else max(1, ROTATED_BYTES // kv_bytes)
    inputs = [Paged.of(bench.device, slices, 32, 8, 128, bench.dtype, i) for i in range(copies)]
    check("decode", inputs[0].run(), inputs[0].right())
    seconds = bench.seconds([one.run for one in inputs])
    share, words = share_of(kv_bytes / seconds, bench.copy_bandwidth, "the copy's bandwidth")
    bench.report(
        "decode",
        f"{what}: {seconds * 1e6:.1f} us, {kv_bytes / seconds / 1e9:.0f} GB/s, {words}",
        seconds=seconds,
        share=share,
    )
    return Timed(what, slices, 1 if bench.small else 2 * copies, seconds)


def section_prefill(bench: Bench) -> None:
    shapes = [(0, 4096, 1), (0, 4096, 4), (16_384 - 512, 512, 1)]
    found: list[Timed] = []
    for start, length, batch in [(100, 70, 1), (0, 100, 1)] if bench.small else shapes:
        what = f"{batch} x {length} queries over {start + length}"
        with bench.reporting_failure("prefill", what):
            found.append(_prefill(bench, what, start, length, batch))
    _time_with_fp8(bench, "prefill", found)


def _prefill(bench: Bench, what: str, start: int, length: int, batch: int) -> Timed:
    heads, kv_heads, head_size = 32, 8, 128
    slices = [(start, length)] * batch
    one = Paged.of(bench.device, slices, heads, kv_heads, head_size, bench.dtype)
    right = one.right()
    check("prefill", one.run(), right)
    seconds = bench.seconds([one.run])
    pairs = batch * (length * start + length * (length + 1) / 2)
    rate = 4 * pairs * heads * head_size / seconds
    share, words = share_of(rate, bench.matrix_rate, "the product's rate")
    bench.report(
        "prefill",
        f"{what}: {seconds * 1e6:.0f} us, {rate / 1e12:.0f} TFLOP/s, {words}",
        seconds=seconds,
        share=share,
    )
    with bench.reporting_failure("prefill", f"{what}, torch"):
        ways = usable(
            baselines(one.query.view(batch, length, heads, head_size), *one.contiguous()),
            right,
            partial(bench.report, "prefill"),
        )
        times = {name: bench.seconds([run]) for name, run in ways.items()}
        best = min(times, key=lambda name: times[name])
        speed = times[best] / seconds
        line = f"{what}: {speed:.2f} x the speed of torch ({best}, {times[best] * 1e6:.0f} us)"
        bench.report("prefill", line, speed=speed, best=best)
    return Timed(what, slices, 1, seconds)


def _time_with_fp8(bench: Bench, section: str, found: Sequence[Timed]) -> None:
    """Time the found shapes again with KV in fp8. Report the speed relative to the bench's dtype."""
    for what, slices, copies, other in found:
        name = f"{what}, KV in fp8"
        if "fp8" in bench.wrong:
            bench.report(section, f"{name}: skipped, its kernels are wrong")
            continue
        with bench.reporting_failure(section, name):
            inputs = [
                Paged.of(bench.device, slices, 32, 8, 128, bench.dtype, seed, fp8=True)
                for seed in range(copies)
            ]
            check(f"{section} over fp8", inputs[0].run(), inputs[0].right())
            seconds = bench.seconds([one.run for one in inputs])
            bench.report(
                section,
                f"{name}: {seconds * 1e6:.1f} us, {other / seconds:.2f} x the speed of {bench.dtype}",
                fp8_seconds=seconds,
                fp8_speed=other / seconds,
            )


# Narrow slices of 1 and 8 tokens, a wide slice, and a slice whose context is split into parts.
SMALLEST = [(0, 1), (31, 8), (70, 40), (600, 1)]


def run_smallest(device: torch.device) -> None:
    """Run the smallest shapes with KV in bfloat16, then in fp8."""
    for fp8 in (False, True):
        for head_size in (64, 128):
            paged = Paged.of(device, SMALLEST, 4, 1, head_size, torch.bfloat16, fp8=fp8)
            where = f"head {head_size}{', KV in fp8' if fp8 else ''}"
            check(where, paged.run(), paged.right())
        (check_write_fp8 if fp8 else check_write)(device, torch.bfloat16)


if __name__ == "__main__":
    with torch.inference_mode():
        run_smallest(torch.device(sys.argv[1]))
