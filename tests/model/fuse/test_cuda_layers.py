"""GPU layers made of torch operations, here on a CPU, with their kernels on emulated threads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from pensieve.kernels import cuda_launch
from pensieve.kernels.attention import cuda as attention_cuda
from pensieve.kernels.attention.plan import BlocksAtOnce, DevicePlan
from pensieve.kernels.cuda_launch import Launch
from pensieve.kernels.layer import cuda
from pensieve.model import attention, fuse, piecewise_graphs
from pensieve.model.attention import FlatModel, PagedPass
from pensieve.model.fuse.layers import FusedLayer
from pensieve.model.fuse.whole_model import FusedModel
from pensieve.model.loader import LoadedModel, load
from pensieve.model.piecewise_graphs import PiecewiseGraphs
from pensieve.model.probe import probe
from tests.kernels.emulated import needs_x86, run
from tests.model.world import GAP_MAX, Captured, World, largest_gap, plain_model
from tests.models import SERVED

WHOLE = {"llama-mha", "llama-gqa", "mistral", "qwen2", "qwen3", "phi3", "granite", "gemma", "olmo2"}
FolderOf = Callable[[str], Path]


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse, "layer_kernels", lambda device: cuda.CudaLayerKernels())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", SERVED)
def test_every_family_matches_plain_transformers(
    family: str, dtype: torch.dtype, folder_of: FolderOf
) -> None:
    """The probe compares fused layers with the plain model. Then several turns are decoded in one batch."""
    told: list[str] = []
    model = load(folder_of(family), dtype=dtype, report=told.append)
    assert not [line for line in told if "stay as they are" in line]
    layers = [each for each in model.flat.module.modules() if isinstance(each, FusedLayer)]
    assert (len(layers) == model.shape.num_layers) == (family in WHOLE)
    assert (model.flat.whole is not None) == (family in WHOLE)
    if dtype != torch.float32:
        return
    world = World(model)
    first, second = world.turn(7), world.turn(12)
    world.step((first, 0, 7, True), (second, 0, 9, False))
    world.step((second, 9, 12, True))
    for _ in range(5):
        world.decode(first, second)
    world.executor.close()
    plain = plain_model(folder_of(family))
    assert max(largest_gap(plain, turn) for turn in (first, second)) <= GAP_MAX


def models(head_size: int = 64) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_size,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "vocab_size": 128,
        "max_position_embeddings": 512,
    }
    made = {
        "llama": LlamaForCausalLM(LlamaConfig(**sizes)),
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**sizes)),  # with norms of queries and keys
    }
    for each in made.values():  # make the second layer's values larger, but not its results
        attention = each.model.layers[1].self_attn
        attention.v_proj.weight.data *= 64.0
        attention.o_proj.weight.data /= 64.0
    return made


@needs_x86
@pytest.mark.parametrize(("kv_dtype", "gap_max"), [("auto", 2e-2), ("fp8", 5e-2)])
@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_rows_are_rotated_while_they_are_written_to_pages(
    family: str, in_pieces: bool, kv_dtype: str, gap_max: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole GPU layer, with its CUDA kernels on emulated threads."""
    torch.manual_seed(0)
    module = models()[family].to(torch.bfloat16).eval().requires_grad_(False)
    flat = FlatModel(module)
    shape = probe(flat, kv_dtype=kv_dtype)
    assert len(set(shape.kv_exponents)) == (shape.num_layers if kv_dtype == "fp8" else 0)
    assert flat.whole is not None
    model = LoadedModel("tiny", flat, shape, shape.num_heads, frozenset())
    launched: list[str] = []

    def launch(launch: Launch, device: torch.device) -> None:
        launched.append(launch.kernel.name)
        run(launch)

    monkeypatch.setattr(cuda_launch, "launch", launch)
    wholes: list[Any] = []
    made = PagedPass.__init__

    def on_a_gpu(one: PagedPass, batch: Any, memory: Any, *rest: Any, **named: Any) -> None:
        made(one, batch, memory, *rest, **named)
        dtype, scales = memory.shape.dtype, memory.kv_scales
        sizes = (shape.num_heads, shape.num_kv_heads, shape.head_size)
        plan = attention_cuda.plan(batch.lengths, batch.starts, *sizes, BlocksAtOnce(8))
        work = DevicePlan.of(plan, *sizes[1:], "cpu")
        page_index = batch.page_index._replace(shared=None)
        one.paged_rows = cuda.CudaPagedRows(
            memory.device_arena, batch.slot_mapping, page_index, work, dtype, scales
        )
        wholes.append(one)

    monkeypatch.setattr(attention.PagedPass, "__init__", on_a_gpu)
    world = World(model, chunk_tokens=32)
    pieces = None
    if in_pieces:
        monkeypatch.setattr(piecewise_graphs, "attends", lambda memory: True)
        assert isinstance(flat.whole, FusedModel)
        pieces = flat.whole.graphs = PiecewiseGraphs(flat.whole, world.memory, 48, Captured())
        with torch.inference_mode():
            pieces.capture()
        assert not pieces.failure
        launched.clear()
    first, second = world.turn(40), world.turn(7)
    world.step((first, 0, 33, False), (second, 0, 7, True))
    world.step((first, 33, 40, True))
    for _ in range(3):
        world.decode(first, second)
    world.executor.close()
    assert set(launched) == {"rotate_and_write_kv", "multi_token_attention"}
    assert launched.count("rotate_and_write_kv") == 5 * shape.num_layers
    if pieces is not None:
        assert pieces.rows_padded == (48 - 40) + (8 - 7), "40 rows, 7, and three times 2"
    torch.manual_seed(0)
    plain = models()[family].to(torch.bfloat16).eval()
    for turn in (first, second):
        with torch.inference_mode():
            logits = plain(input_ids=torch.tensor([list(turn.tokens)])).logits[0].float()
        before, sampled = (
            logits[turn.prompt_end - 1 : -1],
            torch.tensor(turn.tokens[turn.prompt_end :]),
        )
        gap = before.amax(1) - before.gather(1, sampled.long()[:, None])[:, 0]
        assert float((gap / (before.amax(1) - before.amin(1))).max()) <= gap_max
