"""A model with KV in int8: its shape, its logits, and the models that the probe refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pensieve.core.turn import Turn
from pensieve.errors import UnsupportedModel
from pensieve.kernels import kv_format, write_kv
from pensieve.kernels.cpu_library import compiled_library
from pensieve.model import probe
from pensieve.model.kv.checksums import PageChecksums
from pensieve.model.kv.memory import KVMemory, PageMoves
from pensieve.model.loader import LoadedModel, load
from pensieve.model.shape import ModelShape
from tests.model.world import World, largest_gap, plain_model, play_at_random
from tests.models import SERVED

FolderOf = Callable[[str], Path]
SHAPE = ModelShape(3, 2, 1, 4, 50, 64, torch.bfloat16, 0, 0, "int8")

needs_library = pytest.mark.skipif(
    compiled_library() is None, reason="torch's own products depend on other rows in the batch"
)


@pytest.fixture(scope="module")
def model(folder_of: FolderOf) -> LoadedModel:
    return load(folder_of("llama-gqa"), kv_dtype="int8")


def test_a_token_takes_a_byte_for_each_value_and_four_for_each_row(folder_of: FolderOf) -> None:
    lines: list[str] = []
    shape = load(folder_of("qwen3"), kv_dtype="int8", report=lines.append).shape
    assert shape.dtype == torch.float32
    assert shape.kv_dtype == "int8"
    assert shape.kv_bytes_per_token == 2 * 2 * 2 * (16 + 4)
    assert any("160 bytes of KV per token as int8, context 256" in line for line in lines)


def test_both_tiers_store_and_move_int8_rows_with_scales() -> None:
    memory = KVMemory(SHAPE, 8, 5, 4)
    assert memory.page_bytes == 4 * SHAPE.kv_bytes_per_token == 4 * 2 * 3 * (4 + 4)
    assert memory.device_arena.shape == (3, 8 + 1, 2, 1, 4, 8)
    assert memory.host_arena.dtype == memory.device_arena.dtype == torch.int8
    draw = torch.Generator().manual_seed(0)
    for arena in (memory.device_arena, memory.host_arena):
        arena.copy_(torch.randint(-128, 128, arena.shape, generator=draw))
    before = memory.device_arena.clone()
    table = torch.tensor([[3, 1, 4], [6, 4, 3]])
    sums = PageChecksums(memory.host_arena)
    for layer in range(3):
        memory.swap_out(layer, PageMoves(*table.T.contiguous()))
    for _, page, num_slots in table.tolist():
        sums.copied(page, num_slots)
    memory.device_arena.zero_()
    for layer in range(3):
        back = table[:, [1, 0, 2]]
        memory.swap_in(layer, PageMoves(*back.T.contiguous()))
        memory.copy_within(layer, PageMoves(*torch.tensor([[3, 0, 2]]).T.contiguous()))
    assert torch.equal(memory.device_arena[:, 3], before[:, 3])
    assert torch.equal(memory.device_arena[:, 6, :, :, :3], before[:, 6, :, :, :3])
    assert torch.equal(memory.device_arena[:, 0, :, :, :2], before[:, 3, :, :, :2])
    assert not memory.device_arena[:, 0, :, :, 2:].any()
    assert sums.is_intact(4)
    memory.host_arena[2, 4, 1, 0, 2, 7] ^= 1  # flip a bit of a scale
    assert not sums.is_intact(4)


def test_replies_are_near_the_replies_of_plain_transformers(
    model: LoadedModel, folder_of: FolderOf
) -> None:
    world = World(model, chunk_tokens=32)
    turn = world.turn(40)
    world.step((turn, 0, 40, True))
    for _ in range(20):
        world.decode(turn)
    plain = plain_model(folder_of("llama-gqa"))
    with torch.inference_mode():
        logits = plain(input_ids=torch.tensor([list(turn.tokens)]), use_cache=False).logits[0]
    gap = largest_gap(plain, turn)
    assert gap <= 0.1 * float(logits.max() - logits.min())


def test_a_turn_with_nan_keys_fails_alone(model: LoadedModel) -> None:
    world = World(model, chunk_tokens=32)
    good, bad = world.turn(40), world.turn(40)
    world.step((good, 0, 40, True), (bad, 0, 40, True))
    shape, slot = model.shape, torch.tensor([bad.page_table[0] * 32 + 7])
    row = torch.full((1, shape.num_kv_heads, shape.head_size), float("nan"))
    pages = world.memory.key_pages(1), world.memory.value_pages(1)
    write_kv(row, torch.ones_like(row), slot, *pages)
    slices = [(turn, 40, 41, True) for turn in (good, bad)]
    outcome = world.step(*slices, failing=[bad])
    assert [sample.attempt_id for sample in outcome.samples] == [good.attempt_id]


def test_a_model_that_rounding_changes_too_much_is_refused(
    folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = kv_format.quantised

    def coarse(rows: torch.Tensor) -> torch.Tensor:
        stored = right(rows)
        stored[..., :-4] = stored[..., :-4] // 127 * 127
        return stored

    monkeypatch.setattr("pensieve.kernels.attention.reference.quantised", coarse)
    monkeypatch.setattr("pensieve.kernels.attention.cpu.write_kv", lambda *tensors: False)
    monkeypatch.setattr("pensieve.kernels.layer.cpu.CpuLayer.takes", lambda *rows: False)
    monkeypatch.setattr(probe, "INT8_DIFFERENCE", 0.01)
    with pytest.raises(
        UnsupportedModel, match=r"with --kv-dtype int8, its logits differ from those without"
    ):
        load(folder_of("llama-gqa"), kv_dtype="int8")


@needs_library
@pytest.mark.parametrize(
    ("family", "dtype"),
    [(family, torch.float32) for family in SERVED]
    + [("llama-gqa", torch.bfloat16), ("gpt-neox", torch.bfloat16), ("qwen3", torch.float16)],
)
def test_memory_pressure_changes_no_token_and_no_byte_of_kv(
    family: str, dtype: torch.dtype, folder_of: FolderOf
) -> None:
    """Slices, swaps and holes are random. Each turn is compared with a run alone, without cuts and swaps."""
    model = load(folder_of(family), dtype=dtype, kv_dtype="int8")
    world = World(model, device_pages=160, seed=3, chunk_tokens=32)
    turns = play_at_random(world, 3)
    for turn in turns:
        assert turn.num_output_tokens > 10
        other = World(model, chunk_tokens=32)
        alone = other.turn(0, tokens=turn.tokens[: turn.prompt_end])
        other.step((alone, 0, turn.prompt_end, True))
        while len(alone.tokens) < len(turn.tokens):
            other.decode(alone)
        assert alone.tokens == turn.tokens
        length = len(turn.tokens) - 1  # the KV of the last token is not computed yet
        assert torch.equal(rows_of(other, alone, length), rows_of(world, turn, length))
        other.executor.close()
    world.executor.close()


def rows_of(world: World, turn: Turn, length: int) -> torch.Tensor:
    """Return the turn's rows in the order of positions: (layers, 2, kv_heads, length, row)."""
    pages = world.memory.device_arena[:, torch.tensor(turn.page_table)]
    return pages.permute(0, 2, 3, 1, 4, 5).flatten(3, 4)[:, :, :, :length]
