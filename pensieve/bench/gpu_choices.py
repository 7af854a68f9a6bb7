"""Section `choices` of the GPU bench: what kernels/choices.py leaves to a measurement, side by side.

Every choice does the same work on the same inputs, in one process; each is checked before it is timed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from pensieve.bench.gpu_device import scattered
from pensieve.bench.gpu_harness import Bench, check
from pensieve.bench.gpu_pages import Paged
from pensieve.errors import PensieveError
from pensieve.kernels import PAGE_SLOTS, choices
from pensieve.kernels.choices import Choices, chosen
from pensieve.model.kv.memory import PageMoves

Slices = list[tuple[int, int]]  # (start, length)
Changes = Mapping[str, int]  # of the current choices
WIDE: tuple[Changes, ...] = (
    {},
    {"snake": 0},
    {"wide_blocks": 2},
    {"wide_blocks": 2, "snake": 0},
    {"hopper": 0},
)
NARROW: tuple[Changes, ...] = ({}, {"few_rows": 1})
SHARED: tuple[Changes, ...] = ({}, {"shared": 0})
COPIES: tuple[Changes, ...] = ({}, {"copy_blocks": 8}, {"copy_blocks": 4}, {"copy_engine": 1})


def variants(tried: Sequence[Changes]) -> list[Choices]:
    """The current choices with each of these changes: what was switched off stays so; none comes twice."""
    return list(dict.fromkeys(choices.current._replace(**each) for each in tried))


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
    decodes: dict[str, Slices] = {
        f"{count} decodes over {context:,}": [(context - 1, 1)] * count
        for count, context in (
            [(3, 90)] if bench.small else [(64, 4096), (64, 1000), (16, 1000), (1, 65_536)]
        )
    }
    for what, slices in decodes.items():
        _compare(bench, what, slices, NARROW)
    for count in (3,) if bench.small else (32, 8):
        front, own = (6, 40) if bench.small else (64, 128)
        what = f"{count} decodes over {front * PAGE_SLOTS:,} shared and {own} own"
        _compare(bench, what, [(front * PAGE_SLOTS + own, 1)] * count, SHARED, front)
    for direction in ("swap_in", "swap_out"):
        _compare_copies(bench, direction)


def _compare(
    bench: Bench, what: str, slices: Slices, tried: Sequence[Changes], front: int = 0
) -> None:
    """Attention of 32/8 heads of 128 over these slices, by each choice; all begin with `front` pages."""
    right: torch.Tensor | None = None
    for each in variants(tried):
        with bench.noting("choices", f"{what}: {words(each)}", choice=words(each)):
            with chosen(each):
                paged = Paged.of(bench.device, slices, 32, 8, 128, bench.dtype, front=front)
                right = paged.right() if right is None else right
                check(f"{what}, {words(each)}", paged.run(), right)
                seconds = bench.seconds([paged.run])
            bench.report(
                "choices",
                f"{what}: {words(each)}: {seconds * 1e6:.0f} us",
                what=what,
                choice=words(each),
                default=each == choices.current,
                seconds=seconds,
            )


def _compare_copies(bench: Bench, direction: str) -> None:
    """Scattered pages of a history of 4,000 tokens on an 8 B model, one layer after another."""
    pages = 10 if bench.small else 125
    memory, moves = scattered(bench, pages)
    move = memory.swap_in if direction == "swap_in" else memory.swap_out
    arenas = (memory.host_arena, memory.device_arena)
    source, target = arenas if direction == "swap_in" else arenas[::-1]
    on_gpu = bench.device.type == "cuda"
    for each in variants(COPIES):
        if each.copy_engine and not on_gpu:
            continue
        with bench.noting("choices", f"{direction}: {words(each)}", choice=words(each)):
            with chosen(each), stream_of_its_own(bench.device):
                ready = memory.prepared(moves)._replace(runs=())

                def layers(ready: PageMoves = ready) -> None:
                    for layer in range(memory.shape.num_layers):
                        move(layer, ready)

                target.zero_()
                seconds = bench.seconds([layers], graph=False)
                bench.synchronize()
            moved = target[:, moves.target_pages.to(target.device)].cpu()
            if not torch.equal(moved, source[:, moves.source_pages.to(source.device)].cpu()):
                raise PensieveError(f"{direction}, {words(each)}, moved something else")
            rate = pages * memory.page_bytes / seconds
            bench.report(
                "choices",
                f"{direction}: {words(each)}: {rate / 1e9:.1f} GB/s",
                what=direction,
                choice=words(each),
                default=each == choices.current,
                seconds=seconds,
                bus_share=rate / bench.bus[direction] if bench.bus else None,
            )


def stream_of_its_own(device: torch.device) -> AbstractContextManager[object]:
    """As the copier has one: the driver's batches may not be on the default stream."""
    if device.type != "cuda":
        return nullcontext()
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return torch.cuda.stream(stream)


def words(each: Choices) -> str:
    """What differs from the defaults."""
    pairs = zip(Choices._fields, each, Choices(), strict=True)
    return (
        ", ".join(f"{name}={value}" for name, value, usual in pairs if value != usual)
        or "the defaults"
    )
