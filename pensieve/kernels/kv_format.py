"""Define how pages store keys and values: the type of an arena's elements, and the layout of a row.

A *row* holds the key or the value of one token for one KV head.  Rows are the last dimension
of an arena (layers, pages, 2, kv_heads, slots, row).

    auto   head_size values, in the type in which the model computes
    int8   head_size codes from -127 to 127, then their scale, a float32: a value is its code times the scale
    fp8    head_size one-byte numbers (e4m3: four bits of exponent, three of mantissa, at most 448); a value
           is its number times the scale of its layer, its head and its side (keys or values)

Scales of fp8 are chosen once, when a model is loaded, from the keys and values that the load probe sees
(`exponents_for`).  Readers and writers get the scales together with the pages: float32 (2, kv_heads), keys
first.  Scales are powers of two, so scaling does not round.  Values that are more than `HEADROOM` times the
probe's largest value become the largest number of the format.  Values that are not finite become NaN.

A token's row depends only on that token's values.  So the row is the same in every batch and for every split
of a prompt.  It can be copied, moved between the tiers and checksummed as bytes.  Attention reads all rows
from pages, including rows written in the same iteration.

`format_of` finds the format of pages from `pages.dtype`: no two formats share an element type.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# The smallest scale of int8 rows, the smallest normal float32.  A row whose values are all below 127 ·
# SCALE_MIN becomes zero.  Its scale would be a denormal number, which is coarse and which some processors
# flush to zero.
SCALE_MIN = 2.0**-126
_CODE_MAX = 127.0
FP8_MAX = 448.0
HEADROOM = 16  # how many times larger than the probe's largest value a key or value may be
EXPONENTS_MAX = 60  # positive or negative; keeps a scale and its inverse far from float32's limits


class KVFormat(NamedTuple):
    name: str  # value of `--kv-dtype`
    element: torch.dtype  # element type of an arena
    scale_elements: int = 0  # elements of a row in addition to its head_size values

    @property
    def in_words(self) -> str:
        return str(self.element).removeprefix("torch.") if self.name == "auto" else self.name

    def row(self, head_size: int) -> int:
        """Return the number of elements of a row."""
        return head_size + self.scale_elements

    def row_bytes(self, head_size: int) -> int:
        return self.row(head_size) * self.element.itemsize


INT8 = KVFormat("int8", torch.int8, 4)
FP8 = KVFormat("fp8", torch.float8_e4m3fn)
_BY_NAME = {each.name: each for each in (INT8, FP8)}
_BY_ELEMENT = {each.element: each for each in (INT8, FP8)}


def kv_format(name: str, dtype: torch.dtype) -> KVFormat:
    """Return the format of this name, for a model that computes in `dtype`."""
    if name == "auto":
        return KVFormat("auto", dtype)
    if name in _BY_NAME:
        return _BY_NAME[name]
    raise ValueError(f"unknown KV format {name!r}")


def format_of(pages: torch.Tensor, dtype: torch.dtype) -> KVFormat:
    """Return the format of an arena or a view of it, for a model that computes in `dtype`."""
    return _BY_ELEMENT.get(pages.dtype, KVFormat("auto", dtype))


def quantised(rows: torch.Tensor) -> torch.Tensor:
    """Quantize rows (…, head_size) to int8; a row that is not finite gets a scale of NaN."""
    values = rows.float()
    largest = values.abs().amax(-1, keepdim=True)
    # Divide by a tensor.  On some devices, torch divides by a number by multiplying with its reciprocal,
    # which rounds twice.
    scale = largest / torch.full_like(largest, _CODE_MAX)
    scale = torch.where(scale < SCALE_MIN, 0.0, scale)
    scale = torch.where(largest.isfinite(), scale, float("nan"))
    codes = torch.where(scale > 0, (values / scale).round(), 0.0).to(torch.int8)
    return torch.cat((codes, scale.view(torch.int8)), -1)


def dequantised(rows: torch.Tensor) -> torch.Tensor:
    """Return the float32 values (…, head_size) of int8 rows."""
    codes, scale = rows[..., : -INT8.scale_elements], rows[..., -INT8.scale_elements :]
    return codes.float() * scale.contiguous().view(torch.float32)


# -- fp8 --


def exponents_for(largest: torch.Tensor) -> torch.Tensor:
    """Return the exponents of the heads' scales (int, base 2) from each head's largest key or value."""
    known = largest.isfinite() & (largest > 0)
    _, exponents = torch.frexp(torch.where(known, largest, 1.0).double() * (HEADROOM / FP8_MAX))
    return torch.where(known, exponents, 0).clamp(-EXPONENTS_MAX, EXPONENTS_MAX)


def to_fp8(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Convert rows (tokens, kv_heads, head_size) to fp8, with a scale for each head."""
    numbers = (rows.float() / scales[:, None]).clamp(-FP8_MAX, FP8_MAX)
    return torch.where(rows.isfinite(), numbers, float("nan")).to(FP8.element)


def from_fp8(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of fp8 rows (…, kv_heads, slots, head_size)."""
    return rows.float() * scales[:, None, None]
