"""The sizes of the two tiers, and the marks for copying out and for the reserve."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheConfig:
    device_pages: int
    host_pages: int
    chunk_tokens: int = 32
    swap_out_below: float = 0.25  # of device pages available: copy to the host ahead of need
    reserve: float = 0.10  # of device pages: kept for turns that are generating
    swap_outs_max: int = 64  # copies started by one iteration
    staging_pages: int = (
        0  # of each of two arenas, for one layer of streamed turns; 0: none is streamed
    )

    def __post_init__(self) -> None:
        if self.device_pages < 2:
            raise ValueError("the device tier needs two or more pages")
        if (
            min(self.host_pages, self.staging_pages) < 0
            or min(self.chunk_tokens, self.swap_outs_max) < 1
        ):
            raise ValueError("page counts must not be negative, and chunks hold at least one token")
        if not 0.0 <= self.reserve <= self.swap_out_below <= 1.0:
            raise ValueError("0 <= reserve <= swap_out_below <= 1 does not hold")

    @property
    def device_tokens_max(self) -> int:
        """The longest context that fits the device tier, one chunk set aside for copy on write."""
        return (self.device_pages - 1) * self.chunk_tokens

    @property
    def swap_out_mark_pages(self) -> int:
        return -int(-self.device_pages * self.swap_out_below // 1)

    @property
    def reserve_pages(self) -> int:
        return -int(-self.device_pages * self.reserve // 1)
