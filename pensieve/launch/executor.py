"""Load a model, allocate its KV memory and build the executor, for an engine or `pensieve profile`."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from pensieve.config import Settings
from pensieve.errors import ModelError
from pensieve.launch.model_folder import Report
from pensieve.launch.model_ranks import ModelRanks, load_model
from pensieve.launch.sizing import (
    STAGING_ARENAS,
    TierPages,
    size_text,
    staging_pages,
    streams_in_place,
    tier_pages,
    turns_max,
)
from pensieve.model.executor import TorchExecutor
from pensieve.model.free_memory import free_for_kv
from pensieve.model.graphs import DecodeGraphs
from pensieve.model.kv.checksums import PageChecksums
from pensieve.model.kv.memory import IN_PLACE, KVMemory
from pensieve.model.parallel.executor import ParallelExecutor, StagedExecutor
from pensieve.model.parallel.stages import StageModel
from pensieve.model.piecewise_graphs import capture_pieces
from pensieve.model.sampling.sampler import Sampler
from pensieve.model.shape import ModelShape
from pensieve.text import Tokenizer


class KVTiers(NamedTuple):
    memory: KVMemory  # of this rank
    pages: TierPages
    page_bytes: int  # sum over all ranks
    staging_pages: int  # per group of streamed turns; 0: turns are not streamed


def _allocate(settings: Settings, ranks: ModelRanks, sampler: Sampler, report: Report) -> KVTiers:
    """Allocate both tiers and the staging arenas in all ranks.

    On a GPU, the device tier takes the memory that weights and workspace leave free.
    """
    model, leader, whole = ranks
    device: torch.device = model.flat.module.device
    sizes = (settings.token_budget, turns_max(settings), settings.chunk_tokens)
    num_ranks = settings.tensor_parallel
    device_bytes = None  # on a CPU, both tiers are in host memory
    if device.type == "cuda":
        report("measuring the GPU's free memory")
        if leader is not None:
            leader.start_measuring(*sizes)
        device_bytes = free_for_kv(model, *sizes, device, sampler, with_graphs=leader is None)
        if leader is not None:
            measured = zip((device_bytes, *leader.measured_bytes()), leader.num_layers, strict=True)
            bytes_per_layer = min(num_bytes // num_layers for num_bytes, num_layers in measured)
            device_bytes = num_ranks * bytes_per_layer * whole.shape.num_layers
    page_bytes = num_ranks * whole.shape.kv_bytes_per_page(settings.chunk_tokens)
    num_layers, left_bytes = whole.shape.num_layers, None
    pages = tier_pages(settings, page_bytes, device_bytes, num_layers)
    if device_bytes is not None:
        left_bytes = device_bytes - pages.device * page_bytes
    num_staged = staging_pages(settings, pages, page_bytes, num_layers, left_bytes)
    in_place = pages.host > 0 and streams_in_place(settings, device.type == "cpu")
    arena_pages = IN_PLACE if in_place else num_staged
    memory = KVMemory(model.shape, *pages, settings.chunk_tokens, device, report, arena_pages)
    if leader is not None:
        leader.allocate(*pages, settings.chunk_tokens, arena_pages)
    tier_sizes = (
        f"{name} {size_text(num_pages * page_bytes)} = {num_pages * settings.chunk_tokens:,} tokens"
        for name, num_pages in zip(TierPages._fields, pages, strict=True)
    )
    report(f"KV pools: {', '.join(tier_sizes)}, in {memory.format.in_words}")
    if in_place:
        num_staged = pages.host
    elif num_staged:
        staged_bytes = STAGING_ARENAS * num_staged * page_bytes // num_layers
        longest = num_staged * settings.chunk_tokens
        report(f"staging: {size_text(staged_bytes)}, for contexts of up to {longest:,} tokens")
    return KVTiers(memory, pages, page_bytes, num_staged)


def _graphs(
    settings: Settings, ranks: ModelRanks, memory: KVMemory, report: Report
) -> DecodeGraphs | None:
    """Capture CUDA graphs of decode batches, and of the operations between attention layers.

    Return None unless there is exactly one rank, on a GPU.
    """
    if ranks.model.flat.module.device.type != "cuda" or ranks.leader is not None:
        return None
    num_turns = turns_max(settings, memory.device_pages)
    graphs = DecodeGraphs(ranks.model.flat, memory, num_turns)
    with torch.inference_mode():
        graphs.capture()
        failure = capture_pieces(ranks.model.flat, memory, settings.token_budget)
    report(
        f"decoding runs without CUDA graphs: {graphs.failure}"
        if graphs.failure
        else f"captured CUDA graphs for up to {num_turns} turns"
    )
    if failure:
        report(f"prompts run without CUDA graphs: {failure}")
    return graphs


class BuiltExecutor(NamedTuple):
    executor: TorchExecutor | ParallelExecutor
    ranks: ModelRanks
    tiers: KVTiers
    checksums: PageChecksums | None


def check_vocabulary(tokenizer: Tokenizer, shape: ModelShape) -> None:
    if tokenizer.vocab_size > shape.vocab_size:
        raise ModelError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the model only {shape.vocab_size}"
        )


def build_executor(
    settings: Settings,
    folder: Path,
    tokenizer: Tokenizer,
    end_of_turn_ids: frozenset[int],
    report: Report,
    undo: ExitStack,
) -> BuiltExecutor:
    """Load the model and build its executor. `undo` gets callbacks that close both."""
    if settings.pipeline_stages > 1 and settings.stream == "auto":
        settings = replace(settings, stream="off")
    ranks = load_model(settings, folder, report, undo)
    shape = ranks.model.shape
    check_vocabulary(tokenizer, shape)
    sampler = Sampler(shape.vocab_size, ranks.model.eos_token_ids | end_of_turn_ids)
    tiers = _allocate(settings, ranks, sampler, report)
    graphs = _graphs(settings, ranks, tiers.memory, report)
    checksums = PageChecksums(tiers.memory.host_arena) if settings.check_kv else None
    local_executor = TorchExecutor(
        ranks.model, tiers.memory, sampler, tokenizer, graphs=graphs, checksums=checksums
    )
    undo.callback(local_executor.close)
    executor: TorchExecutor | ParallelExecutor = local_executor
    if isinstance(ranks.model.flat, StageModel):
        assert ranks.leader is not None
        ranks.model.flat.connect()
        executor = StagedExecutor(local_executor, ranks.model.flat, ranks.leader)
    elif ranks.leader is not None:
        executor = ParallelExecutor(local_executor, ranks.leader)
    return BuiltExecutor(executor, ranks, tiers, checksums)
