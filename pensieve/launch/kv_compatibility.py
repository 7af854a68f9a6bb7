"""Describe what two engines must have in common to exchange KV.

The keys and values depend on the weights and the precision. Their bytes also depend on the format and the
chunk size. An engine rejects KV from an engine that differs in any of these facts
(conversations/hand_over.py).

The weights are identified by a digest of the configuration, of each file's header and of SAMPLES pieces of
each tensor. Samples are sufficient, because two trainings differ almost everywhere. Reading all weights again
would double the startup time. An engine with several ranks exchanges no KV, because each rank has only a part
of each page.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pensieve import __version__
from pensieve.config import Settings

if TYPE_CHECKING:
    from pensieve.model.shape import ModelShape

SAMPLES, SAMPLE_BYTES = 8, 512
HEADER_BYTES_MAX = 1 << 24
PAGE_BYTES_MAX = 32 << 20  # because a page must fit into one frame of the pipe


class KvCompatibility(NamedTuple):
    facts: Mapping[str, str]  # empty: this engine exchanges no KV
    refusal: str = ""  # if `facts` is empty: why


def kv_compatibility(
    settings: Settings, folder: Path, shape: ModelShape, device_type: str, page_bytes: int
) -> KvCompatibility:
    if settings.tensor_parallel > 1 or settings.pipeline_stages > 1:
        return KvCompatibility({}, "its pages are divided among several ranks")
    if page_bytes > PAGE_BYTES_MAX:
        return KvCompatibility({}, f"a page of {page_bytes:,} bytes is too large")
    scales = hashlib.sha256(repr(shape.kv_exponents).encode()).hexdigest()[:16]
    return KvCompatibility(
        {
            "version": __version__,
            "torch": metadata.version("torch"),
            "device": device_type,
            "weights": weights_digest(folder),
            "weights_format": settings.weights,
            "layers": str(shape.num_layers),
            "kv_heads": str(shape.num_kv_heads),
            "head_size": str(shape.head_size),
            "dtype": str(shape.dtype).removeprefix("torch."),
            "kv_format": shape.kv_format.in_words,
            "kv_scales": scales if shape.kv_exponents else "none",
            "chunk_tokens": str(settings.chunk_tokens),
            "byte_order": sys.byteorder,
        }
    )


def weights_digest(folder: Path) -> str:
    """Return a digest of the configuration and of samples of each tensor."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = file.read(min(int.from_bytes(file.read(8), "little"), HEADER_BYTES_MAX))
            digest.update(header)
            data_start = file.tell()
            tensors = json.loads(header)
            tensors.pop("__metadata__", None)
            for name in sorted(tensors):
                begin, end = tensors[name]["data_offsets"]
                step = max((end - begin) // SAMPLES, SAMPLE_BYTES)
                for offset in range(begin, end, step):
                    file.seek(data_start + offset)
                    digest.update(file.read(min(SAMPLE_BYTES, end - offset)))
    return digest.hexdigest()[:32]
