"""How many pages each tier gets from the available memory."""

from __future__ import annotations

import pytest

from pensieve.errors import ConfigError
from pensieve.launch import sizing as tier_sizing
from pensieve.launch.sizing import TierPages, staging_pages, tier_pages, turns_max
from tests.launch.settings import settings_of

GIB = 2**30
PAGE_BYTES = 4 << 20


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_sizing, "available_memory_bytes", lambda: 64 * GIB)


def test_on_a_cpu_both_tiers_share_its_memory() -> None:
    most = tier_sizing.TOKENS_MAX // 32
    assert tier_pages(settings_of(), PAGE_BYTES, None) == (4096, 4096)
    assert tier_pages(settings_of(), 1 << 10, None) == (most, most), "small models need no more"
    given = settings_of(device_cache="640t", host_cache="1GiB")
    assert tier_pages(given, PAGE_BYTES, None) == (20, 256)
    with pytest.raises(ConfigError, match="the two tiers need"):
        tier_pages(settings_of(device_cache="40GiB", host_cache="40GiB"), PAGE_BYTES, None)


def test_the_device_tier_uses_gpu_memory_and_the_host_tier_main_memory() -> None:
    assert tier_pages(settings_of(stream="off"), PAGE_BYTES, 100 * GIB) == (25_600, 4096)
    given = settings_of(device_cache="50%", host_cache="60GiB", stream="off")
    assert tier_pages(given, PAGE_BYTES, 100 * GIB) == (12_800, 15_360)
    with pytest.raises(
        ConfigError, match=r"--device-cache .*101.*only 100.0 GiB of the GPU's memory"
    ):
        tier_pages(settings_of(device_cache="101GiB"), PAGE_BYTES, 100 * GIB)
    with pytest.raises(ConfigError, match=r"--host-cache .*65.*64.0 GiB are available"):
        tier_pages(settings_of(host_cache="65GiB"), PAGE_BYTES, 100 * GIB)
    with pytest.raises(ConfigError, match="4 are needed"):
        tier_pages(settings_of(), PAGE_BYTES, 0)


def test_turns_max_follows_from_the_memory_and_the_token_budget() -> None:
    assert turns_max(settings_of(token_budget="512")) == 384
    assert turns_max(settings_of(token_budget="512"), 100_000) == 384
    assert turns_max(settings_of(token_budget="512"), 100) == 50
    assert turns_max(settings_of(token_budget="1"), 4) == 1
    assert turns_max(settings_of(token_budget="512", turns_max="7"), 100_000) == 7


def test_two_staging_arenas_together_take_a_tenth_of_the_device_tier() -> None:
    pages = TierPages(1000, 5000)
    assert staging_pages(settings_of(), pages, PAGE_BYTES, 32) == 1600
    assert staging_pages(settings_of(staging_tokens="6400"), pages, PAGE_BYTES, 32) == 100
    assert staging_pages(settings_of(), TierPages(1000, 70), PAGE_BYTES, 32) == 70
    assert staging_pages(settings_of(stream="off"), pages, PAGE_BYTES, 32) == 0
    assert staging_pages(settings_of(), TierPages(1000, 0), PAGE_BYTES, 32) == 0


def test_on_a_gpu_staging_uses_the_remaining_memory() -> None:
    streaming_off = settings_of(stream="off")
    assert tier_pages(streaming_off, PAGE_BYTES, 110 * GIB).device == 28_160
    assert tier_pages(settings_of(), PAGE_BYTES, 110 * GIB).device == 25_600
    no_host_tier = settings_of(host_cache="0t")
    assert tier_pages(no_host_tier, PAGE_BYTES, 110 * GIB, 32).device == 28_160
    small = settings_of(host_cache="16GiB")  # one layer of it has half a GiB
    assert tier_pages(small, PAGE_BYTES, 110 * GIB, 32).device == 28_160 - 256
    assert staging_pages(small, TierPages(27_904, 4096), PAGE_BYTES, 32, GIB) == 4096
    assert staging_pages(small, TierPages(27_904, 4096), PAGE_BYTES, 32, GIB // 2) == 2048


def test_streaming_without_a_host_tier_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs a host tier, .* --host-cache 32t"):
        staging_pages(settings_of(stream="on"), TierPages(1000, 0), PAGE_BYTES, 32)


def test_a_device_tier_too_small_for_staging_streams_only_on_request() -> None:
    tiny = TierPages(4, 50)
    assert staging_pages(settings_of(), tiny, PAGE_BYTES, 2) == 0
    assert staging_pages(settings_of(stream="on"), tiny, PAGE_BYTES, 2) == 1
