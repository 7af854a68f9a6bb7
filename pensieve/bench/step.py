"""`pensieve bench step`: compare the time of an iteration with the time to read the weights.

A step is one iteration of the engine's executor: launch, forward, sampling, collect. It is timed for
generating turns (`decode`), and for the same turns together with a piece of a prompt (`mixed`). Contexts are
real: the same model computed their keys and values.

    floor   the bytes of weights that an iteration reads (all but the input embeddings) over the bandwidth
            at which torch's threads sum up memory. All experts count. A few turns read only the experts that
            they choose, so the ratio can be below 1
    ratio   time of the step divided by the floor. Both are medians, and their measurements alternate

With --weights int8 or --kv-dtype, the logits of a few prompts are first compared with the logits of the
checkpoint's own weights and KV. Before anything is timed, several turns of the largest batch must get the
same tokens as when they run alone.

On a CPU, --parts shows the time of each part of a layer, summed over the layers. The rest is embeddings, the
last norm, sampling and Python. With few rows, a product is limited by the reading of its weights, so the
bandwidth of this read is shown.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from pensieve.bench.measured_model import measured_model, model_in_words
from pensieve.bench.plots import Sheet
from pensieve.bench.report import Report, machine, percentile, progress
from pensieve.core.iteration import Iteration, Slice, TurnStart
from pensieve.errors import InvalidArgument, PensieveError
from pensieve.kernels.layer.cpu import PARTS, CpuLayer, measured_parts
from pensieve.launch.memory_nodes import spread_memory
from pensieve.model.attention import PagedPass
from pensieve.model.batch import Batch
from pensieve.model.executor import TorchExecutor
from pensieve.model.fuse.layers import FusedLayer
from pensieve.model.fuse.products import PackedProduct
from pensieve.model.kv.memory import KVMemory
from pensieve.model.loader import LoadedModel, load
from pensieve.model.sampling.sampler import Sampler
from pensieve.sampling import Sampling
from pensieve.text.tokenizer import Tokenizer

SLOTS = 32
CHECKED_TOKENS = 8
READ_BYTES = 256 << 20  # larger than any CPU cache


@dataclass(frozen=True)
class StepRow:
    kind: str
    batch: int
    context: int
    prompt_tokens: int  # computed together with the generating turns
    seconds: float  # median
    p90_seconds: float
    floor_seconds: float
    ratio: float
    tokens_per_second: float


@dataclass(frozen=True)
class StepOptions:
    model: str  # "" for random weights of the shape
    shape: str
    batches: tuple[int, ...]
    context: int
    prompt_tokens: int
    repeats: int
    int8: bool
    parts: bool = False  # also time each part of the layers
    kv_dtype: str = "auto"

    @property
    def rounded_formats(self) -> str:
        """Return in words which formats differ from the checkpoint's."""
        kv = "" if self.kv_dtype == "auto" else f"{self.kv_dtype} KV"
        return " and ".join(each for each in ("int8 weights" if self.int8 else "", kv) if each)


def run(options: StepOptions, report: Report) -> list[StepRow]:
    if min(options.batches) < 1 or options.context < 1 or options.repeats < 1:
        raise InvalidArgument("batch, context, repeats", "must be at least 1")
    about: dict[str, object] = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    spread_memory(progress)  # as an engine does
    with measured_model(options.model, options.shape) as folder:
        exact = Logits.of(load(folder)) if options.rounded_formats else None
        model = load(folder, int8=options.int8, kv_dtype=options.kv_dtype, report=progress)
        tokenizer = Tokenizer.load(folder)
    if options.parts:
        check_measurable(model)
    model_text = model_in_words(options.model, options.shape)
    report.about(
        f"{model_text}, {options.rounded_formats or str(model.flat.module.dtype).split('.')[-1]}",
        f"{machine()}, {torch.get_num_threads()} threads",
        f"contexts of {options.context}, pieces of {options.prompt_tokens} prompt tokens",
    )
    if exact is not None:
        about["accuracy"] = accuracy = Logits.of(model).compared_with(exact)
        report.line(
            f"{options.rounded_formats} against the checkpoint's: {accuracy['same_token_share']:.1%} of the "
            f"likeliest tokens are the same, KL divergence {accuracy['kl_divergence']:.4f}, logits off "
            f"by {accuracy['logit_difference']:.1%} of their range"
        )
    rows: list[StepRow] = []
    parts: list[PartRow] = []
    for row in measure(model, tokenizer, options):
        if isinstance(row, PartRow):
            parts.append(row)
            report.line(str(row))
            continue
        rows.append(row)
        with_prompt = f" with {row.prompt_tokens} prompt tokens" if row.prompt_tokens else ""
        report.line(
            f"{row.batch:3} turns{with_prompt}: {row.seconds * 1e3:7.2f} ms (p90 "
            f"{row.p90_seconds * 1e3:.2f}), weights {row.floor_seconds * 1e3:.2f} ms: "
            f"{row.ratio:.2f} x, {row.tokens_per_second:,.0f} tokens/s"
        )
    about["rows"] = [asdict(row) for row in rows]
    if options.parts:
        about["parts"] = [asdict(row) for row in parts]
    report.finish(about)
    return rows


@dataclass(slots=True)
class GeneratingTurn:
    """One turn of the batch."""

    attempt_id: int
    row: int  # in the batch
    tokens: array[int]  # 'I'
    page_table: array[int]  # 'i'

    def slice(self, start: int, stop: int, needs_token: bool) -> Slice:
        return Slice(
            self.attempt_id, start, stop, self.tokens[start:stop], self.page_table, needs_token
        )


class Bench:
    """Turns on an executor that holds their KV, with a timer for each step."""

    def __init__(
        self, model: LoadedModel, tokenizer: Tokenizer, batch_max: int, tokens_max: int
    ) -> None:
        shape = model.shape
        pages = batch_max * -(-tokens_max // SLOTS)
        self._memory = KVMemory(shape, pages, 0, SLOTS)
        sampler = Sampler(shape.vocab_size)
        self._executor = TorchExecutor(model, self._memory, sampler, tokenizer)
        self._draw = torch.Generator().manual_seed(0)
        self._vocab_size = shape.vocab_size
        self._pages_per_turn = -(-tokens_max // SLOTS)
        self._index = 0
        self._num_turns = 0
        self._started: list[TurnStart] = []  # since the last step

    def turn(self, index: int, prompt: Sequence[int]) -> GeneratingTurn:
        """Return a turn with the pages of its row in the batch; they are scattered."""
        pages = torch.arange(self._memory.device_pages).view(self._pages_per_turn, -1)[:, index]
        self._num_turns += 1
        turn = GeneratingTurn(
            self._num_turns, index, array("I", prompt), array("i", pages.tolist())
        )
        self._started.append(TurnStart(turn.attempt_id, turn.tokens[:], Sampling()))
        return turn

    def prompt(self, length: int) -> list[int]:
        ids: list[int] = torch.randint(
            self._vocab_size // 2, self._vocab_size, (length,), generator=self._draw
        ).tolist()
        return ids

    def fill(self) -> None:
        """Fill all KV with a constant. The time of a step does not depend on the values."""
        self._memory.device_arena.fill_(1)

    def step(self, slices: Sequence[Slice], turns: Sequence[GeneratingTurn]) -> float:
        """Run a step, append the sampled tokens to their turns, and return its seconds."""
        iteration = Iteration(self._index, tuple(slices), started=tuple(self._started))
        self._started.clear()
        self._index += 1
        began = time.perf_counter()
        self._executor.launch(iteration)
        outcome = self._executor.collect()
        seconds = time.perf_counter() - began
        by_id = {turn.attempt_id: turn for turn in turns}
        if outcome.failures:
            raise PensieveError(outcome.failures[0].message)
        for sample in outcome.samples:
            by_id[sample.attempt_id].tokens.append(sample.token_id)
        return seconds

    def prefill(self, turns: Sequence[GeneratingTurn], at_once: int = 512) -> None:
        for turn in turns:
            end = len(turn.tokens)
            for start in range(0, end, at_once):
                stop = min(start + at_once, end)
                self.step([turn.slice(start, stop, stop == end)], [turn])

    def decode(self, turns: Sequence[GeneratingTurn], *others: Slice) -> float:
        decodes = [turn.slice(len(turn.tokens) - 1, len(turn.tokens), True) for turn in turns]
        return self.step([*decodes, *others], turns)

    def close(self) -> None:
        self._executor.close()


def measure(
    model: LoadedModel, tokenizer: Tokenizer, options: StepOptions
) -> Iterator[StepRow | PartRow]:
    batches, context, repeats = options.batches, options.context, options.repeats
    prompt_tokens = options.prompt_tokens
    tokens_max = context + CHECKED_TOKENS + (repeats + 4) * 3 * len(batches) + 8
    largest = max(batches)
    bench = Bench(model, tokenizer, largest + 1, max(tokens_max, prompt_tokens))
    try:
        with torch.inference_mode():
            prompts = [bench.prompt(context) for _ in range(largest)]
            turns = _checked_turns(bench, prompts)
            num_bytes = weight_bytes_read(model)
            memory = torch.ones(READ_BYTES // 8, dtype=torch.int64)
            prompt_turn = bench.turn(largest, bench.prompt(prompt_tokens + 1))
            piece = prompt_turn.slice(0, prompt_tokens, False)
            for batch in batches:
                for kind, others in (("decode", ()), ("mixed", (piece,))):
                    times, reads = [], []
                    for _ in range(repeats + 2):
                        reads.append(_seconds(memory.sum))
                        times.append(bench.decode(turns[:batch], *others))
                    floor = num_bytes / READ_BYTES * statistics.median(reads[2:])
                    yield _row(kind, batch, context, prompt_tokens, times[2:], floor)
                if options.parts:
                    step = partial(bench.decode, turns[:batch])
                    yield from part_rows(batch, step, repeats, weight_bytes(model))
    finally:
        bench.close()


def decode_seconds(folder: Path, batch: int, context: int, repeats: int) -> float:
    """Return the median time of an iteration of `batch` generating turns with `context` tokens each."""
    model, tokenizer = load(folder), Tokenizer.load(folder)
    bench = Bench(model, tokenizer, batch, context + repeats + 3)
    try:
        with torch.inference_mode():
            bench.fill()
            turns = [bench.turn(index, bench.prompt(context)) for index in range(batch)]
            times = [bench.decode(turns) for _ in range(repeats + 2)]
    finally:
        bench.close()
    return statistics.median(times[2:])


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _checked_turns(bench: Bench, prompts: Sequence[Sequence[int]]) -> list[GeneratingTurn]:
    """Return the turns as a batch, after checking that some of them get the same tokens alone."""
    lone_turns = []
    for index, prompt in list(enumerate(prompts))[:: max(1, len(prompts) // 4)]:
        turn = bench.turn(index, prompt)
        bench.prefill([turn])
        for _ in range(CHECKED_TOKENS):
            bench.decode([turn])
        lone_turns.append(turn)
    turns = [bench.turn(index, prompt) for index, prompt in enumerate(prompts)]
    bench.prefill(turns)
    for _ in range(CHECKED_TOKENS):
        bench.decode(turns)
    for turn in lone_turns:
        if turn.tokens != turns[turn.row].tokens:
            raise PensieveError(f"turn {turn.row} gets another reply when it is alone")
    return turns


def _row(
    kind: str, batch: int, context: int, prompt_tokens: int, times: Sequence[float], floor: float
) -> StepRow:
    seconds = statistics.median(times)
    return StepRow(
        kind=kind,
        batch=batch,
        context=context,
        prompt_tokens=prompt_tokens if kind == "mixed" else 0,
        seconds=seconds,
        p90_seconds=percentile(times, 0.9),
        floor_seconds=floor,
        ratio=seconds / floor,
        tokens_per_second=batch / seconds,
    )


class Logits(NamedTuple):
    """The logits of all rows of a few random prompts: (tokens, vocab)."""

    rows: torch.Tensor

    @classmethod
    def of(cls, model: LoadedModel, num_prompts: int = 4, length: int = 64) -> Logits:
        draw = torch.Generator().manual_seed(1)
        vocab_size = model.shape.vocab_size
        rows = []
        for _ in range(num_prompts):
            ids = torch.randint(vocab_size // 2, vocab_size, (length,), generator=draw)
            memory = KVMemory(model.shape, -(-length // SLOTS), 0, SLOTS)
            tokens, pages = array("I", ids.tolist()), array("i", range(memory.device_pages))
            batch = Batch.from_slices([Slice(0, 0, length, tokens, pages, True)], SLOTS)
            forward_pass = PagedPass(batch, memory, wait_layer=lambda layer: None)
            positions = torch.arange(length)
            with torch.inference_mode():
                logits = model.flat.logits(ids, positions, positions, forward_pass)
            rows.append(logits.float().clone())
        return cls(torch.cat(rows))

    def compared_with(self, exact: Logits) -> dict[str, float]:
        """Return how much rounding has changed the logits, compared with the exact logits."""
        rounded, reference = self.rows, exact.rows
        divergence = F.kl_div(
            rounded.log_softmax(-1), reference.log_softmax(-1), log_target=True, reduction="none"
        ).sum(-1)
        difference = (rounded - reference).abs().amax(-1) / (
            reference.amax(-1) - reference.amin(-1)
        )
        return {
            "same_token_share": float((rounded.argmax(-1) == reference.argmax(-1)).float().mean()),
            "kl_divergence": float(divergence.mean()),
            "logit_difference": float(difference.median()),  # relative to a row's range
        }


def weight_bytes_read(model: LoadedModel) -> int:
    """Return the bytes that an iteration reads: all but the input embeddings, unless these are tied."""
    module = model.flat.module
    table: torch.Tensor = module.get_input_embeddings().weight
    packed: int = sum(
        each.weight_bytes
        for each in module.modules()
        if isinstance(each, FusedLayer | PackedProduct)
    )
    if packed:
        rest: int = sum(each.nbytes for each in module.parameters())
        return packed + rest - table.nbytes
    tied = getattr(module.config.get_text_config(), "tie_word_embeddings", False)
    return model.shape.weight_bytes - (0 if tied else table.nbytes)


def plot(rows: Sequence[StepRow], path: Path, facts: Sequence[str]) -> None:
    """Draw the ratio over the batch, a line for each kind."""
    sheet = Sheet(
        "An iteration over the time to read the weights",
        [*facts, "medians; bands: to the P90"],
        4.6,
    )
    batches = sorted({row.batch for row in rows})
    panel = sheet.panel("", "turns generating", "time / time to read the weights", swept=batches)
    panel.horizontal_line("reading the weights", 1.0)
    for kind, name in (("decode", "generating"), ("mixed", "with a piece of a prompt")):
        selected = [row for row in rows if row.kind == kind]
        if selected:
            ratios = [row.ratio for row in selected]
            p90s = [row.p90_seconds / row.floor_seconds for row in selected]
            panel.line(name, [row.batch for row in selected], ratios, ratios, p90s)
    sheet.save(path)


REST = "the rest"


@dataclass(frozen=True)
class PartRow:
    batch: int
    name: str
    seconds: float  # median over the steps
    share: float  # part of the step's time
    weight_bytes: int

    @property
    def bytes_per_second(self) -> float:
        return self.weight_bytes / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        speed = f", {self.bytes_per_second / 1e9:5.1f} GB/s of weights" if self.weight_bytes else ""
        return f"    {self.name:13} {self.seconds * 1e3:7.2f} ms, {self.share:4.0%}{speed}"


def check_measurable(model: LoadedModel) -> None:
    if not _layers(model):
        raise InvalidArgument("parts", "only layers that run in C++ are measured by their parts")


def weight_bytes(model: LoadedModel) -> dict[str, int]:
    """Return the weight bytes of all layers, by part."""
    found = dict.fromkeys(PARTS, 0)
    for layer in _layers(model):
        for name, num_bytes in layer.bytes_of_parts.items():
            found[name] += num_bytes
    found["output matrix"] += sum(
        each.weight_bytes for each in model.flat.module.modules() if isinstance(each, PackedProduct)
    )
    return found


def part_rows(
    batch: int, step: Callable[[], float], repeats: int, weights: Mapping[str, int]
) -> list[PartRow]:
    """Run `step`, which returns its seconds, repeatedly. Return the median time of each part."""
    times: list[float] = []
    parts: list[Mapping[str, float]] = []
    for _ in range(repeats):
        with measured_parts() as part_seconds:
            times.append(step())
        parts.append(part_seconds)
    rest = [whole - sum(each.values()) for whole, each in zip(times, parts, strict=True)]
    named: dict[str, Sequence[float]] = {name: [each[name] for each in parts] for name in PARTS}
    whole = statistics.median(times)
    return [
        PartRow(batch, name, median, median / whole, weights.get(name, 0))
        for name, seconds in {**named, REST: rest}.items()
        if (median := statistics.median(seconds))
    ]


def _layers(model: LoadedModel) -> list[CpuLayer]:
    modules = model.flat.module.modules()
    fused = [each.dense for each in modules if isinstance(each, FusedLayer)]
    return [each for each in fused if isinstance(each, CpuLayer)]
