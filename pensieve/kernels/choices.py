"""What the CUDA kernels leave to a measurement: every choice has a default and can be switched.

Defaults are what can be shown without a GPU (by a plan, or by compiled code) to do less; a gain that is
only supposed is off.  `PENSIEVE_GPU_CHOICES=wide_blocks=2,snake=0` sets choices for a process and for those
that it starts; `scripts/bench_gpu` measures them side by side.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from pensieve.errors import InvalidArgument

VARIABLE = "PENSIEVE_GPU_CHOICES"


class Choices(NamedTuple):
    wide_blocks: int = 1  # of a multiprocessor, for which wide work is planned; Hopper's runs 1
    snake: int = 1  # Hopper's blocks turn round after each pass over the items; 0: they never do
    shared: int = (
        1  # pages that several slices begin with are read for all at once; 0: by each slice
    )
    few_rows: int = 0  # on Hopper, decodes have a kernel of more blocks for each multiprocessor
    fused: int = 0  # a sum and its norm are one launch, and so are a gate and what it lets through
    hopper: int = 1  # wide work has Hopper's own kernel; 0: the one of other GPUs does it
    copy_blocks: int = 32  # that move pages over the bus; up to 8 have four times the threads
    copy_engine: int = 0  # the driver copies pages over the bus, in one call for a layer
    radix: int = 1  # tokens are drawn by a search in each row of logits; 0: by sorting it
    watchdog: int = 0  # a kernel that waits for seconds ends with an error instead of hanging


COUNTS = ("wide_blocks", "copy_blocks")  # at least 1; every other choice is a switch, 0 or 1


def of_text(text: str) -> Choices:
    """`name=number,…`; what is not named keeps its default."""
    given: dict[str, int] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, _, number = part.partition("=")
        if name not in Choices._fields or not number.isdecimal():
            known = ", ".join(f"{each}=NUMBER" for each in Choices._fields)
            raise InvalidArgument(VARIABLE, f"has {part!r}; it takes {known}")
        given[name] = int(number)
        if name in COUNTS and given[name] < 1:
            raise InvalidArgument(VARIABLE, f"has {part!r}; {name} is at least 1")
        if name not in COUNTS and given[name] > 1:
            raise InvalidArgument(VARIABLE, f"has {part!r}; {name} is 0 or 1")
    return Choices(**given)


current = of_text(os.environ.get(VARIABLE, ""))


@contextmanager
def chosen(choices: Choices) -> Iterator[None]:
    """Inside, these are the current ones."""
    global current  # of the process, as its kernels are
    before, current = current, choices
    try:
        yield
    finally:
        current = before
