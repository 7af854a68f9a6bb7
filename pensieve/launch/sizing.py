"""Compute the number of pages of both tiers from the settings and the free memory."""

from __future__ import annotations

from typing import NamedTuple

from pensieve.config import Settings, TierSize, available_memory_bytes
from pensieve.errors import ConfigError

TOKENS_MAX = 500_000  # limit of a tier whose size is a share of memory; small models need no more
GPU_TOKENS_MAX = 2_000_000  # the same limit on a GPU, where models are larger
DEVICE_PAGES_MIN = 4
PROMPTS_PART = 4  # a quarter of the token budget is left to prompts
STAGING_SHARE = 0.1  # size of the staging arenas, as a share of the device tier
STAGING_ARENAS = 2  # as in KVMemory


class TierPages(NamedTuple):
    device: int
    host: int


def tier_pages(
    settings: Settings, page_bytes: int, device_bytes: int | None, num_layers: int = 1
) -> TierPages:
    """Return the pages of both tiers. `device_bytes` is the free memory of a GPU; None on a CPU."""
    available = available_memory_bytes()
    share = TierSize(0.25, "share")
    host = share if settings.host_cache.unit == "auto" else settings.host_cache
    on_device = settings.device_cache
    if on_device.unit == "auto":
        on_device = share if device_bytes is None else TierSize(1.0, "share")
    # the share is taken from the memory that the staging arenas leave
    if device_bytes is not None and on_device.unit == "share":
        host_bytes = host.pages(page_bytes, settings.chunk_tokens, available) * page_bytes
        device_bytes -= _staging_bytes(settings, device_bytes, host_bytes, num_layers)
    device_pages, host_pages = (
        size.pages(page_bytes, settings.chunk_tokens, memory)
        for size, memory in (
            (on_device, available if device_bytes is None else device_bytes),
            (host, available),
        )
    )
    tokens_max = TOKENS_MAX if device_bytes is None else GPU_TOKENS_MAX
    pages_max = tokens_max // settings.chunk_tokens
    device_pages = min(device_pages, pages_max) if on_device.unit == "share" else device_pages
    host_pages = min(host_pages, pages_max) if host.unit == "share" else host_pages
    if device_pages < DEVICE_PAGES_MIN:
        raise ConfigError(
            f"--device-cache {settings.device_cache} holds {device_pages} chunks of "
            f"{settings.chunk_tokens} tokens ({page_bytes:,} bytes each), and at least {DEVICE_PAGES_MIN} "
            "are needed"
        )
    if device_bytes is not None:
        if device_pages * page_bytes > device_bytes:
            raise ConfigError(
                f"--device-cache {settings.device_cache} needs {size_text(device_pages * page_bytes)}, but "
                f"weights and workspace leave only {size_text(device_bytes)} of the GPU's memory"
            )
        if host_pages * page_bytes > available:
            raise ConfigError(
                f"--host-cache {settings.host_cache} needs {size_text(host_pages * page_bytes)}, but only "
                f"{size_text(available)} are available"
            )
    elif (device_pages + host_pages) * page_bytes > available:
        raise ConfigError(
            f"the two tiers need {(device_pages + host_pages) * page_bytes / 2**30:.1f} GiB, but only "
            f"{available / 2**30:.1f} GiB are available. Lower --device-cache or --host-cache"
        )
    return TierPages(device_pages, host_pages)


def _staging_bytes(settings: Settings, device_bytes: int, host_bytes: int, num_layers: int) -> int:
    """Return how much of a GPU's free memory the staging arenas take."""
    if settings.stream == "off":
        return 0
    layer_bytes = -(-host_bytes // num_layers)
    # An arena never holds more than one layer of the host tier.
    maximum = STAGING_ARENAS * layer_bytes
    return min(int(device_bytes * STAGING_SHARE / (1 + STAGING_SHARE)), maximum)


def streams_in_place(settings: Settings, on_cpu: bool) -> bool:
    """Return whether streamed turns read the host tier directly.

    They do on a CPU, unless staging arenas are requested.
    """
    return on_cpu and settings.stream != "off" and not settings.staging_tokens


def staging_pages(
    settings: Settings,
    pages: TierPages,
    page_bytes: int,
    num_layers: int,
    left_bytes: int | None = None,
) -> int:
    """Return the pages of each of the two staging arenas. An arena holds pages of one layer.

    `left_bytes` is the GPU memory that the device tier leaves free. Return 0 if turns are not streamed.
    """
    if settings.stream == "off":
        return 0
    if not pages.host:
        if settings.stream == "on":
            raise ConfigError(
                f"--stream on needs a host tier, but --host-cache {settings.host_cache} is smaller than a "
                f"chunk. Pass at least --host-cache {settings.chunk_tokens}t"
            )
        return 0
    layer_bytes = -(-page_bytes // num_layers)
    pair_bytes = STAGING_ARENAS * layer_bytes  # one page in each arena
    if settings.staging_tokens:
        arena_pages = settings.staging_tokens // settings.chunk_tokens // STAGING_ARENAS
    else:
        arena_pages = int(STAGING_SHARE * pages.device * page_bytes) // pair_bytes
    if settings.stream == "on":
        arena_pages = max(arena_pages, 1)
    arena_pages = min(arena_pages, pages.host)
    return arena_pages if left_bytes is None else min(arena_pages, left_bytes // pair_bytes)


def turns_max(settings: Settings, pages: int | None = None) -> int:
    """Return the maximum number of concurrent turns.

    If the settings have no maximum, memory and the token budget limit the number: each turn needs at least
    two pages, and a part of each iteration is left to prompts. `pages` counts the pages of the tiers in which
    turns may run. If `pages` is None, only the token budget counts.
    """
    if settings.turns_max:
        return settings.turns_max
    turns_by_budget = settings.token_budget - settings.token_budget // PROMPTS_PART
    return max(min(turns_by_budget, turns_by_budget if pages is None else pages // 2), 1)


def size_text(num_bytes: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes / 2**10:.1f} KiB"
