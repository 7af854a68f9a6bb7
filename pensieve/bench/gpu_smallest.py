"""Runs the attention kernels on the smallest shapes that reach all of their parts.

For tools under which a kernel takes seconds.
"""

from __future__ import annotations

import sys

import torch

from pensieve.bench.gpu_harness import check
from pensieve.bench.gpu_pages import Paged

SLICES = [(0, 1), (31, 8), (70, 40), (600, 1)]  # narrow of both sizes, wide, and one that is cut


def main() -> int:
    device = torch.device(sys.argv[1])
    with torch.inference_mode():
        for head_size in (64, 128):
            paged = Paged.of(device, SLICES, 4, 1, head_size, torch.bfloat16)
            check(f"head {head_size}", paged.run(), paged.right())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
