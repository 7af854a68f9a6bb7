"""Load a model from a folder or a hub id, and probe it.

`load` runs no code from a repository and reads safetensors only.  It refuses a checkpoint that:

* lacks weights (transformers would fill them with random numbers);
* has weights that the model would ignore, or is an adapter;
* has a quantization that transformers does not know (transformers would drop the scales).

Then `probe` measures the model and refuses it, with the reason, if it cannot be served exactly.  Each error
message is one line.
"""

from __future__ import annotations

import copy
import gc
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.quantizers import AutoHfQuantizer
from transformers.utils import logging as transformers_logging

from pensieve.errors import DeviceError, ModelError, UnsupportedModel, one_line
from pensieve.kernels.kv_format import FP8
from pensieve.model.attention import FlatModel
from pensieve.model.fuse import in_torch
from pensieve.model.fuse.record import decoder_layers
from pensieve.model.layer_range import (
    BlankTable,
    NoLmHead,
    OtherStageLayer,
    StagePart,
    cut,
    number_from_zero,
)
from pensieve.model.parallel.ranks import ParallelModel, Rank
from pensieve.model.parallel.stages import StageModel, expand_own_plan, shards_of
from pensieve.model.probe import FusionFailed, probe, with_scales_of_all
from pensieve.model.shape import ModelShape

# Weights that a language model may ignore: heads that predict several tokens ahead, towers for other inputs,
# and scales of fp8 KV.
IGNORABLE = re.compile(
    r"(^|[._])(mtp|nextn|vision|visual|image|audio|speech|multi_modal)([._]|$)|\.[kv]_scale$"
)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model that uses our attention, with its measured shape."""

    name: str  # the path or id it was loaded from
    flat: FlatModel
    shape: ModelShape  # with the heads of this rank
    num_heads: int  # heads of all ranks together
    eos_token_ids: frozenset[int]  # from the checkpoint; a chat template may add more


def load(
    path_or_id: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    int8: bool = False,
    kv_dtype: str = "auto",
    context_max: int | None = None,
    rank: Rank | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> LoadedModel:
    """Load, check and probe a causal language model.

    `dtype` None keeps the checkpoint's dtype.  `int8` rounds the weights inside the layers.  `kv_dtype` is
    the format of KV (`kernels.kv_format`).  `context_max` lowers the served context.  With a `rank`, only the
    rank's part is loaded.  All ranks must load at the same time.  If ranks share each layer, no layer is
    replaced (fuse/), because transformers' hooks in the layers combine the ranks' results.  `report` receives
    one line for each step of loading.
    """
    name = os.fspath(path_or_id)
    device = torch.device(device)
    sharing = rank if rank is not None and rank.num_shards > 1 else None  # ranks share each layer
    with _quiet_transformers():
        report(f"loading {name}")
        config = _read_config(name)
        flat = _read_model(name, config, dtype, device, rank)
        report("probing its attention")
        try:
            found = _shape_or_reason(flat, context_max, sharing is None, int8, kv_dtype)
            if isinstance(found, str):
                # Free this model before the next one is read, so that memory never holds both.
                del flat
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                flat = _read_model(name, config, dtype, device, rank)
                shape = probe(flat, context_max=context_max, fuse_layers=False, kv_dtype=kv_dtype)
                flat.form = in_torch(found)  # a text for people: how the layers run
            else:
                shape = found
        except UnsupportedModel as error:
            raise UnsupportedModel(f"cannot serve {name}: {error}") from error
    if kv_dtype == FP8.name and rank is not None and isinstance(flat, StageModel):
        rank.wait_until_all_loaded()  # each rank waits here after its probe
        flat.connect()
        shape = with_scales_of_all(flat, shape)
    report(
        f"{type(flat.module).__name__}: {shape.num_parameters / 1e6:.1f} M parameters, "
        f"{shape.num_layers} layers, {shape.kv_bytes_per_token} bytes of KV per token"
        f"{'' if kv_dtype == 'auto' else f' as {kv_dtype}'}"
        f"{f' on each of {sharing.num_shards} ranks' if sharing else ''}"
        f"{' in this stage' if rank and rank.num_stages > 1 else ''}, context {shape.context_max}"
    )
    if sharing is not None:
        flat.form = in_torch("several ranks share each layer")
    report(flat.form)
    num_heads = shape.num_heads
    if sharing is not None:
        num_heads = int(config.get_text_config().num_attention_heads)
        if shape.num_heads == num_heads:
            report(
                "transformers' plan does not divide this model's attention, so each rank keeps the KV "
                "of all heads"
            )
    return LoadedModel(name, flat, shape, num_heads, _eos_token_ids(flat.module))


def _shape_or_reason(
    flat: FlatModel,
    context_max: int | None,
    fuse_layers: bool,
    int8: bool,
    kv_dtype: str,
) -> ModelShape | str:
    """Return the model's shape.

    If replacing layers failed, return the reason.  The model must then be loaded again.
    """
    try:
        return probe(
            flat, context_max=context_max, fuse_layers=fuse_layers, int8=int8, kv_dtype=kv_dtype
        )
    except FusionFailed as error:
        if int8:
            raise UnsupportedModel(f"its weights cannot be int8: {error}") from error
        return str(error)


def _read_config(name: str) -> Any:
    looks_like_path = name.startswith((".", "~", os.sep)) or name.count(os.sep) > 1
    path = Path(name).expanduser()
    if looks_like_path and not path.is_dir():
        problem = "it is not a folder" if path.exists() else "no such folder"
        raise ModelError(f"cannot load {name}: {problem}")
    if (path / "adapter_config.json").is_file():
        raise UnsupportedModel(
            f"cannot serve {name}: its adapter (adapter_config.json) would be ignored. Merge the adapter "
            "into the weights (peft's merge_and_unload, then save_pretrained), or remove that file to serve "
            "the base model"
        )
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
    method = _quantization(path, config)
    if method is not None and not AutoHfQuantizer.supports_quant_method({"quant_method": method}):
        raise UnsupportedModel(
            f"cannot serve {name}: its weights are quantized by {method}, which transformers does not know. "
            "Use an unquantized checkpoint or a GGUF file of the model"
        )
    return config


def _quantization(folder: Path, config: Any) -> str | None:
    """Return the quantization method of the weights, if it must be checked.

    Return None if no method is named, or if it is bitsandbytes, which transformers supports.
    """
    for each in (config, config.get_text_config()):
        named = getattr(each, "quantization_config", None)
        if named is not None:
            method = named.get("quant_method") if isinstance(named, dict) else named.quant_method
            # transformers supports bitsandbytes, but looks it up as bitsandbytes_4bit or bitsandbytes_8bit.
            needs_no_check = method is None or str(method).endswith("bitsandbytes")
            return None if needs_no_check else str(getattr(method, "value", method))
    # Older ModelOpt checkpoints store the method in a separate file.
    return "modelopt" if (folder / "hf_quant_config.json").is_file() else None


def check_divisible(path_or_id: str | os.PathLike[str], num_ranks: int) -> None:
    """Raise UnsupportedModel unless transformers can divide the model equally among `num_ranks` ranks."""
    name = os.fspath(path_or_id)
    with _quiet_transformers():
        config = _read_config(name).get_text_config()
    if not getattr(config, "base_model_tp_plan", None):
        raise UnsupportedModel(
            f"cannot divide {name} among {num_ranks} ranks: transformers has no tensor-parallel "
            f"plan for {config.model_type}"
        )
    num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if num_kv_heads % num_ranks:
        raise UnsupportedModel(
            f"cannot divide {name} among {num_ranks} ranks: its {num_kv_heads} KV heads "
            "cannot be divided equally"
        )


def check_stages(path_or_id: str | os.PathLike[str], num_stages: int) -> None:
    """Raise UnsupportedModel unless the model has a layer for each stage."""
    name = os.fspath(path_or_id)
    with _quiet_transformers():
        num_layers = _read_config(name).get_text_config().num_hidden_layers
    if num_layers < num_stages:
        raise UnsupportedModel(
            f"cannot divide {name} into {num_stages} stages: it has {num_layers} layers, "
            f"so use at most {num_layers} stages"
        )


def _read_model(
    name: str, config: Any, dtype: torch.dtype | None, device: torch.device, rank: Rank | None
) -> FlatModel:
    if rank is None:
        return FlatModel(_move_to(device, _read_weights(name, config, dtype), name))
    if rank.num_stages > 1:
        return _read_stage(name, config, dtype, device, rank)
    from transformers.distributed import DistributedConfig

    parts = {"distributed_config": DistributedConfig(tp_size=rank.num_ranks)}
    module = _read_weights(name, config, dtype, parts)
    rank.wait_until_all_loaded()  # not by a collective, which could time out
    return ParallelModel(module, rank)


def _read_stage(
    name: str, config: Any, dtype: torch.dtype | None, device: torch.device, rank: Rank
) -> StageModel:
    config = copy.deepcopy(config)
    is_last = rank.stage == rank.num_stages - 1
    if not is_last:  # the output matrix is in the last stage only
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    full_class: Any = AutoModelForCausalLM._model_mapping[type(config)]
    parts: list[StagePart] = []

    def init_and_cut(module: Any, *args: Any, **kwargs: Any) -> None:
        full_class.__init__(module, *args, **kwargs)  # allocates no weights yet
        layers = decoder_layers(module)
        if len(layers) < rank.num_stages:
            raise UnsupportedModel(f"it has {len(layers)} layers for {rank.num_stages} stages")
        parts.append(cut(module, layers, rank.stage, rank.num_stages))

    body: dict[str, Any] = {"__init__": init_and_cut, "__module__": full_class.__module__}
    shared = {}
    if rank.num_shards > 1:
        body |= {
            "prepare_distribute_model": shards_of(rank),
            "_expand_parallel_plan": expand_own_plan,
        }
        shared = {"distributed_config": {"tp_size": rank.num_shards}}
    try:
        module = _read_weights(
            name, config, dtype, shared, model_class=type(full_class.__name__, (full_class,), body)
        )
    except ModelError as error:
        if isinstance(error.__cause__, UnsupportedModel):
            raise error.__cause__ from None
        raise
    if rank.num_shards > 1:
        rank.wait_until_all_loaded()  # the code below uses collectives
    else:
        module = _move_to(device, module, name)
    own = [each.module for each in decoder_layers(module)]
    number_from_zero(module, own, parts[-1].layers.first)
    return StageModel(module, parts[-1], rank)


def _move_to(device: torch.device, module: Any, name: str) -> Any:
    if device.type == "cpu":
        return module
    try:
        return module.to(device)
    except (RuntimeError, AssertionError) as error:  # out of memory, or torch without CUDA
        raise DeviceError(f"cannot put {name} on {device}: {one_line(error)}") from error


def _read_weights(
    name: str,
    config: Any,
    dtype: torch.dtype | None,
    parts: Mapping[str, Any] | None = None,
    model_class: Any = AutoModelForCausalLM,
) -> Any:
    with _logged_by_transformers() as logged:
        try:
            module, loading = model_class.from_pretrained(
                name,
                config=config,
                dtype="auto" if dtype is None else dtype,
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # loading_info lists them; reported below
                output_loading_info=True,
                attn_implementation="eager",  # overrides the config; the probe sets ours later
                **(parts or {}),
            )
        except Exception as error:
            reason = _conversion_failure("\n".join(logged)) or one_line(error)
            raise ModelError(f"cannot load the weights of {name}: {reason}") from error
    wrongly_ignored = [key for key in loading["unexpected_keys"] if _belongs_to_model(module, key)]
    for keys, problem in (
        (wrongly_ignored, "contain weights that the model would ignore:"),
        (loading["missing_keys"], "lack"),
        (loading["mismatched_keys"], "have the wrong shape for"),
    ):
        if keys:
            first = min(map(_describe, keys))
            others = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            method = _quantization(Path(name), config)
            quantized = f" (they are quantized by {method})" if method else ""
            raise ModelError(f"the weights of {name} {problem} {first}{others}{quantized}")
    return module.eval().requires_grad_(False)


def _belongs_to_model(module: Any, key: str) -> bool:
    """Whether an unexpected checkpoint weight belongs to a module that the model has.

    Ignoring such a weight would change results.

    Examples are a scale or a bias of a module whose weight is loaded, or an additional norm in a layer.  If
    the weight's nearest existing parent is the model itself, its base model or a list of layers, the weight
    belongs to a module that the model does not have.
    """
    if IGNORABLE.search(key):
        return False
    prefix = f"{module.base_model_prefix}."
    for path in (key, prefix + key):
        parent = module
        for name in path.split("."):
            child = getattr(parent, name, None)
            if isinstance(child, torch.Tensor):  # old checkpoints hold buffers: masks, frequencies
                return isinstance(child, torch.nn.Parameter)
            if not isinstance(child, torch.nn.Module):
                break
            parent = child
        if isinstance(parent, OtherStageLayer | BlankTable | NoLmHead):
            return False
        base = getattr(module, module.base_model_prefix, module)
        if parent not in (module, base) and not isinstance(parent, torch.nn.ModuleList):
            return True
    return False


def _conversion_failure(log: str) -> str:
    """Return the first weight that could not be converted, and why; transformers' error names neither."""
    weight = re.search(r"^(\S+) *\| CONVERSION", log, re.MULTILINE)
    why = re.search(r"^\w+Error: (.+)", log, re.MULTILINE)
    return f"{weight[1]}: {why[1]}" if weight and why else ""


def _describe(key: Any) -> str:
    """Return a weight's name and, if transformers gives them, its shape in the file and the needed shape."""
    if not isinstance(key, tuple):
        return str(key)
    name, in_file, needed = key
    return f"{name}: {tuple(in_file)}, not {tuple(needed)}"


def _eos_token_ids(module: Any) -> frozenset[int]:
    """Return the end-of-sequence ids of the model's two configs; each may name one, several or none."""
    ids: set[int] = set()
    for config in (module.config.get_text_config(), module.generation_config):
        named = getattr(config, "eos_token_id", None)
        if named is not None:
            ids.update([named] if isinstance(named, int) else named)
    return frozenset(each for each in ids if each >= 0)  # some configs use -1 for "none"


@contextmanager
def _logged_by_transformers() -> Iterator[list[str]]:
    """Collect transformers' warnings in a list instead of logging them."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    before = transformers_logging.get_verbosity()
    transformers_logging.disable_default_handler()
    transformers_logging.add_handler(handler)
    transformers_logging.set_verbosity(transformers_logging.WARNING)
    try:
        yield lines
    finally:
        transformers_logging.set_verbosity(before)
        transformers_logging.remove_handler(handler)
        transformers_logging.enable_default_handler()


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Silence transformers' warnings and progress bars; problems become errors or `report` lines."""
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
