"""Switches of the CUDA kernels, for a GPU on which one of them is wrong.

`PENSIEVE_GPU_CHOICES=hopper=0,radix=0` sets switches for a process and for those that it starts.
`scripts/bench_gpu` finds wrong kernels, and switches them off for the rest of its run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from pensieve.errors import InvalidArgument

VARIABLE = "PENSIEVE_GPU_CHOICES"


class Choices(NamedTuple):
    hopper: int = 1  # wide work has Hopper's own kernel; 0: the one of other GPUs does it
    radix: int = 1  # tokens are drawn by a search in each row of logits; 0: by sorting it
    watchdog: int = 0  # a kernel that waits for seconds ends with an error instead of hanging


def of_text(text: str) -> Choices:
    """`name=number,…`; what is not named keeps its default."""
    given: dict[str, int] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, _, number = part.partition("=")
        if name not in Choices._fields or number not in ("0", "1"):
            known = ", ".join(f"{each}=0 or 1" for each in Choices._fields)
            raise InvalidArgument(VARIABLE, f"has {part!r}; it takes {known}")
        given[name] = int(number)
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
