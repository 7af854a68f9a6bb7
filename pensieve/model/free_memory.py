"""Measure how much of a GPU's memory is left for KV after the weights are loaded.

Two trial batches run with the sampling options that need the most memory.  One is the batch of a decode
iteration.  The other is the largest possible batch: it fills the token budget and computes a row of logits
for every turn.  A trial's need is its peak in torch's allocator, without the trial's own KV.  With CUDA
graphs, the estimate adds the peaks of both trials and the size of one table of logits.  A margin covers what
torch does not allocate: the graphs' nodes, libraries that load later, fragmentation.
"""

from __future__ import annotations

from array import array

import torch

from pensieve.core.iteration import Slice
from pensieve.model.forward import Forward
from pensieve.model.graphs import ROWS_MAX
from pensieve.model.kv.copier import copier_for
from pensieve.model.kv.memory import KVMemory
from pensieve.model.loader import LoadedModel
from pensieve.model.sampling.penalties import Row, TurnLog
from pensieve.model.sampling.sampler import Sampler
from pensieve.sampling import Sampling

MARGIN_BYTES = 256 << 20
MARGIN_SHARE = 0.02  # part of the device's total memory
# The sampling options that need the most memory.
COSTLIEST = Sampling(
    temperature=1.0,
    top_p=0.9,
    min_p=0.01,
    top_n_sigma=5.0,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    logprobs=20,
)


def free_for_kv(
    model: LoadedModel,
    token_budget: int,
    turns_max: int,
    chunk_tokens: int,
    device: torch.device,
    sampler: Sampler | None = None,
    *,
    with_graphs: bool = False,
) -> int:
    """Return the bytes of the device that KV can take.  All ranks must call this at the same time."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved(device)
    peaks: list[int] = []
    for num_tokens in (turns_max, max(token_budget, turns_max)):
        torch.cuda.reset_peak_memory_stats(device)
        trial_bytes = run_once(model, num_tokens, turns_max, chunk_tokens, device, sampler)
        torch.cuda.synchronize(device)
        peaks.append(torch.cuda.max_memory_reserved(device) - held - trial_bytes)
        torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)  # excludes the libraries that the trials loaded
    kept = torch.cuda.memory_reserved(device) - held
    logits = 4 * min(turns_max, ROWS_MAX) * model.shape.vocab_size
    graphs = sum(peaks) + logits if with_graphs else 0
    needed = max(peaks) - kept + graphs + MARGIN_BYTES + int(MARGIN_SHARE * total)
    return max(free - needed, 0)


def run_once(
    model: LoadedModel,
    num_tokens: int,
    turns_max: int,
    chunk_tokens: int,
    device: torch.device,
    sampler: Sampler | None = None,
) -> int:
    """Run one iteration of `num_tokens` tokens and `turns_max` turns; return the bytes of its own KV."""
    slices, num_pages = widest(num_tokens, turns_max, model.shape.context_max, chunk_tokens)
    memory = KVMemory(model.shape, num_pages, 0, chunk_tokens, device)
    copier = copier_for(memory)
    try:
        with torch.inference_mode():
            forward = Forward(model.flat, memory, copier, may_halve=False)
            forward.run([piece._replace(needs_token=False) for piece in slices])
            computed = forward.run(slices)
            if sampler is not None:
                logs = {
                    each.attempt_id: TurnLog(COSTLIEST, each.token_ids, each.stop)
                    for each in slices
                }
                pairs = zip(computed.attempt_ids, computed.positions, strict=True)
                rows = [Row(logs[attempt_id], position) for attempt_id, position in pairs]
                sampler.draw(computed.logits, rows, computed.newest_ids).read()
    finally:
        copier.close()
    return memory.device_arena.nbytes


def widest(
    num_tokens: int, turns_max: int, context_max: int, chunk_tokens: int
) -> tuple[list[Slice], int]:
    """Return the slices of a batch with that many tokens and turns, and the number of pages they need."""
    slices, page = [], 0
    longest = min(max(num_tokens - turns_max + 1, 1), context_max)
    for index, length in enumerate([longest, *[1] * (turns_max - 1)]):
        num_pages = -(-length // chunk_tokens)
        pages = array("i", range(page, page + num_pages))
        page += num_pages
        slices.append(Slice(index, 0, length, array("I", bytes(4 * length)), pages, True))
    return slices, page
