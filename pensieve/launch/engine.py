"""Builds an engine that runs a model (load, size the tiers, capture graphs, assemble).

It connects packages that must not import each other: the model with its kernels, and the engine.  `report`
is called with a line about each stage, because loading takes seconds or minutes.  If a stage fails, all that
was started or allocated before is closed again.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TextIO

from pensieve.config import Settings
from pensieve.core.cache import CacheConfig, IsIntact, trusted
from pensieve.core.cost import CostProfile
from pensieve.core.iteration_cost import IterationCost
from pensieve.core.policies.registry import policy_named
from pensieve.core.scheduler_config import SOME_COST, SchedulerConfig
from pensieve.engine.assembly import EngineConfigs, Ports, assemble
from pensieve.engine.engine import Engine
from pensieve.engine.journal import Journal, opened
from pensieve.engine.mailbox import Mailbox
from pensieve.engine.ports import Sink
from pensieve.errors import ConfigError, ModelError
from pensieve.launch.model_folder import LoadedTexts, Report
from pensieve.launch.objectives import ESTIMATED, Pages, Smallest, smallest_tbt
from pensieve.launch.sizing import TierPages, size_text, tier_pages, turns_max
from pensieve.sim import cost_file
from pensieve.sim.cost import HARDWARE
from pensieve.sim.fit import assumed_for

if TYPE_CHECKING:
    import torch

    from pensieve.launch.model_ranks import ModelRanks
    from pensieve.model.graphs import DecodeGraphs
    from pensieve.model.kv.memory import KVMemory
    from pensieve.model.sampling.sampler import Sampler
    from pensieve.model.shape import ModelShape
    from pensieve.text import Tokenizer


class SystemClock:
    """Monotonic seconds."""

    def now(self) -> float:
        return time.monotonic()


class Closable(Protocol):
    def close(self) -> None: ...


@dataclass
class BuiltEngine:
    """An engine that is ready to run, and what has to be closed after it."""

    engine: Engine
    executor: Closable
    vocab_size: int
    pages: TierPages
    page_bytes: int
    journal: TextIO | None = None
    computes: Mapping[str, str] = field(
        default_factory=dict
    )  # dtype, kv_dtype, weights, device, layers
    smallest_tbt: Smallest | None = None  # where there is an objective

    @property
    def context_max(self) -> int:
        return self.engine.config.context_max

    def close(self) -> None:
        self.executor.close()
        if self.journal is not None:
            self.journal.close()


def build_engine(
    settings: Settings,
    folder: Path,
    texts: LoadedTexts,
    report: Report,
    mailbox: Mailbox,
    sink: Sink,
) -> BuiltEngine:
    """Load the model and put cache, scheduler and executor around it."""
    report("loading torch")
    from pensieve.launch.model_ranks import load_model
    from pensieve.model.executor import TorchExecutor
    from pensieve.model.kv.checksums import PageChecksums
    from pensieve.model.parallel.executor import ParallelExecutor
    from pensieve.model.sampling.sampler import Sampler

    with ExitStack() as undo:
        ranks = load_model(settings, folder, report, undo)
        shape, tokenizer = ranks.model.shape, texts.template.tokenizer
        if tokenizer.vocab_size > shape.vocab_size:
            raise ModelError(
                f"the tokenizer knows {tokenizer.vocab_size} tokens, the model {shape.vocab_size}"
            )
        cost = _cost(settings, shape, ranks.model.num_heads)
        end_ids = ranks.model.eos_token_ids | texts.template.end_of_turn_ids
        sampler = Sampler(shape.vocab_size, end_ids)
        tiers = _allocate(settings, ranks, sampler, tokenizer, report)
        graphs = _graphs(settings, ranks, tiers.memory, report)
        checksums = PageChecksums(tiers.memory.host_arena) if settings.check_kv else None
        own = TorchExecutor(
            ranks.model, tiers.memory, sampler, tokenizer, graphs=graphs, checksums=checksums
        )
        undo.callback(own.close)
        executor: TorchExecutor | ParallelExecutor = own
        if ranks.leader is not None:
            executor = ParallelExecutor(own, ranks.leader)
        computed_by = _computed_by(settings, folder, ranks)
        configs = EngineConfigs.fitted(
            CacheConfig(*tiers.pages, settings.chunk_tokens),
            SchedulerConfig(
                settings.token_budget,
                turns_max(settings, tiers.pages.device),
                settings.prompt_seconds,
                settings.tbt,
                _iteration_cost(settings, ranks, computed_by),
                settings.share,
            ),
            shape.context_max,
            ttft_seconds=settings.ttft,
        )
        journal = _journal(settings, computed_by, configs, cost)
        is_intact: IsIntact = checksums.is_intact if checksums is not None else trusted
        if journal is not None:
            is_intact = journal.observer.noting(is_intact)
        engine = assemble(
            configs,
            policy_named(settings.policy, cost, settings.chunk_tokens),
            executor,
            Ports(SystemClock(), mailbox, sink),
            [journal.observer] if journal is not None else [],
            is_intact,
        )
        observer = journal.observer if journal is not None else None

        def figures() -> dict[str, float]:
            more = {"rows_padded": float(executor.rows_padded)}
            if observer is not None:
                more["journal_given_up"] = float(observer.given_up)
            return more

        engine.metrics.more = figures
        smallest = None
        if settings.tbt:
            smallest = smallest_tbt(
                configs.scheduler.cost,
                ESTIMATED if settings.cost is None else f"by {settings.cost}",
                executor,
                Pages(tiers.pages.device, settings.chunk_tokens),
                SystemClock().now,
            )
        gc.collect()
        gc.freeze()  # the modules' objects live as long as the process; no collection needs to visit them
        undo.pop_all()
    return BuiltEngine(
        engine,
        executor,
        shape.vocab_size,
        tiers.pages,
        tiers.page_bytes,
        journal.file if journal is not None else None,
        {
            "dtype": str(shape.dtype).removeprefix("torch."),
            "kv_dtype": shape.kv_format.in_words,
            "weights": settings.weights,
            "device": str(ranks.model.flat.module.device),
            "layers": ranks.model.flat.form,
        },
        smallest,
    )


class _Tiers(NamedTuple):
    memory: KVMemory  # of this rank
    pages: TierPages
    page_bytes: int  # of all ranks together


def _allocate(
    settings: Settings, ranks: ModelRanks, sampler: Sampler, tokenizer: Tokenizer, report: Report
) -> _Tiers:
    """Allocate both tiers, in all ranks; on a GPU the device tier is sized by the memory that is left."""
    from pensieve.model.free_memory import free_for_kv
    from pensieve.model.kv.memory import KVMemory

    model, leader = ranks
    device: torch.device = model.flat.module.device
    sizes = (settings.token_budget, turns_max(settings), settings.chunk_tokens)
    num_ranks = settings.tensor_parallel
    device_bytes = None  # a CPU: both tiers are in the host's memory
    if device.type == "cuda":
        report("measuring what is left of the GPU's memory")
        if leader is not None:
            leader.start_measuring(*sizes)
        device_bytes = free_for_kv(model, *sizes, device, sampler)
        if leader is not None:
            device_bytes = num_ranks * min(device_bytes, *leader.measured_bytes())
    page_bytes = num_ranks * model.shape.kv_bytes_per_page(settings.chunk_tokens)
    pages = tier_pages(settings, page_bytes, device_bytes)
    memory = KVMemory(model.shape, *pages, settings.chunk_tokens, device, report)
    if leader is not None:
        leader.allocate(*pages, settings.chunk_tokens)
    tier_sizes = (
        f"{name} {size_text(num_pages * page_bytes)} = {num_pages * settings.chunk_tokens:,} tokens"
        for name, num_pages in zip(TierPages._fields, pages, strict=True)
    )
    report(f"KV pools: {', '.join(tier_sizes)}, in {memory.format.in_words}")
    return _Tiers(memory, pages, page_bytes)


def _graphs(
    settings: Settings, ranks: ModelRanks, memory: KVMemory, report: Report
) -> DecodeGraphs | None:
    """Capture the graphs of decode batches, on a GPU and with one rank."""
    if ranks.model.flat.module.device.type != "cuda" or ranks.leader is not None:
        return None
    import torch

    from pensieve.model.graphs import DecodeGraphs

    num_turns = turns_max(settings, memory.device_pages)
    graphs = DecodeGraphs(ranks.model.flat, memory, num_turns)
    with torch.inference_mode():
        graphs.capture()
    report(
        f"decoding runs without graphs: {graphs.failure}"
        if graphs.failure
        else f"captured graphs for up to {num_turns} turns"
    )
    return graphs


def _cost(settings: Settings, shape: ModelShape, num_heads: int) -> CostProfile:
    """What recomputing a chunk costs: measured on this machine, or estimated from the model's shape."""
    if settings.cost is None:
        return CostProfile.analytic(
            shape.num_parameters,
            shape.num_layers,
            num_heads,
            shape.head_size,
            settings.chunk_tokens,
        )
    found = cost_file.load(settings.cost)
    if found.layers != shape.num_layers:
        raise ConfigError(
            f"{settings.cost} was measured with a model of {found.layers} layers, and this one has "
            f"{shape.num_layers}"
        )
    kv_bytes = settings.tensor_parallel * shape.kv_bytes_per_token
    if found.kv_bytes_per_token != kv_bytes:
        raise ConfigError(
            f"{settings.cost} was measured with a model of {found.kv_bytes_per_token:,} bytes of KV per "
            f"token, and this one has {kv_bytes:,}"
        )
    return replace(found.recompute(settings.chunk_tokens), measured=True)


def _computed_by(settings: Settings, folder: Path, ranks: ModelRanks) -> dict[str, Any]:
    """The model and the device, for a journal and for predictions."""
    shape = ranks.model.shape
    return {
        "name": folder.name,
        "device": str(ranks.model.flat.module.device),
        "parameters": shape.num_parameters,
        "layers": shape.num_layers,
        "heads": ranks.model.num_heads,
        "head_size": shape.head_size,
        "weight_bytes": shape.weight_bytes,
        "kv_bytes_per_token": settings.tensor_parallel * shape.kv_bytes_per_token,
    }


def _iteration_cost(
    settings: Settings, ranks: ModelRanks, computed_by: Mapping[str, Any]
) -> IterationCost:
    """Of this model: measured on this machine, or by data sheets; what is measured corrects it."""
    if settings.cost is not None:
        return cost_file.load(settings.cost).computing
    on_gpu = ranks.model.flat.module.device.type == "cuda"
    assumed = assumed_for(computed_by, HARDWARE["h200" if on_gpu else "cpu"])
    return assumed.computing if assumed is not None else SOME_COST


class _OpenJournal(NamedTuple):
    observer: Journal
    file: TextIO


def _journal(
    settings: Settings,
    computed_by: Mapping[str, Any],
    configs: EngineConfigs,
    cost: CostProfile,
) -> _OpenJournal | None:
    """Open the journal, which begins with the model and device: costs are fitted for these."""
    if settings.journal is None:
        return None
    try:
        file = opened(settings.journal)
    except OSError as error:
        raise ConfigError(f"cannot write {settings.journal}: {error.strerror}") from error
    observer = Journal(
        file,
        configs.engine,
        configs.cache,
        configs.scheduler,
        settings.policy,
        cost,
        computed_by,
    )
    return _OpenJournal(observer, file)
