"""Section `choices` of the GPU bench: what kernels/choices.py leaves to a measurement, side by side.

Every choice does the same work on the same inputs, in one process; each is checked before it is timed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pensieve.bench.gpu_harness import Bench, check
from pensieve.bench.gpu_pages import Paged
from pensieve.kernels.choices import Choices, chosen

Slices = list[tuple[int, int]]  # (start, length)
WIDE = (
    Choices(),
    Choices(snake=0),
    Choices(wide_blocks=2),
    Choices(wide_blocks=2, snake=0),
    Choices(hopper=0),
)


def section_choices(bench: Bench) -> None:
    prompts: dict[str, Slices] = {
        "512 tokens over 15,872": [(15_872, 512)],
        "4,096 tokens": [(0, 4096)],
        "512 over 4,000 beside 64 decodes": [(4000, 512), *[(1000, 1)] * 64],
    }
    if bench.small:
        prompts = {"70 tokens over 100": [(100, 70)]}
    for what, slices in prompts.items():
        _compare(bench, what, slices, WIDE)


def _compare(bench: Bench, what: str, slices: Slices, tried: Sequence[Choices]) -> None:
    """Attention of 32/8 heads of 128 over these slices, by each choice."""
    right: torch.Tensor | None = None
    for each in tried:
        with chosen(each):
            paged = Paged.of(bench.device, slices, 32, 8, 128, bench.dtype)
            right = paged.right() if right is None else right
            check(f"{what}, {words(each)}", paged.run(), right)
            seconds = bench.seconds([paged.run])
        bench.report(
            "choices",
            f"{what}: {words(each)}: {seconds * 1e6:.0f} us",
            what=what,
            choice=words(each),
            default=each == Choices(),
            seconds=seconds,
        )


def words(each: Choices) -> str:
    """What differs from the defaults."""
    pairs = zip(Choices._fields, each, Choices(), strict=True)
    return (
        ", ".join(f"{name}={value}" for name, value, usual in pairs if value != usual)
        or "the defaults"
    )
