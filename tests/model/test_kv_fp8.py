"""A model with KV in fp8: its scales, its shape and its logits. Here torch reads and writes the KV."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pensieve.kernels import write_kv
from pensieve.kernels.kv_format import FP8, HEADROOM, exponents_for, from_fp8, kv_format, to_fp8
from pensieve.model.kv.checksums import PageChecksums
from pensieve.model.kv.memory import KVMemory, PageMoves
from pensieve.model.loader import LoadedModel, load
from pensieve.model.shape import ModelShape
from tests.model.world import World, largest_gap, plain_model

FolderOf = Callable[[str], Path]
NAN, INFINITY = float("nan"), float("inf")


@pytest.fixture(scope="module")
def model(folder_of: FolderOf) -> LoadedModel:
    return load(folder_of("llama-gqa"), kv_dtype="fp8")


def test_scales_are_powers_of_two_with_room_above_the_probed_values() -> None:
    largest = torch.tensor([1e-9, 0.7, 1.0, 27.99, 28.0, 28.01, 3e4])
    fitting = largest / torch.exp2(exponents_for(largest).float())
    assert (fitting * HEADROOM <= 448.0).all(), "values this much larger must not be clamped"
    assert (fitting * HEADROOM > 448.0 / 2.01).all(), "the scale must not be larger than necessary"
    assert exponents_for(torch.tensor([0.0, NAN, INFINITY])).tolist() == [0, 0, 0]
    assert exponents_for(torch.tensor([1e-38, 3e38])).tolist() == [-60, 60]


def test_too_large_values_are_clamped_and_non_finite_values_become_nan() -> None:
    rows = torch.tensor([[[1e9, -1e9, 448.0, 0.75], [NAN, INFINITY, -INFINITY, 3.0]]])
    back = from_fp8(to_fp8(rows, torch.ones(2)).transpose(0, 1), torch.ones(2))[:, 0]
    assert back[0].tolist() == [448.0, -448.0, 448.0, 0.75]
    assert back[1, :3].isnan().all()
    scales = torch.tensor([2.0**-20, 2.0**20])
    stored, unscaled = to_fp8(rows * scales[:, None], scales), to_fp8(rows, torch.ones(2))
    assert torch.equal(stored.float().nan_to_num(9.0), unscaled.float().nan_to_num(9.0))


def test_the_probe_chooses_a_scale_for_each_head_of_each_layer(model: LoadedModel) -> None:
    """With another prompt, values use the upper part of the fp8 range, and none is cut off."""
    shape = model.shape
    scales = torch.exp2(torch.tensor(shape.kv_exponents).float())
    assert scales.shape == (shape.num_layers, 2, shape.num_kv_heads)
    world = World(model, chunk_tokens=32)
    turn = world.turn(60)
    world.step((turn, 0, 60, True))
    pages = world.memory.device_arena[:, turn.page_table].float()
    largest = pages.nan_to_num(0.0).abs().amax(dim=(1, 4, 5))
    assert ((largest > 448.0 / HEADROOM / 8) & (largest < 448.0)).all()


def test_a_token_takes_a_byte_for_each_value(model: LoadedModel) -> None:
    shape = model.shape
    assert kv_format("fp8", torch.bfloat16).row_bytes(64) == 64
    values = 2 * shape.num_layers * shape.num_kv_heads * shape.head_size
    assert shape.kv_bytes_per_token == values


def test_both_tiers_store_and_move_fp8_bytes() -> None:
    exponents = (((0,), (1,)),) * 3
    shape = ModelShape(3, 2, 1, 4, 50, 64, torch.bfloat16, 0, 0, "fp8", exponents)
    memory = KVMemory(shape, 8, 5, 4)
    assert memory.page_bytes == 4 * 2 * 3 * 4
    assert memory.host_arena.dtype == memory.device_arena.dtype == FP8.element
    scales = memory.kv_scales(2)
    assert scales is not None
    assert scales.tolist() == [[1.0], [2.0]]
    draw = torch.Generator().manual_seed(0)
    device, host = (each.view(torch.uint8) for each in (memory.device_arena, memory.host_arena))
    for arena in (device, host):
        arena.copy_(torch.randint(0, 256, arena.shape, generator=draw))
    before = device.clone()
    table = torch.tensor([[3, 1, 4], [6, 4, 3]])
    sums = PageChecksums(memory.host_arena)
    for layer in range(3):
        memory.swap_out(layer, PageMoves(*table.T.contiguous()))
    for _, page, num_slots in table.tolist():
        sums.copied(page, num_slots)
    device.zero_()
    for layer in range(3):
        memory.swap_in(layer, PageMoves(*table[:, [1, 0, 2]].T.contiguous()))
        memory.copy_within(layer, PageMoves(*torch.tensor([[3, 0, 2]]).T.contiguous()))
    assert torch.equal(device[:, 3], before[:, 3])
    assert torch.equal(device[:, 6, :, :, :3], before[:, 6, :, :, :3])
    assert torch.equal(device[:, 0, :, :, :2], before[:, 3, :, :, :2])
    assert not device[:, 0, :, :, 2:].any()
    assert sums.is_intact(4)
    host[2, 4, 1, 0, 2, 3] ^= 1
    assert not sums.is_intact(4)


def test_a_model_without_scales_has_no_pages_in_fp8() -> None:
    shape = ModelShape(3, 2, 1, 4, 50, 64, torch.bfloat16, 0, 0, "fp8")
    with pytest.raises(ValueError, match="have the shape"):
        KVMemory(shape, 8, 5, 4)


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
    assert largest_gap(plain, turn) <= 0.1 * float(logits.max() - logits.min())


def test_a_turn_with_nan_keys_fails_alone(model: LoadedModel) -> None:
    world = World(model, chunk_tokens=32)
    good, bad = world.turn(40), world.turn(40)
    world.step((good, 0, 40, True), (bad, 0, 40, True))
    shape, slot = model.shape, torch.tensor([bad.page_table[0] * 32 + 7])
    row = torch.full((1, shape.num_kv_heads, shape.head_size), NAN)
    memory = world.memory
    pages = memory.key_pages(1), memory.value_pages(1)
    write_kv(row, torch.ones_like(row), slot, *pages, memory.kv_scales(1))
    outcome = world.step((good, 40, 41, True), (bad, 40, 41, True), failing=[bad])
    assert [sample.attempt_id for sample in outcome.samples] == [good.attempt_id]
