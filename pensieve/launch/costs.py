"""Choose the costs of computing and copying for a starting engine. The first source that exists is used:

    PENSIEVE_COST   a file from `pensieve profile --output` or `pensieve simulate --fit`, for measurements
    a profile       written by `pensieve profile` for this model, machine, settings and versions (profiles.py)
    an estimate     from the model's shape and, for iterations, a data sheet of the device

The costs are used by the eviction policy, for the choice between copying and recomputing, and to limit the
prompt tokens in an iteration. A log line names the source and why it was chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pensieve.config import Settings
from pensieve.core.cost import CostProfile, IterationCost
from pensieve.core.scheduler_config import SOME_COST
from pensieve.errors import ConfigError
from pensieve.launch import profiles
from pensieve.launch.sizing import streams_in_place
from pensieve.sim import cost_file
from pensieve.sim.cost import HARDWARE, CostModel, HardwarePreset
from pensieve.sim.fit import assumed_for

if TYPE_CHECKING:
    from pensieve.model.loader import LoadedModel

# per group and layer, for kernel launches and switching the staging arena
GROUP_LAYER_SECONDS = 1e-4
ADVICE = "`pensieve profile` makes one"


class Costs(NamedTuple):
    """The costs of one model on this machine."""

    retention: CostProfile  # per chunk
    iterations: IterationCost
    in_words: str  # the source and why it was chosen, for the log
    copy_seconds: float  # to copy a chunk between the tiers
    group_seconds: float  # that each group of streamed turns adds to an iteration


def costs_of(
    settings: Settings, folder: Path, model: LoadedModel, journal_model: Mapping[str, Any]
) -> Costs:
    """Return the costs of the model. Raises ConfigError if the file of PENSIEVE_COST is for another model."""
    if settings.cost is not None:
        found = cost_file.load_all(settings.cost)
        _check_model(settings, found.cost, model)
        kind = "profiled" if found.measured_with else "fitted from a journal"
        words = f"costs: {kind}, from {settings.cost}: {found.cost.source}"
        return _measured_costs(settings, found.cost, words, model)
    profile = profiles.stored_profile(profiles.key_of(settings, folder, model))
    if isinstance(profile, profiles.StoredProfile):
        words = f"costs: profiled on this machine, {profile.in_words}"
        return _measured_costs(settings, profile.cost, words, model)
    shape = model.shape
    retention = CostProfile.analytic(
        shape.num_parameters,
        shape.num_layers,
        model.num_heads,
        shape.head_size,
        settings.chunk_tokens,
    )
    assumed = assumed_for(journal_model, _hardware(model))
    words = f"costs: estimated from the model's shape: {profile}; {ADVICE}"
    computing = assumed.computing if assumed is not None else SOME_COST
    return Costs(retention, computing, words, *_streaming_seconds(settings, model))


def _measured_costs(settings: Settings, cost: CostModel, words: str, model: LoadedModel) -> Costs:
    retention = replace(cost.recompute(settings.chunk_tokens), measured=True)
    streaming = _streaming_seconds(settings, model, retention.copy_seconds)
    return Costs(retention, cost.computing, words, *streaming)


def _streaming_seconds(
    settings: Settings, model: LoadedModel, copy_seconds: float = 0.0
) -> tuple[float, float]:
    """Return the seconds to stage a chunk (from a data sheet if not measured), and the seconds per group."""
    group_seconds = GROUP_LAYER_SECONDS * model.shape.num_layers
    if streams_in_place(settings, model.flat.module.device.type == "cpu"):
        return 0.0, group_seconds
    num_bytes = settings.tensor_parallel * model.shape.kv_bytes_per_page(settings.chunk_tokens)
    estimated = num_bytes / _hardware(model).link_bytes_per_second
    return copy_seconds or estimated, group_seconds


def _hardware(model: LoadedModel) -> HardwarePreset:
    return HARDWARE["h200" if model.flat.module.device.type == "cuda" else "cpu"]


def _check_model(settings: Settings, found: CostModel, model: LoadedModel) -> None:
    shape = model.shape
    if found.layers != shape.num_layers:
        raise ConfigError(
            f"{settings.cost} was measured with a model of {found.layers} layers, and this one has "
            f"{shape.num_layers}. Measure this model with `pensieve profile`"
        )
    kv_bytes = settings.tensor_parallel * shape.kv_bytes_per_token
    if found.kv_bytes_per_token != kv_bytes:
        raise ConfigError(
            f"{settings.cost} was measured with a model of {found.kv_bytes_per_token:,} bytes of KV per "
            f"token, and this one has {kv_bytes:,}"
        )
