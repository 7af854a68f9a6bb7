"""What each part of the compiled layers takes of an iteration, for `pensieve bench step --parts`.

The parts of a CPU's layers, added up over the layers; what is left is embeddings, the last norm, sampling and
Python.  A product is bound by the speed at which its weights arrive while rows are few, so that speed stands
beside it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pensieve.errors import InvalidArgument
from pensieve.kernels.layer.cpu import Layer
from pensieve.kernels.layer.cpu_parts import PARTS, measured_parts
from pensieve.model.fuse.layers import FusedLayer
from pensieve.model.fuse.products import PackedProduct
from pensieve.model.loader import LoadedModel

REST = "the rest"


@dataclass(frozen=True)
class PartRow:
    batch: int
    name: str
    seconds: float  # median over the steps
    share: float  # of the step
    weight_bytes: int

    @property
    def bytes_per_second(self) -> float:
        return self.weight_bytes / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        speed = f", {self.bytes_per_second / 1e9:5.1f} GB/s of weights" if self.weight_bytes else ""
        return f"    {self.name:13} {self.seconds * 1e3:7.2f} ms, {self.share:4.0%}{speed}"


def check_measurable(model: LoadedModel) -> None:
    if not _layers(model):
        raise InvalidArgument("parts", "only layers that run in C++ are measured by their parts")


def weight_bytes(model: LoadedModel) -> dict[str, int]:
    """Of all layers, by part."""
    found = dict.fromkeys(PARTS, 0)
    for layer in _layers(model):
        for name, num_bytes in layer.bytes_of_parts.items():
            found[name] += num_bytes
    found["output matrix"] += sum(
        each.weight_bytes for each in model.flat.module.modules() if isinstance(each, PackedProduct)
    )
    return found


def part_rows(
    batch: int, step: Callable[[], float], repeats: int, weights: Mapping[str, int]
) -> list[PartRow]:
    """`step` returns the seconds that it took."""
    times: list[float] = []
    parts: list[Mapping[str, float]] = []
    for _ in range(repeats):
        with measured_parts() as found:
            times.append(step())
        parts.append(found)
    rest = [whole - sum(each.values()) for whole, each in zip(times, parts, strict=True)]
    named: dict[str, Sequence[float]] = {name: [each[name] for each in parts] for name in PARTS}
    whole = statistics.median(times)
    return [
        PartRow(batch, name, median, median / whole, weights.get(name, 0))
        for name, seconds in {**named, REST: rest}.items()
        if (median := statistics.median(seconds))
    ]


def _layers(model: LoadedModel) -> list[Layer]:
    modules = model.flat.module.modules()
    fused = [each.dense for each in modules if isinstance(each, FusedLayer)]
    return [each for each in fused if isinstance(each, Layer)]
