"""From a folder or a hub id to a model whose every layer is known to go through our attention.

`load` trusts no code that a repository ships, reads safetensors only, and accepts no weight that the
checkpoint lacks (transformers would fill it with random numbers).  Then `probe` measures the model
and refuses it, with the reason, if it cannot be served exactly.  Each way to fail is one line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from pensieve.errors import ModelError, UnsupportedModel
from pensieve.model.attention import FlatModel
from pensieve.model.probe import FusionFailed, one_line, probe
from pensieve.model.shape import ModelShape


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model under our attention, with its measured shape."""

    name: str  # the path or id it was loaded from
    flat: FlatModel
    shape: ModelShape
    eos_token_ids: frozenset[int]  # those the checkpoint names; a chat template may add its own


def load(
    path_or_id: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    int8: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> LoadedModel:
    """Load, check and probe a causal language model.

    `dtype` None takes the checkpoint's own; `int8` rounds the weights inside of its layers.
    `report` receives one line per stage.
    """
    name = os.fspath(path_or_id)
    if torch.device(device).type != "cpu":
        raise ModelError(f"cannot load {name} on {device}: this version computes on the CPU only")
    with _quiet_transformers():
        report(f"loading {name}")
        config = _read_config(name)
        flat = FlatModel(_read_weights(name, config, dtype))
        report("probing its attention")
        try:
            try:
                shape = probe(flat, int8=int8)
            except FusionFailed as error:
                if int8:
                    raise UnsupportedModel(f"its weights cannot be int8: {error}") from error
                report(f"its layers stay as they are: {error}")
                flat = FlatModel(_read_weights(name, config, dtype))
                shape = probe(flat, fuse_layers=False)
        except UnsupportedModel as error:
            raise UnsupportedModel(f"cannot serve {name}: {error}") from error
    report(
        f"{type(flat.module).__name__}: {shape.num_parameters / 1e6:.1f} M parameters, "
        f"{shape.num_layers} layers, {shape.kv_bytes_per_token} bytes of KV per token, "
        f"context {shape.context_max}"
    )
    return LoadedModel(name, flat, shape, _eos_token_ids(flat.module))


def _read_config(name: str) -> Any:
    looks_like_path = name.startswith((".", "~", os.sep)) or name.count(os.sep) > 1
    path = Path(name).expanduser()
    if looks_like_path and not path.is_dir():
        problem = "it is not a folder" if path.exists() else "no such folder"
        raise ModelError(f"cannot load {name}: {problem}")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelError(f"cannot load {name}: the folder has no config.json")
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:
        raise ModelError(f"cannot read the config of {name}: {one_line(error)}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"cannot serve {name}: {config.model_type} is an encoder-decoder, not a decoder"
        )
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UnsupportedModel(
            f"cannot serve {name}: transformers has no causal language model of type "
            f"{config.model_type}"
        )
    return config


def _read_weights(name: str, config: Any, dtype: torch.dtype | None) -> Any:
    try:
        module, loading = AutoModelForCausalLM.from_pretrained(
            name,
            config=config,
            dtype="auto" if dtype is None else dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            attn_implementation="eager",  # whatever its config asks for; the probe puts ours in
        )
    except Exception as error:
        raise ModelError(f"cannot load the weights of {name}: {one_line(error)}") from error
    for kind, problem in (
        ("missing_keys", "lack"),
        ("mismatched_keys", "have the wrong shape for"),
    ):
        keys = sorted(str(key) for key in loading[kind])
        if keys:
            others = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise ModelError(f"the weights of {name} {problem} {keys[0]}{others}")
    return module.eval().requires_grad_(False)


def _eos_token_ids(module: Any) -> frozenset[int]:
    """Both configs may name one id, several or none."""
    ids: set[int] = set()
    for config in (module.config.get_text_config(), module.generation_config):
        named = getattr(config, "eos_token_id", None)
        if named is not None:
            ids.update([named] if isinstance(named, int) else named)
    return frozenset(each for each in ids if each >= 0)  # some configs say -1 for none


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """What matters of its warnings and progress bars reaches the user as an error or a report."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
