"""The executor's GPU code, run on fake tensors that have a device but no values.

Torch's fake tensors know shapes, types and devices. An operation on tensors of two devices raises, and so
does any attempt to read a value from the device. The tests show that `launch` never waits for the device,
that all its inputs are on the device, and which kernels it launches. They do not show what kernels compute.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from transformers import LlamaConfig, LlamaForCausalLM

from pensieve.core.iteration import (
    Iteration,
    PageCopy,
    PageGroup,
    SampledToken,
    SwapIn,
    SwapOut,
    TurnStart,
)
from pensieve.core.turn import Turn, TurnOptions
from pensieve.kernels import batched_copy, cuda_launch
from pensieve.kernels.attention import cuda, tensor_map
from pensieve.kernels.attention.plan import BlocksAtOnce, Plan
from pensieve.kernels.batched_copy import Pieces
from pensieve.kernels.cuda_launch import Launch
from pensieve.kernels.layer.cuda import CudaLayerKernels
from pensieve.model import attention, fuse, transfer
from pensieve.model.attention import FlatModel
from pensieve.model.executor import TorchExecutor
from pensieve.model.free_memory import widest
from pensieve.model.fuse.whole_model import FusedModel
from pensieve.model.graphs import DecodeGraphs
from pensieve.model.kv import copier, host_arena
from pensieve.model.kv.memory import GroupMoves, KVMemory, PageMoves
from pensieve.model.loader import LoadedModel
from pensieve.model.piecewise_graphs import PiecewiseGraphs
from pensieve.model.probe import probe
from pensieve.model.sampling.sampler import Drawn, Sampler
from pensieve.model.shape import ModelShape
from pensieve.sampling import Sampling
from tests.compiled import compiled
from tests.model.kv.streams import FakeStreams
from tests.model.world import Captured, letter_tokenizer, slice_of, start_of

DEVICE = torch.device("cuda", 0)
SHAPE = ModelShape(2, 4, 2, 64, 100, 512, torch.bfloat16, 0, 0)
EVERYTHING = Sampling(
    temperature=0.8,
    top_k=5,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.2,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias=((3, 1.0),),
    min_tokens=4,
    logprobs=2,
)


# Some operations ask for a device guard, which a torch without CUDA lacks. This guard does nothing.
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
namespace {
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}
"""


@pytest.fixture(scope="module")
def guard() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU; the real one is tested")
    home = Path(torch.__file__).parent
    command = [
        *("g++", "-std=c++20", "-shared", "-fPIC", f"-I{home / 'include'}", f"-L{home / 'lib'}"),
        *(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",),
        *("-Wl,--no-as-needed", "-lc10"),
        f"-DTORCH={torch.__version__}",
    ]
    ctypes.CDLL(str(compiled(command, GUARD)))


class Pretended:
    """A simulated GPU on which only the shapes are real."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, mode: FakeTensorMode) -> None:
        self.launched: list[tuple[str, Launch]] = []  # name of the stream, launch
        self.streams = FakeStreams(0)
        self.mode = mode
        # In-place forms of these need kernels of the device. Use the other form and a copy instead.
        for name in ("index_copy", "index_add", "index_fill", "scatter", "scatter_add"):
            function = getattr(torch.Tensor, name)

            def in_place(tensor: torch.Tensor, *rest: Any, _do: Any = function) -> torch.Tensor:
                return tensor.copy_(_do(tensor, *rest))

            monkeypatch.setattr(torch.Tensor, name + "_", in_place)
        monkeypatch.setattr(cuda_launch, "launch", self.launch)
        monkeypatch.setattr(cuda, "pointers", self.pointers)
        monkeypatch.setattr(FakeTensor, "data_ptr", lambda tensor: id(tensor) * 16, raising=False)
        monkeypatch.setattr(tensor_map, "map_of", lambda pages: 16)
        monkeypatch.setattr(
            cuda,
            "_blocks_at_once",
            lambda device, head_size, hopper: BlocksAtOnce(264, 132),
        )
        monkeypatch.setattr(cuda_launch, "multiprocessors", lambda device: 132)
        monkeypatch.setattr(cuda_launch, "architecture", lambda index=0: "sm_90a")
        monkeypatch.setattr(
            host_arena,
            "allocate",
            lambda count, size, device, report: torch.empty(count * size, dtype=torch.uint8),
        )
        monkeypatch.setattr(copier, "TorchStreams", lambda device: self.streams)
        monkeypatch.setattr(transfer, "upload", self.upload)
        for module in (
            "pensieve.model.batch.upload",
            "pensieve.model.kv.memory.upload",
            "pensieve.model.graphs.upload",
            "pensieve.model.sampling.draw.upload",
            "pensieve.model.sampling.penalties.upload",
        ):
            monkeypatch.setattr(module, self.upload)
        monkeypatch.setattr("pensieve.model.sampling.sampler.ReadBack", UnknownReadback)
        monkeypatch.setattr(
            Drawn,
            "read",
            lambda drawn: [SampledToken(row.log.attempt_id, 0) for row in drawn._rows],
        )
        monkeypatch.setattr(PageMoves, "_of", really(PageMoves._of))
        monkeypatch.setattr(PageMoves, "in_pieces", really(PageMoves.in_pieces))
        monkeypatch.setattr(GroupMoves, "of", really(GroupMoves.of))
        monkeypatch.setattr(  # the real function reads the host's values
            "pensieve.model.sampling.penalties._ids_of",
            lambda tokens, like: torch.empty(len(tokens), dtype=torch.int64, device=like.device),
        )

    def upload(self, values: torch.Tensor, device: torch.device) -> torch.Tensor:
        assert values.device.type == "cpu"
        if device.type == "cpu":
            return values
        return torch.empty(values.shape, dtype=values.dtype, device=device)

    def pointers(self, *tensors: torch.Tensor) -> tuple[tuple[str, int], ...]:
        for tensor in tensors:
            on_host = tensor.device.type == "cpu" and tensor.dim() == 5  # a layer of the host tier
            assert on_host or tensor.device == DEVICE, f"{tensor.shape} is on {tensor.device}"
        return tuple(("p", 16) for _ in tensors)

    def launch(self, launch: Launch, device: torch.device) -> None:
        assert device == DEVICE
        stream = {
            id(self.streams.compute): "compute",
            id(self.streams.swap_in): "swap_in",
            id(self.streams.swap_out): "swap_out",
            id(self.streams.staging): "staging",
        }[id(self.streams.current)]
        self.launched.append((stream, launch))

    def take(self) -> list[tuple[str, str]]:
        """Return the launches since the last call: (stream, kernel) of each."""
        told = [(stream, launch.kernel.name) for stream, launch in self.launched]
        self.launched.clear()
        return told


class Unreplayed(Captured):
    """Graphs whose replay launches nothing here."""

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        compute()
        return lambda: None


class UnknownReadback:
    """A read-back whose values are unknown."""

    def __init__(self, values: torch.Tensor) -> None:
        assert values.device == DEVICE


def really(function: Any) -> Any:
    """Wrap a function that must run on real tensors, because it computes on the host."""

    def called(*arguments: Any) -> Any:
        with unset_fake_temporarily():
            return function(*arguments)

    return called


@pytest.fixture
def gpu(guard: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretended]:
    attention.register()
    with torch.inference_mode(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield Pretended(monkeypatch, mode)


def flat_on(gpu: Pretended, fused: bool) -> FlatModel:
    """Return a model on the device. With `fused`, its layers are replaced as the loader does on a GPU."""
    with unset_fake_temporarily(), torch.inference_mode(False):
        config = LlamaConfig(
            hidden_size=256,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            intermediate_size=128,
            num_hidden_layers=2,
            vocab_size=100,
            max_position_embeddings=512,
        )
        module = LlamaForCausalLM(config).to(torch.bfloat16).eval().requires_grad_(False)
        flat = FlatModel(module)
        if not fused:
            module.set_attn_implementation(attention.SERVING)
        else:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(fuse, "layer_kernels", lambda device: CudaLayerKernels())
                probe(flat)
            assert flat.whole is not None
    move(module)
    if isinstance(flat.whole, FusedModel):
        dense: list[Any] = [layer.dense for layer in flat.whole.layers]
        head: Any = flat.whole._head
        norm: Any = flat.whole._norm
        products = [head, *(each for layer in dense for each in layer._products)]
        norms = [norm, *(each for layer in dense for each in layer._norms.values())]
        for product in products:
            product.matrix = on_device(product.matrix)
        for norm in norms:
            norm.weight = on_device(norm.weight)
            norm._in_type = {
                dtype: None if each is None else on_device(each)
                for dtype, each in norm._in_type.items()
            }
    return flat


def executor_on(
    gpu: Pretended,
    graphs: bool = False,
    fused: bool = False,
    shape: ModelShape = SHAPE,
    staging_pages: int = 0,
) -> tuple[TorchExecutor, KVMemory]:
    model = LoadedModel("pretended", flat_on(gpu, fused), shape, 4, frozenset())
    memory = KVMemory(shape, 40, 20, 32, DEVICE, staging_pages=staging_pages)
    assert memory.host_arena.shape[1] == 20
    made = None
    if graphs:
        made = DecodeGraphs(model.flat, memory, 8, Unreplayed())
        with torch.inference_mode():
            made.capture()
        assert not made.failure
        if fused:
            assert isinstance(model.flat.whole, FusedModel)
            pieces = PiecewiseGraphs(model.flat.whole, memory, 64, Unreplayed())
            pieces.capture()
            assert not pieces.failure
            model.flat.whole.graphs = pieces
        gpu.take()
    sampler = Sampler(SHAPE.vocab_size)
    return TorchExecutor(model, memory, sampler, letter_tokenizer(), graphs=made), memory


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=DEVICE)


def move(module: torch.nn.Module) -> None:
    """Move the module to the device in place. `Module.to` swaps tensors, which fake tensors do not allow."""
    for each in module.modules():
        for name, parameter in list(each.named_parameters(recurse=False)):
            moved = on_device(parameter)
            each._parameters[name] = torch.nn.Parameter(moved, requires_grad=False)
        for name, buffer in list(each.named_buffers(recurse=False)):
            each._buffers[name] = on_device(buffer)


def turn_of(index: int, num_tokens: int, pages: list[int], sampling: Sampling) -> Turn:
    tokens = array("I", [7] * num_tokens)
    turn = Turn(index, "c", tokens, 0, num_tokens, num_tokens + 50, TurnOptions(sampling))
    turn.page_table = array("i", pages)
    return turn


def starts(*turns: Turn) -> tuple[TurnStart, ...]:
    return tuple(start_of(turn) for turn in turns)


def layers(*kernels: str) -> list[tuple[str, str]]:
    return [("compute", name) for _ in range(SHAPE.num_layers) for name in kernels]


PLAIN = Sampling(ignore_eos=True)
# The launches of a fused layer, besides torch's products and norms.
ATTENDING = ("rotate_and_write_kv", "multi_token_attention")
BETWEEN_PRODUCTS = ("add_and_norm", "gate_and_multiply")


def test_launching_reads_nothing_from_the_device(gpu: Pretended) -> None:
    """Prefill, decode and a token that only the device knows, at depth 2, with every sampling option."""
    executor, _ = executor_on(gpu)
    assert executor.depth == 2
    first = turn_of(0, 40, [3, 1], EVERYTHING)
    second = turn_of(1, 150, [5, 6, 7, 8, 9], PLAIN)
    third = turn_of(2, 5, [11], Sampling(temperature=1.0, seed=1, ignore_eos=True))
    slices = (
        slice_of(first, 0, 40, True, 32),
        slice_of(second, 0, 150, False, 32),
        slice_of(third, 0, 5, True, 32),
    )
    executor.launch(Iteration(0, slices, started=starts(first, second, third)))
    narrow_and_wide = ("write_kv", "multi_token_attention", "multi_token_attention")
    drawn = ("compute", "draw_tokens")  # one launch for all rows with a temperature
    assert gpu.take() == [*layers(*narrow_and_wide), drawn]
    ahead = (slice_of(first, 40, 41, True, 32), slice_of(third, 5, 6, True, 32))
    executor.launch(Iteration(1, ahead))
    assert gpu.take() == [*layers("write_kv", "multi_token_attention"), drawn]
    outcome = executor.collect()
    assert [sample.attempt_id for sample in outcome.samples] == [0, 2]
    assert not outcome.failures
    executor.close()


@pytest.mark.parametrize("graphs", [False, True])
def test_fused_layers_rotate_rows_while_they_write_pages(gpu: Pretended, graphs: bool) -> None:
    executor, _ = executor_on(gpu, graphs, fused=True)
    first, second = turn_of(0, 40, [3, 1], EVERYTHING), turn_of(1, 20, [5], PLAIN)
    slices = (slice_of(first, 0, 40, True, 32), slice_of(second, 0, 20, False, 32))
    executor.launch(Iteration(0, slices, started=starts(first, second)))
    drawn = ("compute", "draw_tokens")
    eager = layers(*ATTENDING, *BETWEEN_PRODUCTS)
    rest = [("compute", name) for name in BETWEEN_PRODUCTS]  # last layer: only rows to sample from
    in_pieces = [*layers("multi_token_attention"), *rest]
    assert gpu.take() == [*(in_pieces if graphs else eager), drawn]
    executor.launch(Iteration(1, (slice_of(first, 40, 41, True, 32),)))
    assert gpu.take() == [*([] if graphs else eager), drawn]
    assert [sample.attempt_id for sample in executor.collect().samples] == [0]
    third = turn_of(2, 70, [6, 7, 8], PLAIN)
    executor.launch(Iteration(2, (slice_of(third, 0, 70, False, 32),), started=starts(third)))
    kernels = [name for _, name in gpu.take()]
    assert kernels.count("rotate_and_write_kv") == SHAPE.num_layers, "too many tokens for a piece"
    assert executor.rows_padded == (4 if graphs else 0), "60 tokens in a piece for 64"
    executor.close()


@pytest.mark.parametrize("graphs", [False, True])
def test_kv_in_fp8_uses_fp8_kernels_and_reads_nothing_from_the_device(
    gpu: Pretended, graphs: bool
) -> None:
    """Run wide slices (Hopper's own kernel does not support fp8), a decode and a page of the host tier."""
    shape = replace(SHAPE, kv_dtype="fp8", kv_exponents=(((0, 1), (2, 3)),) * SHAPE.num_layers)
    executor, memory = executor_on(gpu, graphs, fused=True, shape=shape)
    assert memory.page_bytes == SHAPE.kv_bytes_per_page(32) // 2
    first, second = turn_of(0, 150, list(range(5)), PLAIN), turn_of(1, 40, [8, 9], PLAIN)
    slices = (slice_of(first, 0, 150, True, 32), slice_of(second, 32, 40, True, 32))
    swap_ins = (SwapIn(1, 4, 8, 32),)
    executor.launch(Iteration(0, slices, (), swap_ins, started=starts(first, second)))
    kernels = {launch.kernel for stream, launch in gpu.launched if stream == "compute"}
    each_layer = layers(*ATTENDING, "merge_parts", *BETWEEN_PRODUCTS)
    assert gpu.take() == [("swap_in", "copy_pages")] * SHAPE.num_layers + each_layer
    for_bytes = {each.source for each in kernels if "STORED=E4m3" in each.defines}
    assert for_bytes == {"write_kv.cu", "multi_token_attention.cu"}
    assert {each.source for each in kernels} == for_bytes | {"merge_parts.cu", "fused_rows.cu"}
    executor.launch(Iteration(1, (slice_of(first, 150, 151, True, 32),)))
    eager = layers(*ATTENDING, *BETWEEN_PRODUCTS)
    assert gpu.take() == ([] if graphs else eager)
    assert len(executor.collect().samples) == 2
    executor.close()


def test_a_long_context_is_cut_and_merged_in_every_layer(gpu: Pretended) -> None:
    executor, _ = executor_on(gpu)
    turn = turn_of(0, 500, list(range(16)), PLAIN)
    executor.launch(Iteration(0, (slice_of(turn, 499, 500, True, 32),), started=starts(turn)))
    assert gpu.take() == layers("write_kv", "multi_token_attention", "merge_parts")
    executor.close()


@pytest.mark.parametrize("graphs", [False, True])
def test_shared_pages_are_attended_to_once(
    gpu: Pretended, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU is small enough to be busy, so the plan packs the shared pages. Nothing is waited for."""
    monkeypatch.setattr(cuda, "_blocks_at_once", lambda *rest: BlocksAtOnce(2, 1))
    planned: list[Plan] = []
    plan = cuda.plan
    monkeypatch.setattr(cuda, "plan", lambda *given: (planned.append(plan(*given)), planned[-1])[1])
    executor, _ = executor_on(gpu, graphs)
    turns = [turn_of(index, 230, [*range(7), 10 + index], PLAIN) for index in range(6)]
    slices = tuple(slice_of(turn, 229, 230, True, 32) for turn in turns)
    executor.launch(Iteration(0, slices, started=starts(*turns)))
    eager = layers("write_kv", "multi_token_attention", "merge_parts")
    assert gpu.take() == ([] if graphs else eager)
    assert sorted(planned[-1].pack_rows) == list(range(12)), "two heads of each turn"
    assert len(executor.collect().samples) == 6
    executor.close()


def test_pages_move_on_separate_streams(gpu: Pretended) -> None:
    executor, _ = executor_on(gpu)
    turn = turn_of(0, 40, [3, 1], PLAIN)
    slices = (slice_of(turn, 32, 40, True, 32),)
    ins, copies = (SwapIn(1, 4, 3, 32),), (PageCopy(9, 1, 5),)
    executor.launch(Iteration(0, slices, copies, ins, started=starts(turn)))
    told = gpu.take()
    assert told[: SHAPE.num_layers] == [("swap_in", "copy_pages")] * SHAPE.num_layers
    expected = ("copy_pages", "write_kv", "multi_token_attention")
    assert told[SHAPE.num_layers :] == layers(*expected)
    assert executor.collect().finished_copies in ((), (1,))
    executor.launch(Iteration(1, (), (), (), (SwapOut(2, 3, 5, 32),)))
    finished = executor.collect().finished_copies
    assert 1 in finished or 2 in finished
    while 2 not in finished:
        executor.launch(Iteration(2, ()))
        finished = executor.collect().finished_copies
    assert gpu.take() == [("swap_out", "copy_pages")] * SHAPE.num_layers
    executor.close()


@pytest.mark.parametrize("fused", [False, True])
def test_streamed_turns_are_loaded_attended_to_and_stored_group_by_group(
    gpu: Pretended, fused: bool
) -> None:
    """This also holds if all slices are decodes: graphs do not run them."""
    executor, _ = executor_on(gpu, graphs=True, fused=fused, staging_pages=6)
    resident = turn_of(0, 40, [3, 1], PLAIN)
    streamed = [turn_of(1 + index, 40, [0, 1], PLAIN) for index in range(3)]
    slices = tuple(slice_of(turn, 39, 40, True, 32) for turn in (resident, *streamed))
    groups = tuple(
        PageGroup(1 + i, 2 + i, *(array("i", each) for each in ([2 * i, 2 * i + 1], [32, 7], last)))
        for i, last in enumerate(([0, 8], [0, 8], [0, 0]))
    )
    executor.launch(Iteration(0, slices, started=starts(resident, *streamed), groups=groups))
    told = gpu.take()
    on_compute = ("write_kv", "multi_token_attention") * (1 + len(groups))
    between = BETWEEN_PRODUCTS if fused else ()
    assert [each for each in told if each[0] == "compute"] == layers(*on_compute, *between)
    num_copies = SHAPE.num_layers * (3 + 2)  # three groups load, but the last group stores nothing
    assert [each for each in told if each[0] != "compute"] == [
        ("staging", "copy_pages")
    ] * num_copies
    assert told[:2] == [("staging", "copy_pages")] * 2, (
        "two arenas are loaded before anything is computed"
    )
    executor.launch(Iteration(1, slices[:1]))
    assert [len(executor.collect().samples) for _ in range(2)] == [4, 1]
    executor.close()


def test_swaps_use_the_batched_copy_of_the_driver_instead_of_a_kernel(
    gpu: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call a layer on the swap-in stream. Copies within the device still use the kernel."""
    monkeypatch.setattr("pensieve.model.kv.memory.copies_batches", lambda device, page_bytes: True)
    told: list[tuple[list[int], bool]] = []

    def current_stream(device: torch.device) -> Any:
        return SimpleNamespace(cuda_stream=id(gpu.streams.current))

    def copy_pieces(pieces: Pieces, source: Any, target: Any, stream: int) -> None:
        assert (source.device.type, target.device.type) == ("cpu", "cuda")
        told.append((pieces.sizes.tolist(), stream == id(gpu.streams.swap_in)))

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(batched_copy, "copy_pieces", really(copy_pieces))
    executor, memory = executor_on(gpu)
    page_bytes = memory.page_bytes // SHAPE.num_layers
    pages = ((3, 13, 32), (4, 14, 32), (7, 9, 32), (8, 11, 5))
    swap_ins = tuple(SwapIn(index, *each) for index, each in enumerate(pages))
    executor.launch(Iteration(0, (), (PageCopy(9, 1, 5),), swap_ins))
    sizes = [2 * page_bytes, page_bytes, *[5 * 64 * 2] * 4]
    assert told == [(sizes, True)] * SHAPE.num_layers
    assert gpu.take() == layers("copy_pages")
    assert executor.collect().finished_copies == (0, 1, 2, 3)
    executor.close()


def test_decoding_replays_a_graph(gpu: Pretended) -> None:
    """Only the copies into the graph's tensors run. A mixed iteration runs layer by layer."""
    executor, _ = executor_on(gpu, graphs=True)
    turns = [turn_of(index, 40 + index, [2 * index, 2 * index + 1], PLAIN) for index in range(3)]
    decodes = tuple(
        slice_of(turn, len(turn.tokens) - 1, len(turn.tokens), True, 32) for turn in turns
    )
    executor.launch(Iteration(0, decodes, started=starts(*turns)))
    assert gpu.take() == []
    executor.launch(Iteration(1, (slice_of(turns[0], 0, 8, False, 32),)))
    assert gpu.take() == layers("write_kv", "multi_token_attention")
    assert len(executor.collect().samples) == 3
    executor.close()


def test_the_widest_batch_has_the_given_tokens_and_turns() -> None:
    for num_tokens, turns_max in ((512, 64), (64, 64), (1, 1), (300, 1)):
        slices, num_pages = widest(num_tokens, turns_max, 1000, 32)
        assert sum(piece.stop - piece.start for piece in slices) == num_tokens
        assert len(slices) == turns_max
        pages = [page for piece in slices for page in piece.page_table]
        assert pages == list(range(num_pages))
        assert all(piece.needs_token for piece in slices)
