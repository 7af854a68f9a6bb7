"""Which models load, which are refused and why, and that every refusal is one line."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers

from pensieve.errors import DeviceError, ModelError, UnsupportedModel
from pensieve.kernels.attention.input import AttentionInput, AttentionKind
from pensieve.model.attention import FAR, FlatModel, mask_reach
from pensieve.model.loader import load
from pensieve.model.probe import probe
from pensieve.model.shape import ModelShape
from tests.models import REFUSED, SERVED, save_tiny, tiny_model

FolderOf = Callable[[str], Path]
FORM = r"layers in (C\+\+ \(\w+\)|torch: .+)"


@pytest.fixture
def copied(folder_of: FolderOf, tmp_path: Path) -> Path:
    """Return a copy of a checkpoint that a test may damage."""
    return Path(shutil.copytree(folder_of("llama-gqa"), tmp_path / "model"))


def test_the_shape_is_measured(folder_of: FolderOf) -> None:
    lines: list[str] = []
    model = load(folder_of("qwen3"), report=lines.append)
    assert model.shape == ModelShape(
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_size=16,
        vocab_size=128,
        context_max=256,
        dtype=torch.float32,
        num_parameters=29920,
        weight_bytes=4 * 29920,
    )
    assert model.shape.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert model.shape.kv_bytes_per_page(32) == 32 * 512
    assert model.eos_token_ids == {2}
    assert lines[-2] == (
        "Qwen3ForCausalLM: 0.0 M parameters, 2 layers, 512 bytes of KV per token, context 256"
    )
    assert re.fullmatch(FORM, lines[-1])


def test_a_checkpoint_may_name_several_end_tokens(copied: Path) -> None:
    (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load(copied).eos_token_ids == {2, 7, 9}


def test_an_end_token_outside_the_vocabulary_is_ignored(copied: Path) -> None:
    (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": [-1, 9]}))
    assert load(copied).eos_token_ids == {2, 9}


@pytest.mark.parametrize("asked", ["flash_attention_2", "somebody/some-kernel"])
def test_the_attention_implementation_in_a_config_is_ignored(copied: Path, asked: str) -> None:
    path = copied / "config.json"
    config = json.loads(path.read_text()) | {"attn_implementation": asked}
    path.write_text(json.dumps(config | {"_attn_implementation": asked}))
    assert load(copied).shape.num_layers == 2


@pytest.mark.parametrize("factor", [0.9, 1.1, 1.3])
def test_a_wrong_attention_scaling_is_refused_in_low_precision_too(
    monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    from pensieve.builtin import MODEL_PATH
    from pensieve.kernels.attention import reference

    assert load(MODEL_PATH, dtype=torch.bfloat16).shape.dtype == torch.bfloat16
    right = reference.multi_token_attention

    def wrong(inputs: AttentionInput, out: torch.Tensor) -> None:
        right(inputs._replace(kind=AttentionKind(inputs.kind.scaling * factor)), out)

    monkeypatch.setattr(reference, "multi_token_attention", wrong)
    with pytest.raises(UnsupportedModel, match="differ"):
        load(MODEL_PATH, dtype=torch.bfloat16)


def test_a_window_longer_than_the_context_is_full_attention(tmp_path: Path) -> None:
    config = SERVED["mistral"]()
    config.sliding_window = 256
    assert load(save_tiny(config, tmp_path)).shape.context_max == 256


@pytest.mark.parametrize(
    ("family", "longest"),
    [("mistral-window", 200), ("qwen2-half-sliding", 64), ("llama4-chunks", 32), ("longrope", 64)],
)
def test_a_model_that_is_exact_only_up_to_a_length_is_served_up_to_that_length(
    family: str, longest: int, tmp_path: Path
) -> None:
    config, reason = REFUSED[family]
    folder = save_tiny(config(), tmp_path)
    assert load(folder, context_max=longest).shape.context_max == longest
    with pytest.raises(UnsupportedModel) as refusal:
        load(folder, context_max=longest + 1)
    assert reason.partition(",")[0] in str(refusal.value)
    if "sees at most" in reason:
        assert f"Serve it with --context-max {longest}" in str(refusal.value)


@pytest.mark.parametrize(
    ("family", "longest"), [("longrope", 64), ("dynamic-rope", 255), ("gemma2-window", 64)]
)
def test_the_error_suggests_a_lower_context_if_that_helps(
    family: str, longest: int, tmp_path: Path
) -> None:
    folder = save_tiny(REFUSED[family][0](), tmp_path)
    with pytest.raises(UnsupportedModel, match=f"Serve it with --context-max {longest}"):
        load(folder)
    assert load(folder, context_max=longest).shape.context_max == longest


def test_a_context_beyond_the_models_own_is_refused(folder_of: FolderOf) -> None:
    with pytest.raises(UnsupportedModel, match="made for 256 tokens; --context-max 257 is more"):
        load(folder_of("llama-gqa"), context_max=257)


@pytest.mark.parametrize("family", REFUSED)
def test_a_model_that_would_not_be_exact_is_refused(family: str, tmp_path: Path) -> None:
    config, reason = REFUSED[family]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about slow fallbacks of recurrent layers
        folder = save_tiny(config(), tmp_path)
        with pytest.raises(UnsupportedModel) as refusal:
            load(folder)
    message = str(refusal.value)
    assert message.startswith(f"cannot serve {tmp_path}: ")
    assert reason in message
    assert "\n" not in message
    helps = "sees at most" in reason or "rotary frequencies" in reason
    assert ("--context-max" in message) == helps


def test_rotary_scalings_that_do_not_depend_on_length_are_served(tmp_path: Path) -> None:
    for index, rope in enumerate(
        (
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128},
            {"rope_type": "linear", "factor": 2.0},
        )
    ):
        config = SERVED["llama-gqa"]()
        config.rope_parameters = {"rope_theta": 10000.0, **rope}
        load(save_tiny(config, tmp_path / str(index)))


def test_modelling_code_with_wrong_logits_is_refused() -> None:
    """A layer that mixes rows of the flat batch uses the interface correctly, but its logits are wrong."""

    class Mixing(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden + hidden.cumsum(dim=1)

    model = tiny_model(SERVED["llama-gqa"]())
    model.model.layers[0].mlp = Mixing()
    with pytest.raises(UnsupportedModel, match="its logits through our attention differ"):
        probe(FlatModel(model), fuse_layers=False)


def test_the_error_names_a_weight_that_is_nan(copied: Path) -> None:
    path = copied / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    name = next(each for each in weights if "layers.1" in each and "q_proj" in each)
    weights[name][3, 5] = float("nan")
    safetensors.torch.save_file(weights, path, {"format": "pt"})
    with pytest.raises(ModelError, match=f"its weights hold NaN or infinity, first in {name}$"):
        load(copied)


def test_the_error_names_a_dtype_that_is_too_narrow_for_the_model(copied: Path) -> None:
    path = copied / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    for name in weights:
        if "embed_tokens" in name or "_proj" in name:
            weights[name] *= 3e4  # each weight fits into float16, but products of two do not
    safetensors.torch.save_file(weights, path, {"format": "pt"})
    with pytest.raises(ModelError, match="its logits are not finite in float16"):
        load(copied, dtype=torch.float16)


def test_the_error_names_an_expert_of_the_wrong_shape(tmp_path: Path) -> None:
    """Experts are stacked while they are loaded. The cause of a failure is only in transformers' log."""
    folder = save_tiny(SERVED["mixtral"](), tmp_path)
    path = folder / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    name = next(each for each in weights if "layers.1" in each and "experts.1.w1" in each)
    weights[name] = weights[name][:-1].contiguous()
    safetensors.torch.save_file(weights, path, {"format": "pt"})
    with pytest.raises(ModelError) as refusal:
        load(folder)
    message = str(refusal.value)
    assert (
        "model.layers.1.mlp.experts.gate_up_proj: stack expects each tensor to be equal" in message
    )
    assert "report" not in message
    assert "\n" not in message


def test_the_error_names_a_weight_of_the_wrong_shape(copied: Path) -> None:
    path = copied / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    name = next(each for each in weights if "layers.1" in each and "q_proj" in each)
    weights[name] = weights[name][:-1].contiguous()
    safetensors.torch.save_file(weights, path, {"format": "pt"})
    with pytest.raises(ModelError) as refusal:
        load(copied)
    assert str(refusal.value).endswith(f"have the wrong shape for {name}: (31, 32), not (32, 32)")


@pytest.mark.parametrize(
    ("path", "message"),
    [("./nowhere", "cannot load ./nowhere: no such folder"), ("/a/b/c", "no such folder")],
)
def test_an_unknown_path_is_refused_in_one_line(path: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(path)


def test_a_file_instead_of_a_model_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("")
    with pytest.raises(ModelError, match="it is not a folder"):
        load(tmp_path / "weights")


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"the folder has no config\.json"):
        load(tmp_path)


def test_a_broken_config_is_refused(copied: Path) -> None:
    (copied / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot read the config of") as failure:
        load(copied)
    assert "\n" not in str(failure.value)


def test_an_unknown_architecture_is_refused(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "model_type": "unheard-of"}))
    with pytest.raises(ModelError, match="unheard-of"):
        load(copied)


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    transformers.T5Config(vocab_size=128, d_model=32, num_layers=1).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="t5 is an encoder-decoder"):
        load(tmp_path)


def test_a_model_type_without_a_causal_language_model_is_refused(tmp_path: Path) -> None:
    transformers.ViTConfig(hidden_size=32).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="no causal language model of type vit"):
        load(tmp_path)


def test_truncated_weights_are_refused(copied: Path) -> None:
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="cannot load the weights of") as failure:
        load(copied)
    assert "\n" not in str(failure.value)


def test_a_missing_weight_is_never_filled_with_random_numbers(copied: Path) -> None:
    weights = safetensors.torch.load_file(copied / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    del weights["model.norm.weight"]
    safetensors.torch.save_file(weights, copied / "model.safetensors", {"format": "pt"})
    message = r"lack model\.layers\.1\.mlp\.up_proj\.weight and 1 more"
    with pytest.raises(ModelError, match=message):
        load(copied)


def test_a_weight_of_the_wrong_shape_is_refused_in_one_line(copied: Path) -> None:
    weights = safetensors.torch.load_file(copied / "model.safetensors")
    weights["model.norm.weight"] = torch.zeros(31)
    safetensors.torch.save_file(weights, copied / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="weights of") as failure:
        load(copied)
    assert "\n" not in str(failure.value)


def add_weights(folder: Path, *names: str) -> None:
    path = folder / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    weights |= {name: torch.ones(1) for name in names}
    safetensors.torch.save_file(weights, path, {"format": "pt"})


def quantized(folder: Path, method: dict[str, object]) -> None:
    """Add a quantization method to the config."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": method}))


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.up_proj.weight_scale",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "lm_head.bias",
        "model.norm.weight_scale_inv",
    ],
)
def test_a_weight_that_the_model_would_leave_out_is_refused(copied: Path, name: str) -> None:
    add_weights(copied, name)
    with pytest.raises(ModelError) as refusal:
        load(copied)
    assert str(refusal.value).endswith(f"contain weights that the model would ignore: {name}")


def test_other_parts_of_a_checkpoint_may_be_left_out(copied: Path) -> None:
    add_weights(
        copied,
        "model.layers.2.self_attn.q_norm.weight",  # a third layer, for multi-token prediction
        "mtp.fc.weight",
        "model.visual.blocks.0.norm.weight",
        "vision_tower.norm.weight",
        "model.layers.0.self_attn.k_scale",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
    )
    assert load(copied).shape.num_layers == 2


def test_a_quantization_that_transformers_does_not_know_is_refused(copied: Path) -> None:
    """Transformers would load the weights without their scales."""
    reason = "its weights are quantized by modelopt, which transformers does not know"
    quantized(copied, {"quant_method": "modelopt", "quant_algo": "FP8"})
    with pytest.raises(UnsupportedModel, match=reason):
        load(copied)
    quantized(copied, None)  # type: ignore[arg-type]
    assert load(copied).shape.num_layers == 2
    (copied / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    with pytest.raises(UnsupportedModel, match=reason):
        load(copied)


def test_scales_that_a_known_quantization_leaves_out_are_refused(copied: Path) -> None:
    """AutoFP8 names its scales weight_scale, but its config says fp8, as DeepSeek's does."""
    path = copied / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    for name in [each for each in weights if each.endswith("_proj.weight")]:
        weights[name] = weights[name].to(torch.float8_e4m3fn)
        weights[name + "_scale"] = torch.ones(())
    safetensors.torch.save_file(weights, path, {"format": "pt"})
    quantized(copied, {"quant_method": "fp8", "activation_scheme": "static"})
    with pytest.raises(
        ModelError, match=r"weight_scale and \d+ more \(they are quantized by fp8\)$"
    ):
        load(copied)


def test_an_adapter_beside_the_model_is_refused(copied: Path) -> None:
    """Transformers applies an adapter if peft is installed, and silently ignores it otherwise."""
    (copied / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    for is_adapter_alone in (False, True):
        if is_adapter_alone:
            (copied / "config.json").unlink()
        with pytest.raises(
            UnsupportedModel, match=r"its adapter .* Merge the adapter into the weights"
        ):
            load(copied)


def test_pickled_weights_are_not_read(copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    torch.save({}, copied / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot load the weights of"):
        load(copied)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_the_error_names_a_missing_device(folder_of: FolderOf) -> None:
    with pytest.raises(DeviceError, match=r"cannot put .* on cuda"):
        load(folder_of("llama-gqa"), device="cuda")


def test_mask_reach_is_the_number_of_positions_that_a_mask_allows() -> None:
    assert mask_reach(lambda b, h, q, k: k <= q) == FAR
    assert mask_reach(lambda b, h, q, k: (k <= q) & (k > q - 4096)) == 4096
    assert mask_reach(lambda b, h, q, k: (k <= q) & (k // 8192 == q // 8192)) == 8192
    assert mask_reach(lambda b, h, q, k: k >= 0) == 0
    assert mask_reach(lambda b, h, q, k: k <= q + 1) == 0
    assert mask_reach(lambda b, h, q, k: torch.ones(9)[k] > 0) == 0
