"""Compute the seconds of iterations and copies from published shapes and data sheets.

An iteration has a fixed overhead and these costs (core/cost.py defines keys and pairs):

    dense       weight bytes / bandwidth, and 2 · parameters / rate for each token
    attention   KV bytes of a token / bandwidth for each key,
                and 4 · layers · heads · head size / rate for each pair

`pensieve profile` does not compute these costs, but measures the seconds at several token counts. It also
measures the cost of recomputing a chunk (`chunk_costs`).
A machine may have matrix kernels with tiles (core/cost.py).

With n devices, each layer has two collectives. A collective takes `collective_seconds`, plus the time to send
2 (n - 1) / n times the result's bytes over the link between the devices. Without these values, communication
takes no time.

`EFFICIENCY` is the part of a data sheet's rates that real kernels reach. The time of a copy between the tiers
is its bytes divided by the link's rate, and the two directions are independent. Several devices (tensor
parallel) count as one larger and faster device.

Costs from data sheets are assumptions, and every report says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

from pensieve.core.cost import CostProfile, IterationCost

EFFICIENCY = 0.6
CHUNK_TOKENS = 32  # in simulations


@dataclass(frozen=True)
class ModelPreset:
    """A decoder with its published shape; weights and KV take two bytes per number."""

    name: str
    parameters: float
    layers: int
    heads: int
    kv_heads: int
    head_size: int

    @property
    def weight_bytes(self) -> float:
        return 2 * self.parameters

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * 2 * self.layers * self.kv_heads * self.head_size


MODELS = {
    preset.name: preset
    for preset in (
        ModelPreset("opt-125m", 125e6, 12, 12, 12, 64),
        ModelPreset("opt-1.3b", 1.3e9, 24, 32, 32, 64),
        ModelPreset("opt-6.7b", 6.7e9, 32, 32, 32, 128),
        ModelPreset("opt-13b", 13e9, 40, 40, 40, 128),
        ModelPreset("opt-66b", 66e9, 64, 72, 72, 128),
        ModelPreset("llama2-13b-gqa", 12.6e9, 40, 40, 10, 128),
        ModelPreset("llama2-70b", 69e9, 80, 64, 8, 128),
        ModelPreset("yi-34b", 34.4e9, 60, 56, 8, 128),
        ModelPreset("llama3-8b", 8.03e9, 32, 32, 8, 128),
        ModelPreset("qwen2-7b", 7.6e9, 28, 28, 4, 128),
        ModelPreset("mistral-7b", 7.24e9, 32, 32, 8, 128),
        ModelPreset("random-0.37b", 0.37e9, 24, 16, 4, 64),
    )
}


@dataclass(frozen=True)
class HardwarePreset:
    name: str
    operations_per_second: float
    bytes_per_second: float
    link_bytes_per_second: float  # in each direction
    device_bytes: float
    host_bytes: float  # for KV, per device
    overhead_seconds: float = 0.0005
    devices: int = 1
    tile_tokens: int = 1
    unhidden_share: float = 0.0  # see core/cost.py
    collective_seconds: float = 0.0
    peer_bytes_per_second: float = math.inf

    @property
    def memory_bytes(self) -> float:
        return self.devices * self.device_bytes


# Rates of dense fp16 or bf16 with fp32 accumulation. For an RTX 4090, the data sheet has 165 TFLOPS (330 with
# fp16 accumulation). The RTX 4090 is in a desktop with 48 GB of memory for KV. The A100-40GB is one of eight
# in a machine with 1,152 GB of memory. Each device has 120 GB of this memory for KV.
HARDWARE = {
    preset.name: preset
    for preset in (
        HardwarePreset("rtx-4090", 165e12, 1.008e12, 25e9, 24e9, 48e9),
        HardwarePreset("a100-40gb", 312e12, 1.555e12, 25e9, 40e9, 120e9),
        HardwarePreset("a100-80gb", 312e12, 2.039e12, 25e9, 80e9, 220e9),
        HardwarePreset("h200", 989e12, 4.8e12, 55e9, 141e9, 220e9),
        HardwarePreset("cpu", 1.5e12, 35e9, 17e9, 16e9, 32e9, 0.001),
    )
}
INSTANT = "instant"
DEVICE_SHARE = 0.9  # part of a device's memory for weights and KV; the rest is for activations


def device_tokens_of(model: ModelPreset, hardware: HardwarePreset) -> int:
    """Return how many tokens of KV fit next to the weights; below 1 if the weights do not fit."""
    room = hardware.memory_bytes * DEVICE_SHARE - model.weight_bytes
    return int(room / model.kv_bytes_per_token)


def host_tokens_of(model: ModelPreset, hardware: HardwarePreset) -> int:
    return int(hardware.devices * hardware.host_bytes / model.kv_bytes_per_token)


@dataclass(frozen=True)
class CostModel(IterationCost):
    """The seconds of iterations and copies, for one model on one machine."""

    layers: int
    kv_bytes_per_token: int
    link_bytes_per_second: float
    source: str
    # If measured: the tokens of a chunk, and the cost of recomputing the chunk.
    chunk_costs: tuple[int, CostProfile] | None = field(default=None, kw_only=True)

    @classmethod
    def of(cls, model: ModelPreset, hardware: HardwarePreset) -> CostModel:
        rate = hardware.operations_per_second * hardware.devices * EFFICIENCY
        bandwidth = hardware.bytes_per_second * hardware.devices * EFFICIENCY
        num_collectives = 2 * model.layers if hardware.devices > 1 else 0
        sent_bytes = 2 * model.heads * model.head_size * 2 * (1 - 1 / hardware.devices)
        sending = num_collectives * sent_bytes / (hardware.peer_bytes_per_second * EFFICIENCY)
        return cls(
            2 * model.parameters / rate + sending,
            model.weight_bytes / bandwidth,
            4 * model.layers * model.heads * model.head_size / rate,
            model.kv_bytes_per_token / bandwidth,
            hardware.overhead_seconds + num_collectives * hardware.collective_seconds,
            model.layers,
            model.kv_bytes_per_token,
            hardware.link_bytes_per_second * hardware.devices,
            f"{model.name} on {hardware.devices} x {hardware.name}, data sheets x {EFFICIENCY:g}",
            tile_tokens=hardware.tile_tokens,
            unhidden_share=hardware.unhidden_share,
        )

    @property
    def computing(self) -> IterationCost:
        """Return the cost of computing, without copies."""
        return IterationCost(
            **{each.name: getattr(self, each.name) for each in fields(IterationCost)}
        )

    def copy_seconds(self, tokens: int) -> float:
        return tokens * self.kv_bytes_per_token / self.link_bytes_per_second

    def recompute(self, chunk_tokens: int) -> CostProfile:
        """Return the cost of recomputing a chunk after a context.

        If this cost was not measured, it is computed for a full batch, without the time to read the weights.
        """
        if self.chunk_costs is not None:
            measured_tokens, profile = self.chunk_costs
            scale = chunk_tokens / measured_tokens
            return profile if scale == 1 else profile.scaled(scale)
        return CostProfile(
            tuple(
                (1 << power, self.attention_seconds_per_pair * chunk_tokens * (1 << power))
                for power in range(18)
            ),
            self.dense_seconds_per_token * chunk_tokens,
            copy_seconds=self.copy_seconds(chunk_tokens),
        )


def instant(chunk_tokens: int, kv_bytes_per_token: int = 131_072) -> tuple[CostModel, CostProfile]:
    """Return costs of zero, and the cost of recomputing a chunk.

    Recomputing a chunk after p tokens costs (1 + p / 32,000) times its dense part.
    """
    free = CostModel(0, 0, 0, 0, 0, 1, kv_bytes_per_token, float("inf"), "iterations take no time")
    dense = 0.01
    points = tuple((1 << power, dense * (1 << power) / 32_000) for power in range(18))
    return free, CostProfile(points, dense)
