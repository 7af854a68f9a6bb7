"""Compare paged attention with plain transformers: every family, and every movement of pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pensieve.core.iteration import PageCopy, SwapIn, SwapOut
from pensieve.model.loader import LoadedModel, load
from tests.model.world import (
    CHUNK_TOKENS,
    GAP_MAX,
    World,
    largest_gap,
    plain_model,
    play_at_random,
)
from tests.models import FAR_SCALED, SERVED, save_tiny

FolderOf = Callable[[str], Path]
Loaded = Callable[[str], LoadedModel]


@pytest.mark.parametrize("family", SERVED)
def test_no_page_movement_changes_a_token(family: str, folder_of: FolderOf, loaded: Loaded) -> None:
    world = World(loaded(family))
    device, host = world.memory.device_arena, world.memory.host_arena
    first, second, third = world.turn(13), world.turn(6), world.turn(1)

    # Prefills, cut at arbitrary positions, share batches with decodes.
    world.step((first, 0, 5, False), (second, 0, 6, True))
    world.step((third, 0, 1, True), (first, 5, 13, True), (second, 6, 7, True))
    for _ in range(4):
        world.decode(third, first, second)
    assert (len(first.tokens), len(second.tokens), len(third.tokens)) == (18, 12, 6)

    # The first turn's KV, except for its last token, is swapped out, lost on the device, and swapped in.
    filled = [4, 4, 4, 4, 1]
    outs = [SwapOut(i, first.page_table[i], 30 - i, filled[i]) for i in range(5)]
    finished = list(world.decode(second, third, swap_outs=outs).finished_copies)
    while len(finished) < 5:
        finished += world.step().finished_copies
    assert sorted(finished) == [0, 1, 2, 3, 4]
    moved = []
    for i in range(5):
        kept = device[:, first.page_table[i], :, :, : filled[i]].clone()
        assert torch.equal(host[:, 30 - i, :, :, : filled[i]], kept)
        assert bool(host[:, 30 - i, :, :, filled[i] :].isnan().all())
        moved.append((world.replace_page(first, i)[1], kept))
    ins = [SwapIn(10 + i, 30 - i, first.page_table[i], filled[i]) for i in range(5)]
    world.decode(first, second, third, swap_ins=ins)
    for page, kept in moved[:4]:
        assert torch.equal(device[:, page], kept)

    # Two chunks far apart are dropped. They are recomputed in the same iteration as a decode.
    world.replace_page(first, 1)
    world.replace_page(first, 3)
    last = len(first.tokens) - 1
    world.step(
        (third, 7, 8, True),
        (first, 4, 8, False),
        (first, 12, 16, False),
        (first, last, last + 1, True),
    )

    # A fork inside a chunk shares two pages, copies half of the third page, and continues differently.
    fork = world.turn(0, tokens=[*first.tokens[:10], 9, 8, 7])
    fork.page_table[:2] = first.page_table[:2]
    copy = PageCopy(first.page_table[2], fork.page_table[2], 2)
    world.step((fork, 10, 13, True), (second, 13, 14, True), copies=[copy])
    for _ in range(3):
        world.decode(fork, first, third, second)
    world.executor.close()

    model = plain_model(folder_of(family))
    for turn in (first, second, third, fork):
        assert largest_gap(model, turn) <= GAP_MAX, turn.attempt_id
    outputs = {token for turn in world.turns for token in turn.tokens[turn.prompt_end :]}
    assert len(outputs) >= 5, "replies that never vary would prove nothing"


@pytest.mark.parametrize(
    ("family", "chunk_tokens", "seed"),
    [("llama-gqa", CHUNK_TOKENS, seed) for seed in range(6)]
    + [(family, 32, seed) for seed, family in enumerate(SERVED)],
)
def test_random_iterations_sample_the_same_tokens_as_transformers(
    family: str, chunk_tokens: int, seed: int, folder_of: FolderOf, loaded: Loaded
) -> None:
    """Several turns at once, with random cuts, swaps to random pages, and holes in random chunks.

    With pages of 32 tokens, a fused layer is a single call.
    """
    print("seed", seed)
    world = World(loaded(family), device_pages=160, seed=seed, chunk_tokens=chunk_tokens)
    turns = play_at_random(world, seed)
    world.executor.close()
    model = plain_model(folder_of(family))
    for turn in turns:
        assert turn.num_output_tokens > 10
        assert largest_gap(model, turn) <= GAP_MAX


@pytest.mark.parametrize("family", FAR_SCALED)
def test_attention_scales_of_far_positions_match_the_model(family: str, tmp_path: Path) -> None:
    """The scale starts after the probe's prompts, and a row's index in the batch is not its position."""
    folder = save_tiny(FAR_SCALED[family](), tmp_path)
    world = World(load(folder))
    first, second = world.turn(90), world.turn(70)
    world.step((first, 0, 50, False), (second, 0, 30, False))
    world.step((second, 30, 70, True), (first, 50, 90, True))
    for _ in range(8):
        world.decode(first, second)
    world.executor.close()
    model = plain_model(folder)
    for turn in (first, second):
        assert largest_gap(model, turn) <= GAP_MAX


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.bfloat16, 2e-2), (torch.float16, 2.5e-3)])
@pytest.mark.parametrize(
    ("family", "chunk_tokens"),
    [("llama-gqa", CHUNK_TOKENS)]
    + [(family, 32) for family in ("llama-gqa", "qwen3-moe", "mixtral", "opt", "gpt2", "gpt-neox")],
)
def test_sixteen_bit_models_stay_within_their_rounding(
    family: str, folder_of: FolderOf, chunk_tokens: int, dtype: torch.dtype, rounding: float
) -> None:
    model = load(folder_of(family), dtype=dtype)
    assert model.shape.dtype == dtype
    world = World(model, chunk_tokens=chunk_tokens)
    turns = [world.turn(9), world.turn(4)]
    world.step((turns[0], 0, 7, False), (turns[1], 0, 4, True))
    world.step((turns[0], 7, 9, True), (turns[1], 4, 5, True))
    for _ in range(10):
        world.decode(*turns)
    world.executor.close()
    plain = plain_model(folder_of(family))
    with torch.inference_mode():
        span = float(plain(torch.tensor([list(turns[0].tokens)])).logits.aminmax().max) * 2
    for turn in turns:
        assert largest_gap(plain, turn) <= rounding * span
