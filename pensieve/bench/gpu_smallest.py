"""Runs the kernels that read and write KV on the smallest shapes that reach all of their parts.

Keys and values are bfloat16, then bytes (fp8).  For tools under which a kernel takes seconds.
"""

from __future__ import annotations

import sys

import torch

from pensieve.bench.gpu_harness import check
from pensieve.bench.gpu_kernels import check_write, check_write_fp8
from pensieve.bench.gpu_pages import Paged

SLICES = [(0, 1), (31, 8), (70, 40), (600, 1)]  # narrow of both sizes, wide, and one that is cut


def main() -> int:
    device = torch.device(sys.argv[1])
    with torch.inference_mode():
        for fp8 in (False, True):
            for head_size in (64, 128):
                paged = Paged.of(device, SLICES, 4, 1, head_size, torch.bfloat16, fp8=fp8)
                where = f"head {head_size}{', KV in fp8' if fp8 else ''}"
                check(where, paged.run(), paged.right())
            (check_write_fp8 if fp8 else check_write)(device, torch.bfloat16)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
