"""Unpack the weights of a GGUF file into one safetensors file, block by block.

Quantised weights and bfloat16 become bfloat16. float16 and float32 are kept. Weights are unpacked and written
in blocks of BLOCK_ELEMENTS, so the memory use does not depend on the model's size. A safetensors file can be
written sequentially. It contains 8 bytes with the header's length, a JSON header with the offset of each
tensor, and the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pensieve.errors import UnsupportedModel
from pensieve.gguf.architectures import Weight
from pensieve.gguf.header import library

BLOCK_ELEMENTS = 1 << 22
PLAIN = {"F32", "F16", "BF16"}
NAMES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
}  # maps the names of safetensors to those of torch
SIZES = {"BF16": 2, "F16": 2, "F32": 4}


def kind_of(weights: Sequence[Weight]) -> str:
    """Return the dtype of all weights after unpacking."""
    kinds = {each.tensor.kind for each in weights}
    if kinds - PLAIN or "BF16" in kinds:
        return "BF16"
    return "F16" if "F16" in kinds else "F32"


def num_bytes(weights: Sequence[Weight]) -> int:
    return sum(each.tensor.num_elements for each in weights) * SIZES[kind_of(weights)]


def check_kinds(weights: Sequence[Weight], name: str) -> None:
    """Raise ModelError for a quantisation that cannot be unpacked. Called before anything is written."""
    samples = {each.tensor.kind: each.tensor for each in weights}
    for kind, tensor in samples.items():
        try:
            _unpack(tensor.data[:1], kind)
        except NotImplementedError:
            raise UnsupportedModel(
                f"{name} has weights of the type {kind}, which the package gguf cannot unpack"
            ) from None


def write_weights(weights: Sequence[Weight], path: Path, progress: Callable[[int], None]) -> None:
    """Write the file. After each block, `progress` gets the number of bytes written so far."""
    kind = kind_of(weights)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for weight in weights:
        begin, end = end, end + weight.tensor.num_elements * SIZES[kind]
        shape = list(weight.tensor.shape)
        header[weight.name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    written = 0
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for weight in weights:
            for block in _blocks(weight):
                written += file.write(_as_kind(_unpack(block, weight.tensor.kind), kind))
                progress(written)


def _blocks(weight: Weight) -> Iterator[Any]:
    """Yield blocks of packed rows of a tensor, in the order that transformers expects."""
    data = weight.tensor.data
    if len(weight.tensor.shape) == 1:
        yield data
        return
    step = max(BLOCK_ELEMENTS // weight.tensor.shape[-1], 1)
    rows = _order(weight) if weight.num_heads else None
    for start in range(0, len(data), step):
        yield data[start : start + step] if rows is None else data[rows[start : start + step]]


def _order(weight: Weight) -> Any:
    """Return the original order of the rows. In a head of n rows, llama.cpp puts row i + n/2 after row i."""
    import numpy as np

    rows = np.arange(len(weight.tensor.data))
    return rows.reshape(weight.num_heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _unpack(rows: Any, kind: str) -> Any:
    """Unpack rows to float32."""
    package = library()
    return package.dequantize(rows, package.GGMLQuantizationType[kind])


def _as_kind(values: Any, kind: str) -> bytes:
    import numpy as np

    if kind == "F32":
        return bytes(values.astype("<f4", copy=False).tobytes())
    if kind == "F16":
        return bytes(values.astype("<f2").tobytes())
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16  # round to nearest, ties to even
    halves = np.where(np.isnan(values), 0x7FC0, rounded).astype("<u2")
    return bytes(halves.tobytes())
