"""`pensieve bench attention`: compare attention over scattered pages with torch on contiguous keys.

Each row is one shape: `batch` slices of `queries` tokens at the end of a context. These variants compute the
same attention:

    paged               multi_token_attention over pages in random order
    contiguous          torch's fused attention on contiguous keys and values: the fastest of up to four
                        calls, which compute one padded batch or a loop over slices, with grouped heads
                        (`enable_gqa`) or with a group's queries folded into rows
    copy_out            gather the pages into contiguous memory first, then attend
    token_by_token      multi_token_attention with one query at a time
    int8_kv             multi_token_attention over pages stored as int8 (`--kv-dtype int8`)

Every result is compared with float32 before it is timed. Successive calls use different copies of the inputs,
so that no input is in a CPU cache. The variants alternate, and the report compares their medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from pensieve.bench.plots import Sheet
from pensieve.bench.report import Report, machine, progress
from pensieve.errors import InvalidArgument, PensieveError
from pensieve.kernels import cpu_library, multi_token_attention
from pensieve.kernels.attention import reference
from pensieve.kernels.attention.input import AttentionInput, AttentionKind, PageIndex
from pensieve.kernels.kv_format import dequantised, quantised

SLOTS = 32
COPIES_BYTES = 256 << 20  # total size of the copies of the inputs: larger than any CPU cache
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
Run = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class AttentionShape:
    batch: int
    queries: int
    context: int
    heads: int
    kv_heads: int
    head_size: int
    dtype: str

    @property
    def kv_bytes(self) -> int:
        size = getattr(torch, self.dtype).itemsize
        return 2 * self.batch * self.context * self.kv_heads * self.head_size * int(size)


@dataclass(frozen=True)
class AttentionRow:
    batch: int
    queries: int
    context: int
    heads: int
    kv_heads: int
    head_size: int
    dtype: str
    seconds: float
    contiguous_seconds: float
    copy_out_seconds: float
    token_by_token_seconds: float
    ratio: float  # seconds over contiguous_seconds
    bandwidth_share: float  # share of the measured read bandwidth
    int8_kv_seconds: float


@dataclass(frozen=True)
class AttentionOptions:
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    head_sizes: tuple[int, ...]
    queries: int
    dtype: str | None  # None: both types
    repeats: int


def run(options: AttentionOptions, report: Report) -> list[AttentionRow]:
    if min(options.contexts) < options.queries:
        raise InvalidArgument("context", "must be at least as long as the queries")
    bandwidth = read_bytes_per_second()
    about = {**build(), "read_bytes_per_second": bandwidth}
    built = ", ".join(f"{name} {value}" for name, value in build().items())
    progress(f"{built}, reading {bandwidth / 1e9:.1f} GB/s")
    report.about(
        machine(),
        f"{torch.get_num_threads()} threads",
        f"slices of {options.queries} queries, batches of {', '.join(map(str, options.batches))}",
    )
    rows = []
    measured = list(shapes(options))
    for number, shape in enumerate(measured, 1):
        progress(f"{number} of {len(measured)}: {words(shape)}")
        row = measure(shape, options.repeats, bandwidth)
        rows.append(row)
        report.line(line_of(row))
    means = geometric_means(rows)
    for name, ratio in means.items():
        report.line(f"{name}: {ratio:.2f} x (geometric mean)")
    int8_ratios = geometric_means(rows, lambda row: row.int8_kv_seconds / row.seconds)
    for name, ratio in int8_ratios.items():
        report.line(f"{name}: int8 KV takes {ratio:.2f} x the time (geometric mean)")
    given = {"rows": [asdict(row) for row in rows], "ratios": means, "int8_kv_ratios": int8_ratios}
    report.finish({**about, **given})
    return rows


def words(shape: AttentionShape | AttentionRow) -> str:
    return (
        f"{shape.dtype:8} {shape.heads}/{shape.kv_heads:<2} of {shape.head_size:3}, "
        f"batch {shape.batch:2}, context {shape.context:5}"
    )


def line_of(row: AttentionRow) -> str:
    return (
        f"{words(row)}: {row.seconds * 1e3:7.2f} ms, contiguous "
        f"{row.contiguous_seconds * 1e3:7.2f} ({row.ratio:.2f} x), copy-out "
        f"{row.copy_out_seconds * 1e3:7.2f}, token by token "
        f"{row.token_by_token_seconds * 1e3:7.2f}, int8 KV {row.int8_kv_seconds * 1e3:7.2f}; "
        f"{row.bandwidth_share:4.0%} of the bandwidth"
    )


def shapes(options: AttentionOptions) -> Iterator[AttentionShape]:
    for dtype in ("bfloat16", "float32"):
        if options.dtype not in (None, dtype):
            continue
        for kv_heads in (16, 4):
            for head_size in options.head_sizes:
                for batch in options.batches:
                    for context in options.contexts:
                        yield AttentionShape(
                            batch, options.queries, context, 16, kv_heads, head_size, dtype
                        )


class Inputs:
    """One copy of the inputs: random pages, and the same keys and values in contiguous memory."""

    def __init__(self, shape: AttentionShape, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        dtype = getattr(torch, shape.dtype)
        batch, context, length = shape.batch, shape.context, shape.queries
        per_turn = -(-context // SLOTS)
        num_pages = batch * per_turn
        arena = torch.randn(
            (num_pages, 2, shape.kv_heads, SLOTS, shape.head_size), generator=draw
        ).to(dtype)
        self.int8_pages = quantised(arena)
        order = torch.randperm(num_pages, generator=draw)
        page_table = order.view(batch, per_turn).int()
        offsets = torch.arange(batch + 1, dtype=torch.int32) * length
        self.turns = torch.arange(batch, dtype=torch.int32)
        starts = torch.full((batch,), context - length, dtype=torch.int32)
        rows = (batch * length, shape.heads, shape.head_size)
        self.query = torch.randn(rows, generator=draw).to(dtype)
        self.scaling: float = shape.head_size**-0.5
        self.out = torch.empty_like(self.query)
        self.inputs = AttentionInput(
            *(self.query, arena[:, 0], arena[:, 1]),
            PageIndex(page_table, offsets, self.turns, starts),
            AttentionKind(self.scaling),
        )
        self.int8_inputs = self.inputs._replace(
            key_pages=self.int8_pages[:, 0], value_pages=self.int8_pages[:, 1]
        )
        gathered = arena[page_table.long()]  # (batch, pages, 2, kv_heads, slots, head_size)
        tail = (batch, shape.kv_heads, per_turn * SLOTS, shape.head_size)
        whole = gathered.permute(2, 0, 3, 1, 4, 5).reshape(2, *tail)[:, :, :, :context]
        self.keys, self.values = whole[0].contiguous(), whole[1].contiguous()
        self.by_slice = self.query.view(batch, length, shape.heads, shape.head_size)
        visible = torch.arange(context)[None] <= torch.arange(context - length, context)[:, None]
        self.mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
        repeats = shape.heads // shape.kv_heads
        self.folded_mask = self.mask.repeat(repeats, 1)
        single = PageIndex(
            page_table,
            torch.arange(batch * length + 1, dtype=torch.int32),
            self.turns.repeat_interleave(length),
            (context - length + torch.arange(length)).repeat(batch).int(),
        )
        self.single_inputs = self.inputs._replace(page_index=single)

    def paged(self) -> torch.Tensor:
        multi_token_attention(self.inputs, self.out)
        return self.out

    def token_by_token(self) -> torch.Tensor:
        multi_token_attention(self.single_inputs, self.out)
        return self.out

    def int8_kv(self) -> torch.Tensor:
        multi_token_attention(self.int8_inputs, self.out)
        return self.out

    def copy_out(self) -> torch.Tensor:
        reference.multi_token_attention(self.inputs, self.out)
        return self.out

    def _grouped(self, first: int, last: int) -> torch.Tensor:
        query = self.by_slice[first:last].transpose(1, 2)
        keys, values = self.keys[first:last], self.values[first:last]
        attended = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=self.mask, scale=self.scaling, enable_gqa=True
        )
        return attended.transpose(1, 2)

    def _folded(self, first: int, last: int) -> torch.Tensor:
        count, length, heads, head_size = self.by_slice[first:last].shape
        kv_heads = self.keys.shape[1]
        query = self.by_slice[first:last].view(count, length, kv_heads, -1, head_size)
        rows = query.permute(0, 2, 3, 1, 4).reshape(count, kv_heads, -1, head_size)
        attended = F.scaled_dot_product_attention(
            rows,
            self.keys[first:last],
            self.values[first:last],
            attn_mask=self.folded_mask,
            scale=self.scaling,
        )
        unfolded = attended.view(count, kv_heads, -1, length, head_size).permute(0, 3, 1, 2, 4)
        return unfolded.reshape(count, length, heads, head_size)

    def contiguous(self) -> dict[str, Run]:
        batch = len(self.turns)

        def loop(attend: Callable[[int, int], torch.Tensor]) -> Run:
            return lambda: torch.cat([attend(i, i + 1) for i in range(batch)])

        calls: dict[str, Run] = {
            "batch, grouped": lambda: self._grouped(0, batch),
            "loop, grouped": loop(self._grouped),
        }
        if len(self.folded_mask) > len(self.mask):
            calls["batch, folded"] = lambda: self._folded(0, batch)
            calls["loop, folded"] = loop(self._folded)
        return calls

    def expected(self, name: str = "") -> torch.Tensor:
        """Return the expected result in float32; for int8_kv, computed from the quantised values."""
        out = torch.empty_like(self.query, dtype=torch.float32)
        keys, values = self.inputs.key_pages.float(), self.inputs.value_pages.float()
        if name == "int8_kv":
            keys, values = dequantised(self.int8_pages).unbind(1)
        inputs = self.inputs._replace(query=self.query.float(), key_pages=keys, value_pages=values)
        reference.multi_token_attention(inputs, out)
        return out


@torch.inference_mode()
def measure(shape: AttentionShape, repeats: int, bandwidth: float) -> AttentionRow:
    copies = max(2, min(16, COPIES_BYTES // shape.kv_bytes))
    inputs = [Inputs(shape, seed) for seed in range(copies)]
    first = inputs[0]
    names = ["paged", "int8_kv", "copy_out", "token_by_token", *first.contiguous()]

    def variant_of(copy: Inputs, name: str) -> Run:
        found: Run = getattr(copy, name, None) or copy.contiguous()[name]
        return found

    exact = first.expected()
    for name in names:
        result = variant_of(first, name)().reshape(exact.shape)
        expected = first.expected(name) if name == "int8_kv" else exact
        check_close(name, result, expected, TOLERANCE, where=f" at {shape}")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    call = 0
    for _ in range(repeats):
        for name in names:
            call += 1
            run = variant_of(inputs[call % copies], name)
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    median = {name: statistics.median(each) for name, each in seconds.items()}
    contiguous = min(median[name] for name in first.contiguous())
    return AttentionRow(
        **asdict(shape),
        seconds=median["paged"],
        contiguous_seconds=contiguous,
        copy_out_seconds=median["copy_out"],
        token_by_token_seconds=median["token_by_token"],
        ratio=median["paged"] / contiguous,
        bandwidth_share=shape.kv_bytes / median["paged"] / bandwidth,
        int8_kv_seconds=median["int8_kv"],
    )


def read_bytes_per_second(num_bytes: int = 512 << 20) -> float:
    """Measure the read bandwidth of memory with torch's threads: the best of five sums."""
    values = torch.ones(num_bytes // 8, dtype=torch.int64)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        values.sum()
        seconds.append(time.perf_counter() - began)
    return num_bytes / min(seconds)


def geometric_means(
    rows: Sequence[AttentionRow], ratio: Callable[[AttentionRow], float] = lambda row: row.ratio
) -> dict[str, float]:
    """Return the mean ratio by type and heads, for contexts of at least 512 and for shorter contexts."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        size = "512 and more" if row.context >= 512 else "below 512"
        name = f"{row.dtype} {row.heads}/{row.kv_heads}, context {size}"
        groups.setdefault(name, []).append(ratio(row))
    return {name: statistics.geometric_mean(each) for name, each in groups.items()}


def build() -> dict[str, str | int | None]:
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "float32": cpu_library.instruction_set(torch.float32, 64),
        "bfloat16": cpu_library.instruction_set(torch.bfloat16, 64),
    }


def plot(rows: Sequence[AttentionRow], path: Path, facts: Sequence[str]) -> None:
    """Draw the ratio over the context: a line per type and heads, averaged over the other parameters."""
    means = "lines: geometric means over batches and head sizes; bands: minimum to maximum ratio"
    sheet = Sheet(
        "Attention over scattered pages, relative to torch's attention on contiguous keys",
        [*facts, means],
        4.6,
    )
    contexts = sorted({row.context for row in rows})
    panel = sheet.panel(
        "", "context (tokens)", "time / time of contiguous attention", swept=contexts
    )
    panel.horizontal_line("contiguous (torch)", 1.0)
    for dtype, kv_heads in sorted({(row.dtype, row.kv_heads) for row in rows}):
        selected = [row for row in rows if (row.dtype, row.kv_heads) == (dtype, kv_heads)]
        ratios = [[row.ratio for row in selected if row.context == context] for context in contexts]
        panel.line(
            f"{dtype}, {selected[0].heads}/{kv_heads} heads",
            contexts,
            [statistics.geometric_mean(each) for each in ratios],
            [min(each) for each in ratios],
            [max(each) for each in ratios],
        )
    sheet.save(path)


def check_close(
    name: str,
    result: torch.Tensor,
    expected: torch.Tensor,
    tolerance: dict[torch.dtype, float],
    where: str = "",
) -> float:
    """Return the largest error against float32. Raises PensieveError if it exceeds the tolerance.

    Call this before timing, so that no wrong result is timed."""
    worst = float((result.float() - expected).abs().max())
    if not worst <= tolerance[result.dtype]:  # also raises for NaN
        raise PensieveError(f"{name} is off by {worst}{where}")
    return worst
