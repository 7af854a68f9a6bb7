"""Which layers are replaced by compiled layers, and how this is undone if logits differ."""

from __future__ import annotations

import copy
import re
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from pensieve.core.turn import Turn
from pensieve.errors import UnsupportedModel
from pensieve.kernels.attention import cpu as attention_cpu
from pensieve.kernels.layer import cpu
from pensieve.kernels.layer.protocol import LayerWeights, MlpWeights, PagedRows
from pensieve.model import loader
from pensieve.model.attention import AttentionCall, FlatModel, PagedPass
from pensieve.model.batch import Batch
from pensieve.model.fuse import fuse, layers, match
from pensieve.model.fuse.layers import FusedLayer
from pensieve.model.fuse.products import PackedProduct, pack_products
from pensieve.model.fuse.record import CausalPass, ModuleCall
from pensieve.model.kv.memory import KVMemory
from pensieve.model.loader import load
from pensieve.model.probe import FusionFailed, probe
from tests.model.world import GAP_MAX, World, largest_gap, plain_model, slice_of
from tests.models import SERVED, tiny_model

ROOT = Path(__file__).parents[3]
PROMPT = [5, 9, 3, 77, 12, 40, 8, 9, 21]


@pytest.fixture(autouse=True)
def _compiled() -> None:
    if not cpu.available(torch.float32):
        pytest.skip("there is no compiled library")


TYPES = [torch.float32, torch.bfloat16, torch.float16]


def flat_model(family: str, dtype: torch.dtype = torch.float32) -> FlatModel:
    flat = FlatModel(tiny_model(SERVED[family]()).to(dtype))
    probe(flat)
    return flat


def counts(module: torch.nn.Module) -> tuple[int, int]:
    kinds = [type(each) for each in module.modules()]
    return kinds.count(FusedLayer), kinds.count(PackedProduct)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("family", SERVED)
def test_layers_of_the_supported_form_are_replaced(family: str, dtype: torch.dtype) -> None:
    flat = flat_model(family, dtype)
    assert counts(flat.module) == (flat.module.config.num_hidden_layers, 1)  # 1: the output matrix
    assert flat.whole is not None
    assert re.fullmatch(r"layers in C\+\+ \(\w+\)", flat.form)
    linears = [each for each in flat.module.modules() if type(each) is torch.nn.Linear]
    assert not linears, "a product kept its own weights"


def config(kind: str, **changes: Any) -> Any:
    common = {
        "vocab_size": 128,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 1)
    return getattr(transformers, kind)(
        **{**common, **ids, "max_position_embeddings": 64, "intermediate_size": 48, **changes}
    )


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
IN_COMPILED_LAYERS = {
    "one after the other, without biases": config(
        "GPTNeoXConfig", use_parallel_residual=False, attention_bias=False, hidden_act="relu"
    ),
    "side by side, of one norm": config(
        "PhiConfig", intermediate_size=48, partial_rotary_factor=0.5
    ),
    "a scale of queries that rounds": config(
        "OPTConfig", hidden_size=40, ffn_dim=48, word_embed_proj_dim=40, activation_function="gelu"
    ),
    "layers with experts and without": config(
        "Qwen3MoeConfig",
        intermediate_size=80,
        moe_intermediate_size=24,
        mlp_only_layers=[0],
        head_dim=8,
        **EXPERTS,
    ),
    "shares that do not add up to 1": config(
        "OlmoeConfig", intermediate_size=24, norm_topk_prob=False, **EXPERTS
    ),
    "LayerNorm and groups of heads": config(
        "Starcoder2Config", num_key_value_heads=2, sliding_window=None
    ),
    "queries and keys that some layers do not rotate": config(
        "SmolLM3Config", num_key_value_heads=2, no_rope_layers=[1, 0]
    ),
}
IN_TORCH = {
    "the kernels do not know its Qwen2MoeTopKRouter": config(
        "Qwen2MoeConfig",
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
        **EXPERTS,
    ),
    "its sizes do not fit the form": config(
        "OPTConfig", ffn_dim=48, word_embed_proj_dim=32, do_layer_norm_before=False
    ),
    "the kernels' output differs from the layer's output": config("CohereConfig"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", IN_COMPILED_LAYERS)
def test_layers_of_supported_variants_are_replaced(kind: str, dtype: torch.dtype) -> None:
    flat = FlatModel(tiny_model(copy.deepcopy(IN_COMPILED_LAYERS[kind])).to(dtype))
    probe(flat)  # compares with the plain model
    assert flat.form.startswith("layers in C++")
    assert flat.whole is not None


@pytest.mark.parametrize("reason", IN_TORCH)
def test_layers_of_another_form_stay_in_torch_and_the_reason_is_reported(reason: str) -> None:
    flat = FlatModel(tiny_model(copy.deepcopy(IN_TORCH[reason])))
    probe(flat)
    assert flat.form == f"layers in torch: layer 0: {reason}"
    assert counts(flat.module)[0] == 0
    shared = [each.shared for each in flat.module.modules() if isinstance(each, PackedProduct)]
    assert len(set(map(id, shared))) < len(shared)  # queries, keys and values are one product


def test_layers_with_unsupported_attention_stay_in_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_cpu, "KIND_FIELDS", frozenset())
    flat = flat_model("llama-gqa")
    assert flat.whole is None
    assert flat.form.endswith(
        "layer 0: the compiled layers do not support the model's kind of attention"
    )


def test_the_docs_table_lists_the_families_with_compiled_layers() -> None:
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    table = text.split("<!-- families", 1)[1].split("<!-- end of the families", 1)[0]
    rows = [[cell.strip() for cell in row.split("|")[1:3]] for row in table.splitlines()[3:]]
    told = {family: form for families, form in rows for family in families.split(", ")}
    families = {"llama" if family.startswith("llama") else family for family in SERVED}
    assert told == dict.fromkeys(families, "C++")


PARTS = {  # norms other than those before attention and MLP, and products with biases
    "llama-mha": ("", ""),
    "qwen2": ("", "attention_in"),
    "qwen3": ("query_norm key_norm", ""),
    "qwen3-moe": ("query_norm key_norm", ""),
    "olmo2": ("query_norm key_norm attention_after mlp_after", ""),
    "opt": ("", "attention_in attention_out mlp_in mlp_out"),
    "gpt2": ("", "attention_in attention_out mlp_in mlp_out"),
    "gpt-neox": ("", "attention_in attention_out mlp_in mlp_out"),
}


@pytest.mark.parametrize("family", PARTS)
def test_norms_and_biases_of_a_family_are_in_its_compiled_layers(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Comparisons with plain transformers check elsewhere that the results are right."""
    seen: list[LayerWeights] = []
    layer = cpu.CpuLayerKernels.layer

    def noted(self: cpu.CpuLayerKernels, weights: LayerWeights, **options: bool) -> cpu.CpuLayer:
        seen.append(weights)
        return layer(self, weights, **options)

    monkeypatch.setattr(cpu.CpuLayerKernels, "layer", noted)
    flat_model(family)
    norms, biased = (set(text.split()) for text in PARTS[family])
    assert len(seen) == 2
    for weights in seen:
        assert set(weights.norms) - {"attention_before", "mlp_before"} == norms
        products = {name: getattr(weights, name) for name in ("attention_in", "attention_out")}
        if isinstance(weights.mlp, MlpWeights):
            products |= {"mlp_in": weights.mlp.into, "mlp_out": weights.mlp.out}
        assert {
            name for name, each in products.items() if any(bias is not None for bias in each.biases)
        } == biased


class Together:
    """Several prompts as one flat batch. Each attends only to itself."""

    paged_rows: PagedRows | None = None
    pages_ready = False

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths

    def wait_for_pages(self, layer: int) -> None:
        """Do nothing: no page moves."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        apart, tensors = CausalPass(), (call.query, call.key, call.value)
        parts = zip(*(each.split(self._lengths) for each in tensors), strict=True)
        return torch.cat(
            [apart.attend(call._replace(query=q, key=k, value=v)) for q, k, v in parts]
        )


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("family", sorted(SERVED))
def test_other_turns_in_the_batch_change_no_bit(family: str, dtype: torch.dtype) -> None:
    flat = flat_model(family, dtype)
    lengths = [len(PROMPT), 1, 30, 3]
    prompts = [[(seed * 31 + i * 7) % 90 + 3 for i in range(n)] for seed, n in enumerate(lengths)]

    def logits(which: list[int]) -> torch.Tensor:
        ids = torch.tensor([token for each in which for token in prompts[each]])
        positions = torch.cat([torch.arange(lengths[each]) for each in which])
        chosen = Together([lengths[each] for each in which])
        return flat.logits(ids, positions, torch.arange(len(ids)), chosen)

    with torch.inference_mode():
        together = logits([0, 1, 2, 3]).split(lengths)
        for which, rows in enumerate(together):
            assert torch.equal(logits([which]), rows), which


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("slots", [32, 8])
@pytest.mark.parametrize("family", ["llama-gqa", "olmo2", "qwen3", "qwen3-moe", "opt", "gpt-neox"])
def test_skipping_logits_of_some_rows_changes_no_bit(
    family: str, slots: int, dtype: torch.dtype
) -> None:
    flat = FlatModel(tiny_model(SERVED[family]()).to(dtype))
    shape = probe(flat)
    ids = torch.arange(3, 43)
    turn = Turn(0, "", array("I", ids.tolist()), 0, 40, 41)
    answers = []
    with torch.inference_mode():
        for rows in (list(range(40)), [39], [], [3, 31, 32], [7, 2]):
            memory = KVMemory(shape, 6, 0, slots)
            turn.page_table = array("i", [3, 1, 5, 0, 2][: -(-40 // slots)])
            batch = Batch.from_slices([slice_of(turn, 0, 40, True, slots)], slots)
            forward_pass = PagedPass(batch, memory, wait_layer=lambda layer: None)
            chosen = torch.tensor(rows, dtype=torch.int64)
            logits = flat.logits(ids, batch.positions, chosen, forward_pass)
            assert len(logits) == len(rows)
            answers.append((rows, logits))
    for rows, logits in answers[1:]:
        assert torch.equal(logits, answers[0][1][rows])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("slots", [32, 8])
@pytest.mark.parametrize("family", sorted(SERVED))
def test_layers_without_page_waits_run_in_one_call_with_the_same_bits(
    family: str, slots: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat = FlatModel(tiny_model(SERVED[family]()).to(dtype))
    shape = probe(flat)
    turn = Turn(0, "", array("I", range(3, 43)), 0, 40, 41)
    turn.page_table = array("i", [3, 1, 5, 0, 2][: -(-40 // slots)])
    batch = Batch.from_slices([slice_of(turn, 0, 40, True, slots)], slots)
    rows, calls = torch.tensor([3, 31, 39]), []
    forward = cpu.CpuLayerChain.forward
    monkeypatch.setattr(
        cpu.CpuLayerChain, "forward", lambda *given: (calls.append(1), forward(*given))[1]
    )
    answers = []
    with torch.inference_mode():
        for swap_ins_outstanding in (True, False):
            memory = KVMemory(shape, 6, 0, slots)
            memory.device_arena.zero_()
            one = PagedPass(
                batch, memory, lambda layer: None, swap_ins_outstanding=swap_ins_outstanding
            )
            answers.append(
                (flat.logits(batch.input_ids, batch.positions, rows, one), memory.device_arena)
            )
    assert all(torch.equal(*each) for each in zip(*answers, strict=True))
    assert len(calls) == (flat.whole is not None and slots == 32)


def test_a_layer_without_rotation_ignores_the_previous_layers_rotation() -> None:
    flat = FlatModel(tiny_model(SERVED["llama-gqa"]()))
    shape = probe(flat)
    first, second = (each for each in flat.module.modules() if isinstance(each, FusedLayer))
    turn = Turn(0, "", array("I", range(3, 43)), 0, 40, 41)
    turn.page_table = array("i", [1, 0])
    batch = Batch.from_slices([slice_of(turn, 0, 40, True, 32)], 32)
    draw = torch.Generator().manual_seed(0)
    residual = torch.randn(40, flat.module.config.hidden_size, generator=draw)
    angles = torch.rand(1, 40, shape.head_size, generator=draw)

    def answer(*rotations: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        memory = KVMemory(shape, 6, 0, 32)
        forward_pass = PagedPass(batch, memory, wait_layer=lambda layer: None)
        with torch.inference_mode():
            return [
                layer.run(residual, rotation, forward_pass)
                for layer, rotation in zip((first, second), rotations, strict=True)
            ][-1]

    rotation = (angles.cos(), angles.sin())
    assert torch.equal(answer(rotation, None), answer(None, None))
    assert not torch.equal(answer(rotation, rotation), answer(None, None))


class TwoInputs(torch.nn.Module):
    """A norm that also multiplies with a second input."""

    def __init__(self, norm: LlamaRMSNorm) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, given: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        scale = (given.float().pow(2).mean(-1, keepdim=True) + self.eps).rsqrt()
        return (given * scale * self.weight * torch.sigmoid(gate)).to(given.dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_layer_without_rotation_is_recognised_despite_rounding(dtype: torch.dtype) -> None:
    """In 16 bits, the rotation changes the layer's result by less than the rounding error."""
    form = copy.deepcopy(IN_COMPILED_LAYERS["queries and keys that some layers do not rotate"])
    flat = FlatModel(tiny_model(form, std=0.1).to(dtype))
    probe(flat)
    assert [layer.rotates for layer in flat.module.model.layers] == [True, False]
    assert flat.whole is not None


def test_a_layer_whose_norm_has_two_inputs_stays_in_torch() -> None:
    flat = FlatModel(tiny_model(SERVED["llama-gqa"]()))
    layer = flat.module.model.layers[0]
    gated = TwoInputs(layer.input_layernorm)

    class Gated(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = gated

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            answer: torch.Tensor = self.norm(given, given)
            return answer

    layer.input_layernorm = Gated()
    probe(flat)
    assert flat.form.endswith("in torch: layer 0: the kernels do not know its TwoInputs")
    layers, products = counts(flat.module)
    assert layers == 1
    assert products > 4  # products of the other layer, which is still packed


class NullExpert(torch.nn.Module):
    """Experts. The first expert returns zeros."""

    def __init__(self, experts: torch.nn.Module) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj
        self.act_fn = experts.act_fn
        self._act = [experts]

    def forward(
        self, given: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor
    ) -> torch.Tensor:
        answer: torch.Tensor = self._act[0](
            given, chosen, torch.where(chosen == 0, torch.zeros_like(shares), shares)
        )
        return answer


def test_experts_of_which_one_differs_are_not_replaced() -> None:
    family = config(
        "Qwen3MoeConfig",
        moe_intermediate_size=24,
        head_dim=8,
        **{**EXPERTS, "num_experts": 16},
    )
    flat = FlatModel(tiny_model(family).to(torch.bfloat16))
    for layer in flat.module.model.layers:
        layer.mlp.experts = NullExpert(layer.mlp.experts)
    probe(flat)
    assert counts(flat.module)[0] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", sorted(SERVED))
def test_prompt_cuts_and_the_number_of_threads_change_no_bit(
    family: str, dtype: torch.dtype
) -> None:
    flat = FlatModel(tiny_model(SERVED[family]()).to(dtype))
    shape = probe(flat)
    turns = [
        Turn(which, "", array("I", [(i * 7 + which * 31) % 90 + 3 for i in range(70)]), 0, 70, 71)
        for which in range(2)
    ]
    turns[0].page_table, turns[1].page_table = array("i", [3, 1, 5]), array("i", [0, 2, 4])

    def logits(*iterations: list[tuple[int, int, int]]) -> torch.Tensor:
        """Return the logits of the first turn's 70 positions, computed in slices (turn, start, stop)."""
        memory = KVMemory(shape, 6, 0, 32)
        rows = torch.empty(70, shape.vocab_size)
        for iteration in iterations:
            slices = [
                slice_of(turns[turn], start, stop, True, 32) for turn, start, stop in iteration
            ]
            batch = Batch.from_slices(slices, 32)
            forward_pass = PagedPass(batch, memory, wait_layer=lambda layer: None)
            every = torch.arange(len(batch.input_ids))
            got = flat.logits(batch.input_ids, batch.positions, every, forward_pass)
            parts = got.float().split([stop - start for _, start, stop in iteration])
            for (turn, start, stop), part in zip(iteration, parts, strict=True):
                if turn == 0:
                    rows[start:stop] = part
        return rows

    before = torch.get_num_threads()
    try:
        with torch.inference_mode():
            torch.set_num_threads(1)
            whole = logits([(0, 0, 70)])
            torch.set_num_threads(2)
            assert torch.equal(logits([(1, 0, 70), (0, 0, 70)]), whole)
            odd = [[(0, 0, 5), (1, 0, 33)], [(1, 33, 34), (0, 5, 38)], [(0, 38, 39)], [(0, 39, 70)]]
            assert torch.equal(logits(*odd), whole)
            torch.set_num_threads(3)
            assert torch.equal(
                logits([(0, 0, 64)], *([(0, i, i + 1)] for i in range(64, 70))), whole
            )
    finally:
        torch.set_num_threads(before)


class LateGate(LlamaMLP):  # type: ignore[misc]  # transformers has no types here
    """A gated MLP that also applies tanh to the second factor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x).tanh())


class Halved(torch.nn.Module):
    """A decoder layer that halves its contribution by a constant in its code."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states: torch.Tensor, **arguments: Any) -> torch.Tensor:
        return hidden_states + (self.inner(hidden_states, **arguments) - hidden_states) / 2


def test_layers_that_only_resemble_the_pattern_stay_in_torch(tmp_path: Path) -> None:
    plain = tiny_model(SERVED["llama-gqa"]())
    plain.model.layers[0].mlp.__class__ = LateGate
    flat = FlatModel(copy.deepcopy(plain))
    probe(flat)  # compares with the plain model
    assert isinstance(flat.module.model.layers[1], FusedLayer)
    assert not isinstance(flat.module.model.layers[0], FusedLayer)
    assert counts(flat.module) == (1, 8)
    assert flat.whole is None

    plain = tiny_model(SERVED["llama-gqa"]())
    plain.model.layers[1] = Halved(plain.model.layers[1])
    flat = FlatModel(plain)
    probe(flat)
    assert counts(flat.module) == (1, 8)


class Forgetful(LlamaRMSNorm):  # type: ignore[misc]
    """A norm that multiplies its result by 1.5."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) * 1.5


def test_a_model_with_another_final_norm_runs_its_own_layer_loop() -> None:
    plain = tiny_model(SERVED["llama-gqa"]())
    plain.model.norm.__class__ = Forgetful
    flat = FlatModel(plain)
    probe(flat)
    assert counts(flat.module) == (2, 1)
    assert flat.whole is None


def test_a_product_called_twice_with_different_inputs_is_packed_correctly() -> None:
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = torch.nn.Linear(8, 8)
            self.other = torch.nn.Linear(8, 6, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.other(self.one(self.one(x)))

    module = Twice().eval().requires_grad_(False)
    given = torch.randn(2, 5, 8)
    expected = module(given)
    seen: list[ModuleCall] = []
    hooks = [
        each.register_forward_hook(
            lambda module, args, answer: seen.append(ModuleCall(module, args[0], answer))
        )
        for each in (module.one, module.other)
    ]
    module(given)
    for hook in hooks:
        hook.remove()
    assert pack_products(module, seen, cpu.CpuLayerKernels()) == 2
    assert isinstance(module.one, PackedProduct)
    assert torch.allclose(module(given), expected, atol=1e-6)


def undecided_routers() -> Any:
    """Return a model with so many experts that rounding sends many rows to other experts."""
    many = config(
        "Qwen3MoeConfig",
        **{**EXPERTS, "num_experts": 32, "num_experts_per_tok": 4},
        hidden_size=64,
        num_hidden_layers=4,
        moe_intermediate_size=32,
        head_dim=16,
    )
    return tiny_model(many)


def test_fused_layers_are_accepted_if_rounding_chooses_other_experts() -> None:
    """The compiled layer's error is as large as the module's own error in this precision."""
    plain = undecided_routers()
    rounded = copy.deepcopy(plain).to(torch.bfloat16)
    flat = FlatModel(copy.deepcopy(rounded))
    probe(flat)
    assert flat.form.startswith("layers in C++")
    positions = torch.arange(len(PROMPT))
    torch.manual_seed(0)
    own, ours = [], []  # errors of the rows; those of a single prompt vary too much
    for _ in range(20):
        ids = torch.randint(0, plain.config.vocab_size, (len(PROMPT),))
        with torch.inference_mode():
            exact = plain(input_ids=ids[None]).logits[0]
            own.append((rounded(input_ids=ids[None]).logits[0] - exact).abs().amax(1))
            ours.append(
                (flat.logits(ids, positions, positions, CausalPass()) - exact).abs().amax(1)
            )
    assert float(torch.cat(ours).median()) <= 1.25 * float(torch.cat(own).median())


def test_wrong_experts_are_found_even_if_rounding_may_choose_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward = cpu.CpuLayer.forward

    def wrong(layer: cpu.CpuLayer, *rows: Any) -> torch.Tensor:
        return forward(layer, *rows) * 1.2

    monkeypatch.setattr(cpu.CpuLayer, "forward", wrong)
    with pytest.raises(FusionFailed, match="its logits through our attention differ"):
        probe(FlatModel(undecided_routers().to(torch.bfloat16)))


def test_a_fusion_with_other_logits_is_undone(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fusion may be accepted by mistake. The comparison with the plain model then undoes it."""
    monkeypatch.setattr(match, "activation_of", lambda module: "gelu_tanh")
    monkeypatch.setattr(layers, "TOLERANCE", {torch.float32: 1e9})
    lines: list[str] = []
    model = loader.load(folder_of("llama-gqa"), report=lines.append)
    assert any(line.startswith("layers in torch: its logits") for line in lines)
    assert counts(model.flat.module) == (0, 0)
    assert model.flat.whole is None
    world = World(model)
    turn = world.turn(7)
    world.step((turn, 0, 7, True))
    for _ in range(5):
        world.decode(turn)
    world.executor.close()
    assert largest_gap(plain_model(folder_of("llama-gqa")), turn) <= GAP_MAX


def test_without_the_library_the_model_stays_in_torch(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "available", lambda dtype: False)
    model = load(folder_of("llama-gqa"))
    assert counts(model.flat.module) == (0, 0)
    assert fuse(model.flat, PROMPT, range(len(PROMPT)), int8=False)[:2] == (0, 0)
    assert model.flat.form.startswith("layers in torch: ")


def test_double_precision_is_left_to_torch() -> None:
    flat = flat_model("llama-gqa", torch.float64)
    assert counts(flat.module) == (0, 0)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("family", ["llama-gqa", "gemma", "qwen3-moe", "opt", "gpt2", "gpt-neox"])
def test_int8_weights_stay_within_their_rounding(family: str, dtype: torch.dtype) -> None:
    plain = tiny_model(SERVED[family]()).to(dtype)
    ids, positions = torch.tensor(PROMPT), torch.arange(len(PROMPT))
    exact, rounded = FlatModel(plain), FlatModel(copy.deepcopy(plain))
    probe(exact)
    probe(rounded, int8=True)
    assert counts(rounded.module) == counts(exact.module)
    with torch.inference_mode():
        right, got = (
            flat.logits(ids, positions, positions, CausalPass()).float()
            for flat in (exact, rounded)
        )
    difference = (got - right).abs().amax(1) / (right.max() - right.min())
    assert 1e-4 < float(difference.median()) < 0.1


def test_int8_without_the_library_is_refused(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "available", lambda dtype: False)
    with pytest.raises(UnsupportedModel, match="none of its weights can be int8"):
        load(folder_of("llama-gqa"), int8=True)


class Capped(torch.nn.Module):
    """An LM head whose cap has no effect on small logits."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 15 * torch.tanh(self.inner(x) / 15)


def test_a_cap_on_logits_is_kept() -> None:
    plain = tiny_model(SERVED["llama-gqa"]()).to(torch.bfloat16)
    with torch.no_grad():
        plain.lm_head.weight.mul_(0.01)
    plain.lm_head = Capped(plain.lm_head)
    flat = FlatModel(plain)
    probe(flat)
    assert counts(flat.module)[0] == 2
    assert flat.whole is None


def test_a_norm_that_adds_one_to_large_weights_is_recognised() -> None:
    plain = tiny_model(SERVED["gemma"]()).to(torch.bfloat16)
    norm = plain.model.layers[0].input_layernorm
    with torch.no_grad():
        norm.weight.uniform_(60, 70)
    given = torch.randn(1, 45, norm.weight.shape[0]).to(torch.bfloat16)
    with torch.inference_mode():
        found = match.match_norm(ModuleCall(norm, given, norm(given)))
    assert found is not None
    assert torch.equal(found.weight, 1 + norm.weight.float())


def test_layers_whose_rotations_depend_on_the_layer_type_are_replaced() -> None:
    config = transformers.Gemma3TextConfig(
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 1),
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        layer_types=["full_attention"] * 2,
    )
    flat = FlatModel(tiny_model(config))
    probe(flat)
    assert counts(flat.module) == (2, 1)


def test_a_fusion_that_raises_leaves_the_model_in_torch(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("odd weights")

    monkeypatch.setattr(layers, "match_layer", broken)
    lines: list[str] = []
    model = load(folder_of("llama-gqa"), report=lines.append)
    assert "layers in torch: odd weights" in lines
    assert counts(model.flat.module) == (0, 0)


def test_the_probe_runs_the_layers_that_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = cpu.CpuLayer.forward

    def wrong(layer: cpu.CpuLayer, *rows: Any) -> torch.Tensor:
        return forward(layer, *rows) * 1.2

    monkeypatch.setattr(cpu.CpuLayer, "forward", wrong)
    with pytest.raises(FusionFailed, match="its logits through our attention differ"):
        probe(FlatModel(tiny_model(SERVED["llama-gqa"]())))


def test_int8_supports_head_sizes_that_are_no_multiple_of_four() -> None:
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=30,
        intermediate_size=46,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=6,
        max_position_embeddings=64,
    )
    flat = FlatModel(tiny_model(config))
    probe(flat, int8=True)  # compares with the plain model
    assert counts(flat.module) == (2, 1)
