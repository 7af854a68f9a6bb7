"""Build an engine that runs a model, from its executor (executor.py), costs (costs.py) and scheduler.

This module connects the packages `model` and `engine`, which must not import each other. Loading takes
seconds or minutes, so `report` receives a line when a step of the start begins. If a step fails, the earlier
steps are undone.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TextIO

from pensieve.config import Settings
from pensieve.core.cache import CacheConfig
from pensieve.core.cost import CostProfile
from pensieve.core.policies.registry import policy_named
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.core.tiers import IsIntact, trusted
from pensieve.engine.engine import Engine, EngineConfigs
from pensieve.engine.journal import Journal, opened
from pensieve.engine.mailbox import Mailbox
from pensieve.engine.ports import Ports, Sink
from pensieve.errors import ConfigError
from pensieve.launch.kv_compatibility import KvCompatibility, kv_compatibility
from pensieve.launch.model_folder import LoadedTexts, Report
from pensieve.launch.objectives import ESTIMATED, Pages, SmallestTbt, smallest_tbt
from pensieve.launch.sizing import TierPages, turns_max

if TYPE_CHECKING:
    from pensieve.launch.model_ranks import ModelRanks


class SystemClock:
    """Monotonic seconds."""

    now = staticmethod(time.monotonic)


class Closable(Protocol):
    def close(self) -> None: ...


@dataclass
class BuiltEngine:
    """An engine that is ready to run, and the resources to close when it ends."""

    engine: Engine
    executor: Closable
    vocab_size: int
    pages: TierPages
    page_bytes: int
    journal: TextIO | None = None
    computes: Mapping[str, str] = field(
        default_factory=dict
    )  # dtype, kv_dtype, weights, device, layers
    smallest_tbt: SmallestTbt | None = None  # None: no objective, or too few pages to measure it
    kv_compatibility: KvCompatibility = field(
        default_factory=lambda: KvCompatibility({}, "it runs no model, so it has no KV")
    )

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
    """Load the model and build cache, scheduler and executor."""
    from pensieve.launch.costs import costs_of
    from pensieve.launch.executor import build_executor
    from pensieve.model.kv.page_bytes import PageBytes

    with ExitStack() as undo:
        template = texts.template
        built = build_executor(
            settings, folder, template.tokenizer, template.end_of_turn_ids, report, undo
        )
        executor, ranks, tiers, checksums = built
        shape = ranks.whole.shape
        journal_model = _journal_model(settings, folder, ranks)
        costs = costs_of(settings, folder, ranks.whole, journal_model)
        report(costs.in_words)
        report("starting the scheduler")
        configs = EngineConfigs.fitted(
            CacheConfig(*tiers.pages, settings.chunk_tokens, staging_pages=tiers.staging_pages),
            SchedulerConfig(
                settings.token_budget,
                turns_max(
                    settings, sum(tiers.pages) if tiers.staging_pages else tiers.pages.device
                ),
                settings.prompt_seconds,
                settings.tbt,
                costs.iterations,
                settings.share,
                settings.stream,
                costs.copy_seconds,
                costs.group_seconds,
                settings.pipeline_stages,
            ),
            shape.context_max,
            ttft_seconds=settings.ttft,
        )
        journal = _journal(settings, journal_model, configs, costs.retention)
        is_intact: IsIntact = checksums.is_intact if checksums is not None else trusted
        if journal is not None:
            is_intact = journal.observer.noting(is_intact)
        device = ranks.model.flat.module.device
        identity = kv_compatibility(settings, folder, shape, device.type, tiers.page_bytes)
        pages = PageBytes(tiers.memory, checksums) if identity.facts else None
        engine = Engine(
            configs,
            policy_named(settings.policy, costs.retention, settings.chunk_tokens),
            executor,
            Ports(SystemClock(), mailbox, sink, executor.constraints, pages),
            [journal.observer] if journal is not None else [],
            is_intact,
        )
        observer = journal.observer if journal is not None else None
        if observer is not None:
            engine.scheduler.cache.content.note_found = observer.note_found

        def figures() -> dict[str, float]:
            more = {"rows_padded": float(executor.rows_padded)}
            if observer is not None:
                more["journal_given_up"] = float(observer.given_up)
            return more

        engine.metrics.more = figures
        if ranks.leader is not None:
            engine.check_idle = ranks.leader.tally.check
        smallest = None
        if settings.tbt:
            smallest = smallest_tbt(
                configs.scheduler.cost,
                f"by {settings.cost or 'its profile'}" if costs.retention.measured else ESTIMATED,
                executor,
                Pages(tiers.pages.device, settings.chunk_tokens),
                SystemClock().now,
            )
        gc.collect()
        # these objects live as long as the process, so no collection needs to visit them
        gc.freeze()
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
            "device": str(device),
            "layers": ranks.model.flat.form,
        },
        smallest,
        identity,
    )


def _journal_model(settings: Settings, folder: Path, ranks: ModelRanks) -> dict[str, Any]:
    """Describe the model and the device, for the journal and for cost predictions."""
    shape = ranks.whole.shape
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


class _OpenJournal(NamedTuple):
    observer: Journal
    file: TextIO


def _journal(
    settings: Settings,
    journal_model: Mapping[str, Any],
    configs: EngineConfigs,
    cost: CostProfile,
) -> _OpenJournal | None:
    """Open the journal, if the settings name one. Its first line describes the model and the device.

    The description is for later fits of costs to the journal.
    """
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
        journal_model,
    )
    return _OpenJournal(observer, file)
