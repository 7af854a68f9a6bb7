"""Switch off CUDA kernels, for a GPU on which a kernel is wrong.

`PENSIEVE_GPU_CHOICES=hopper=0,radix=0` sets switches for a process and its child processes.
`scripts/bench_gpu` finds wrong kernels and switches them off for the rest of its run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from pensieve.errors import InvalidArgument

VARIABLE = "PENSIEVE_GPU_CHOICES"


class Choices(NamedTuple):
    # 1: on Hopper, compute long prompts (tiles of many rows) with Hopper's kernel;
    # 0: with the kernel of the other GPUs
    hopper: int = 1
    radix: int = 1  # draw tokens by a search in each row of logits; 0: by sorting the row
    # 1: if a kernel waits for seconds, stop it and report an error; 0: it may hang
    watchdog: int = 0


def of_text(text: str) -> Choices:
    """Parse `name=number,…`; missing names keep their defaults."""
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
    """Use these choices inside the block."""
    global current  # process-wide, like the compiled kernels
    before, current = current, choices
    try:
        yield
    finally:
        current = before
