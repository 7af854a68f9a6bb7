"""Pages of both tiers as bytes: bytes read from one memory and written to another give the same KV."""

from __future__ import annotations

import logging
import zlib

import pytest
import torch

from pensieve.core.adoption import KvPlace
from pensieve.model.kv.checksums import PageChecksums
from pensieve.model.kv.memory import KVMemory
from pensieve.model.kv.page_bytes import PageBytes
from pensieve.model.shape import ModelShape

EXPONENTS = (((0, 0), (0, 0)),) * 3


def memory_of(kv_dtype: str, dtype: torch.dtype, seed: int) -> KVMemory:
    shape = ModelShape(
        *(3, 4, 2, 16, 512, 256, dtype, 1000, 4000),
        kv_dtype=kv_dtype,
        kv_exponents=EXPONENTS if kv_dtype == "fp8" else (),
    )
    memory = KVMemory(shape, 5, 6, 8)
    generator = torch.Generator().manual_seed(seed)
    for arena in (memory.device_arena, memory.host_arena):
        raw = arena.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))
    return memory


@pytest.mark.parametrize(
    ("kv_dtype", "dtype"),
    [
        ("auto", torch.float32),
        ("auto", torch.bfloat16),
        ("int8", torch.float32),
        ("fp8", torch.bfloat16),
    ],
)
def test_page_bytes_read_from_one_memory_are_the_same_in_another(
    kv_dtype: str, dtype: torch.dtype
) -> None:
    here, there = (memory_of(kv_dtype, dtype, seed) for seed in (1, 2))
    source, target = PageBytes(here, None), PageBytes(there, None)
    before = there.host_arena.clone()
    places = [KvPlace(False, 4, 8), KvPlace(True, 2, 3)]
    body = source.read(places)
    assert len(body) == 11 * source.slot_bytes == 11 * here.shape.kv_bytes_per_token
    cut = 8 * source.slot_bytes
    target.write(5, 8, memoryview(body)[:cut], 0)
    target.write(1, 3, memoryview(bytes(body))[cut:], 0)
    raw = there.host_arena.view(torch.uint8)
    assert torch.equal(raw[:, 5], here.device_arena.view(torch.uint8)[:, 4])
    assert torch.equal(raw[:, 1, :, :, :3], here.host_arena.view(torch.uint8)[:, 2, :, :, :3])
    before_raw = before.view(torch.uint8)
    assert torch.equal(raw[:, 1, :, :, 3:], before_raw[:, 1, :, :, 3:])
    assert torch.equal(raw[:, [0, 2, 3, 4]], before_raw[:, [0, 2, 3, 4]])


def test_a_host_page_is_checked_by_the_checksum_of_its_copy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    memory = memory_of("auto", torch.float32, 1)
    checksums = PageChecksums(memory.host_arena)
    pages = PageBytes(memory, checksums)
    for num_slots in (8, 5):
        checksums.copied(3, 8)
        crc = zlib.crc32(pages.read([KvPlace(True, 3, num_slots)]))
        assert pages.is_intact(KvPlace(True, 3, num_slots), crc)
        memory.host_arena[1, 3, 0, 0, 2, 0] += 1.0
        crc = zlib.crc32(pages.read([KvPlace(True, 3, num_slots)]))
        with caplog.at_level(logging.WARNING):
            assert not pages.is_intact(KvPlace(True, 3, num_slots), crc)
    assert pages.is_intact(KvPlace(False, 3, 8), 0), "device pages have no checksums"


def test_a_received_page_is_checked_by_the_checksum_sent_with_it() -> None:
    memory = memory_of("auto", torch.float32, 1)
    checksums = PageChecksums(memory.host_arena)
    pages = PageBytes(memory, checksums)
    body = pages.read([KvPlace(False, 0, 6)])
    pages.write(2, 6, memoryview(body), zlib.crc32(body))
    assert checksums.is_intact(2)
    memory.host_arena[0, 2, 0, 0, 0, 0] += 1.0
    assert not checksums.is_intact(2)
