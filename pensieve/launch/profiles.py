"""Store the profiles of `pensieve profile`: the costs of a model on this machine (format: sim/cost_file.py).

Profiles are in the folder `profiles` next to the converted models ($XDG_CACHE_HOME/pensieve,
~/.cache/pensieve). A profile is for one model (a hash of its config and of the headers of its weights), one
device with its kernels and threads, and one configuration (dtypes, ranks, tokens per chunk). The file's name
is a hash of all these. The file also contains the versions of Pensieve and torch. If this process runs other
versions, the profile is not used, and the log says so. Files are written atomically (store/durable.py).
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pensieve import __version__
from pensieve.config import Settings
from pensieve.config.machine import processor_name
from pensieve.errors import ConfigError, one_line
from pensieve.launch.model_cache import models_folder
from pensieve.launch.model_folder import fingerprint_of
from pensieve.sim import cost_file
from pensieve.sim.cost import CostModel

if TYPE_CHECKING:
    from pensieve.model.loader import LoadedModel


class ProfileKey(NamedTuple):
    """The model, machine and configuration of a profile."""

    name: str  # the name of the model's folder, for people
    measured_with: dict[str, Any]
    versions: dict[str, str]

    @property
    def path(self) -> Path:
        digest = hashlib.sha256(json.dumps(self.measured_with, sort_keys=True).encode())
        stem = re.sub(r"[^\w.-]+", "_", self.name)[:64] or "model"
        return profiles_folder() / f"{stem}-{digest.hexdigest()[:16]}.json"


class StoredProfile(NamedTuple):
    cost: CostModel
    in_words: str


def profiles_folder() -> Path:
    return models_folder().parent / "profiles"


def key_of(settings: Settings, folder: Path, model: LoadedModel) -> ProfileKey:
    """Return the key of a model that was loaded with these settings."""
    import torch

    from pensieve.kernels import cpu_library

    shape, device = model.shape, model.flat.module.device
    if device.type == "cuda":
        machine = {"device": str(torch.cuda.get_device_name(device))}
    else:
        machine = {
            "device": processor_name(),
            "instructions": cpu_library.instruction_set(shape.dtype, shape.head_size) or "torch",
            "threads": str(torch.get_num_threads()),
        }
    measured_with = {
        "model": fingerprint_of(folder, ""),
        **machine,
        "layers": model.flat.form,
        "dtype": str(shape.dtype).removeprefix("torch."),
        "kv_dtype": shape.kv_format.in_words,
        "weights": settings.weights,
        "tensor_parallel": settings.tensor_parallel,
        "chunk_tokens": settings.chunk_tokens,
        **({"pipeline_stages": stages} if (stages := settings.pipeline_stages) > 1 else {}),
    }
    name = folder.resolve().name
    return ProfileKey(name, measured_with, {"pensieve": __version__, "torch": torch.__version__})


def stored_profile(key: ProfileKey) -> StoredProfile | str:
    """Return the profile of this key, or the reason why there is none."""
    path = key.path
    if not path.is_file():
        return "no profile of this model on this machine"
    try:
        found = cost_file.load_all(path)
    except ConfigError as error:
        return f"its profile cannot be used ({one_line(error)})"
    measured_with, measured_at = (
        found.measured_with,
        found.measured_with.get("at", "an unknown day"),
    )
    if {name: measured_with.get(name) for name in key.measured_with} != key.measured_with:
        return f"the profile {path} belongs to another model or configuration"
    versions = measured_with.get("versions")
    if versions != key.versions:
        return (
            f"its profile was measured with {_versions_text(versions)}, but this process runs "
            f"{_versions_text(key.versions)}"
        )
    median = found.errors.get("all", {}).get("median")
    error_text = f", off by {median:.0%} in the median" if isinstance(median, float) else ""
    return StoredProfile(found.cost, f"{measured_at}{error_text} ({path})")


def _versions_text(versions: Any) -> str:
    if not isinstance(versions, Mapping) or not versions:
        return "unknown versions"
    return " and ".join(f"{name} {version}" for name, version in versions.items())


def text_of(key: ProfileKey, cost: CostModel, measured_at: str, facts: Mapping[str, Any]) -> str:
    """Return the content of a profile file for this key. `measured_at` is the date of the measurement."""
    machine = {"host": platform.node() or "unknown"}
    measured_with = {**key.measured_with, **machine, "versions": key.versions, "at": measured_at}
    return cost_file.text_of(cost, {"measured_with": measured_with, **facts}) + "\n"


def write(path: Path, text: str) -> None:
    """Write the file atomically. Raises ConfigError if that fails."""
    from pensieve.store.durable import new_file  # imports SQLite

    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with new_file(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
