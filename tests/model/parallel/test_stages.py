"""Stages of a pipeline, each with its own layers and KV, together compute the same as the whole model."""

from __future__ import annotations

import os
import signal
from array import array
from collections import deque
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from pensieve.core.constraint import Constraint, ConstraintKind
from pensieve.core.iteration import Iteration, Slice
from pensieve.engine.messages import CheckIntegrity
from pensieve.errors import ConfigError, DeviceError, UnsupportedModel
from pensieve.model.forward import Forward
from pensieve.model.kv.copier import copier_for
from pensieve.model.kv.memory import KVMemory
from pensieve.model.layer_range import divide_layers, number_from_zero
from pensieve.model.loader import load
from pensieve.model.parallel.executor import StagedExecutor
from pensieve.model.parallel.rank_messages import packed
from pensieve.model.parallel.rank_store import RankStore
from pensieve.model.parallel.ranks import Rank
from pensieve.model.parallel.stages import StageModel
from pensieve.sampling import Sampling
from tests.conversations.in_process import Runtime
from tests.conversations.rig import Crowd, Reference, ask, figures, query, started, write_model
from tests.model.parallel.test_parallel import sent
from tests.model.world import CHUNK_TOKENS, GAP_MAX
from tests.models import DEEP, save_tiny
from tests.text.families import QWEN_2_5

FolderOf = Callable[[str], Path]
NUM_PAGES = 8

pytestmark = pytest.mark.timeout(1200)


# -- how layers are divided --


def ranges(num_layers: int, num_stages: int, head_layers: float) -> list[tuple[int, int]]:
    return [
        (each.first, each.stop)
        for each in divide_layers(num_layers, num_stages, Fraction(head_layers))
    ]


def test_layers_are_divided_by_the_bytes_that_each_stage_reads() -> None:
    assert ranges(4, 1, 9) == [(0, 4)]
    assert ranges(4, 2, 0) == [(0, 2), (2, 4)]
    assert ranges(7, 3, 0) == [(0, 2), (2, 4), (4, 7)]  # 2, 2 and 3 layers, in any order
    assert ranges(30, 2, 8) == [(0, 19), (19, 30)]
    assert ranges(12, 3, 2.5) == [(0, 5), (5, 10), (10, 12)]
    assert ranges(3, 3, 9) == [(0, 1), (1, 2), (2, 3)]  # every stage has at least one layer


class Alone(Rank):
    """A rank whose other ranks are in this process."""

    def wait_until_all_loaded(self) -> None:
        raise AssertionError("stages load without waiting for each other")

    def store(self) -> RankStore:
        raise AssertionError("they are in no group")


class MemoryLinks:
    """Links between stages of one process: the next stage receives what a stage sends."""

    def __init__(self) -> None:
        self._sent: deque[torch.Tensor] = deque()

    def receive(self, num_tokens: int) -> torch.Tensor:
        (activations,) = self._sent
        self._sent.clear()
        assert activations.shape[1] == num_tokens
        return activations

    def send(self, activations: torch.Tensor) -> None:
        self._sent.append(activations)


class InOneProcess:
    """All stages of a model, each with pages for its own layers."""

    def __init__(self, folder: Path, num_stages: int) -> None:
        links: Any = MemoryLinks()
        self.models = [
            load(folder, rank=Alone((stage + 1) % num_stages, num_stages, num_stages))
            for stage in range(num_stages)
        ]
        self.forwards = []
        for model in self.models:
            assert isinstance(model.flat, StageModel)
            model.flat._links = links
            memory = KVMemory(model.shape, NUM_PAGES, 0, CHUNK_TOKENS)
            memory.device_arena.fill_(float("nan"))
            self.forwards.append(Forward(model.flat, memory, copier_for(memory), may_halve=False))

    @torch.inference_mode()
    def logits(self, slices: list[Slice]) -> torch.Tensor:
        *_, last = [each.run(slices).logits for each in self.forwards]
        return last


def pieces(tokens: list[int], cuts: list[int]) -> list[Slice]:
    pages = array("i", reversed(range(NUM_PAGES)))
    ids = array("I", tokens)
    return [
        Slice(1, start, stop, ids[start:stop], pages, True)
        for start, stop in zip([0, *cuts], [*cuts, len(tokens)], strict=True)
    ]


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "opt", "gemma", "qwen3-moe", "gpt-neox"])
def test_two_stages_compute_the_same_logits_as_the_whole_model(
    family: str, folder_of: FolderOf
) -> None:
    """Families differ in tied embeddings, position tables, embedding factors, experts and norms."""
    folder = folder_of(family)
    parts = InOneProcess(folder, 2)
    reference = Reference(folder)
    tokens = [(7 * i) % 90 + 3 for i in range(21)]
    for piece in pieces(tokens, [5, 6, 14]):
        (row,) = parts.logits([piece])
        expected = reference.logits(tokens[: piece.stop])[-1].detach()
        span = float(expected.max() - expected.min())
        assert float((row - expected).abs().max()) <= GAP_MAX * span


def test_a_stage_loads_only_its_own_layers(tmp_path: Path) -> None:
    for kind, copies in (("deep", 0), ("deep-tied", 1)):
        folder = save_tiny(DEEP[kind](), tmp_path / kind)
        whole = load(folder)
        table = 128 * 32  # the embeddings; if they are tied, the last stage has a copy
        shapes = [each.shape for each in InOneProcess(folder, 3).models]
        assert [each.num_layers for each in shapes] == ([2, 2, 1] if kind == "deep" else [2, 1, 1])
        norms = 2 * 32  # each stage also has the final norm, which is small
        got = sum(each.num_parameters for each in shapes)
        assert got == whole.shape.num_parameters + norms + copies * table
        assert {each.kv_bytes_per_token // each.num_layers for each in shapes} == {
            whole.shape.kv_bytes_per_token // whole.shape.num_layers
        }


def test_a_model_that_depends_on_layer_numbers_is_not_divided() -> None:
    class Layer(torch.nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.layer_idx = number

    class Output:
        def __init__(self, logits: torch.Tensor) -> None:
            self.logits = logits

    class Model(torch.nn.Module):
        device = torch.device("cpu")
        matters = False

        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([Layer(3), Layer(4)])

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Output:
            factor = self.layers[0].layer_idx if self.matters else 1
            return Output(input_ids * factor)  # type: ignore[operator]

    model = Model()
    number_from_zero(model, list(model.layers), 3)
    assert [each.layer_idx for each in model.layers] == [0, 1]
    model = Model()
    model.matters = True
    with pytest.raises(UnsupportedModel, match="depend on their numbers"):
        number_from_zero(model, list(model.layers), 3)


# -- ranks --


def test_a_packed_iteration_has_its_tokens_where_the_first_stage_needs_them() -> None:
    tokens = array("I", range(50, 59))
    slices = (
        Slice(7, 4, 7, tokens[4:7], array("i", [5, 2])),
        Slice(8, 0, 3, tokens[:3], array("i", [1]), True),
    )
    got = sent(Iteration(3, slices), with_tokens=True)
    assert [each.token_ids.tolist() for each in got.slices] == [[54, 55, 56], [50, 51, 52]]
    assert [each.stop for each in got.slices] == [7, 3]
    awaited = Slice(7, 4, 7, tokens[4:6], array("i", [5, 2]), True)
    with pytest.raises(AssertionError, match="not known yet"):
        packed(Iteration(4, (awaited,)), with_tokens=True)


@pytest.mark.parametrize(
    ("num_stages", "num_shards"),
    [(2, 1), (3, 1), pytest.param(2, 2, marks=pytest.mark.full)],  # four processes
)
def test_a_whole_engine_in_stages_is_exact(
    tmp_path: Path, num_stages: int, num_shards: int
) -> None:
    """Every reply equals the reply of plain transformers.

    Chunks are swapped, dropped and recomputed. Turns are suspended and cancelled. Conversations are forked
    and rewound. As many iterations are in flight as there are stages.
    """
    folder = write_model(tmp_path / "model", QWEN_2_5, "deep")
    settings = {"pipeline_stages": str(num_stages), "check_kv": "on"}
    settings["tensor_parallel"] = str(num_shards)
    with started(folder, tmp_path / "data", **settings) as runtime:
        executor = runtime.engine.executor
        assert isinstance(executor, StagedExecutor)
        deepest = watched(executor)
        crowd = Crowd(runtime, seed=4, size=16)
        crowd.run(40)
        crowd.rush()
        now = figures(runtime)
        assert query(runtime, CheckIntegrity(2)).problems == ()
        for name in (
            "chunks_swapped_out",
            "chunks_swapped_in",
            "chunks_dropped",
            "chunks_copied_on_write",
            "suspensions",
            "recomputed_tokens",
        ):
            assert now[name], f"never happened: {name}"
        reference = Reference(folder)
        counts = [reference.wrong_tokens(runtime, name) for name in crowd.names]
    sampled, wrong, _ = (sum(column) for column in zip(*counts, strict=True))
    assert sampled > 700
    assert wrong == 0
    assert deepest == [num_stages]


def watched(executor: StagedExecutor) -> list[int]:
    """Return a list with one number: the most iterations in flight from now on."""
    deepest = [0]
    launch = executor.launch

    def noting(iteration: Iteration) -> None:
        launch(iteration)
        deepest[0] = max(deepest[0], len(executor._launched))

    executor.launch = noting  # type: ignore[method-assign]
    return deepest


def test_stages_apply_constraints_seeds_and_logprobs_like_one_rank(tmp_path: Path) -> None:
    """Rank 0 has everything that is needed to draw a token, as without stages."""
    folder = write_model(tmp_path / "model", QWEN_2_5, "deep-tied")
    said = []
    for num_stages in ("2", "1"):
        data = tmp_path / f"data{num_stages}"
        with started(folder, data, pipeline_stages=num_stages) as runtime:
            said.append(replies(runtime))
    for one, other in zip(*said, strict=True):
        assert one[:2] == other[:2]
        assert one[2] == pytest.approx(other[2], abs=1e-3)
    assert said[0][0][0] in ("rain", "fine weather")


@pytest.mark.parametrize("num_shards", ["1", "2"])
def test_stages_use_the_fp8_scales_of_the_whole_model(tmp_path: Path, num_shards: str) -> None:
    folder = write_model(tmp_path / "model", QWEN_2_5, "deep")
    whole = load(folder, kv_dtype="fp8").shape.kv_exponents
    settings = {"kv_dtype": "fp8", "tensor_parallel": num_shards, "pipeline_stages": "2"}
    with started(folder, tmp_path / "data", **settings) as runtime:
        executor = runtime.engine.executor
        assert isinstance(executor, StagedExecutor)
        last = executor._own._forward._memory.shape.kv_exponents
        staged = replies(runtime)
    num_heads = len(last[0][0])
    assert list(last) == [
        (keys[:num_heads], values[:num_heads]) for keys, values in whole[-len(last) :]
    ]
    with started(folder, tmp_path / "plain", kv_dtype="fp8") as runtime:
        assert [each[:2] for each in replies(runtime)] == [each[:2] for each in staged]


def replies(runtime: Runtime) -> list[tuple[str, list[int], list[float]]]:
    choice = Constraint(ConstraintKind.CHOICE, '["rain", "fine weather"]')
    found = []
    for name, sampling, constraint in (
        ("a", Sampling(max_tokens=12), choice),
        ("b", Sampling(max_tokens=20, temperature=0.9, seed=7, ignore_eos=True), None),
        ("c", Sampling(max_tokens=20, logprobs=2, ignore_eos=True), None),
    ):
        runtime.conversations.create(name)
        turn = ask(runtime, name, "Oslo", sampling=sampling, constraint=constraint)
        *_, reply = runtime.store.messages(name, include_token_ids=True)
        chosen = [
            turn.reply.logprobs[index][0]
            for index in range(len(turn.reply.token_ids) * (name == "c"))
        ]
        found.append((reply.content, list(reply.token_ids or ()), chosen))
    return found


@pytest.mark.parametrize("victim", [0, 1])
def test_a_dead_stage_ends_the_engine(tmp_path: Path, victim: int) -> None:
    """The first stage dies, or the middle one, whose end the first stage does not notice directly."""
    folder = write_model(tmp_path / "model", QWEN_2_5, "deep")
    with started(folder, tmp_path / "data", pipeline_stages="3") as runtime:
        runtime.conversations.create("a")
        turn = runtime.conversations.send("a", "Oslo", sampling=Sampling(max_tokens=200))
        for _ in range(5):
            assert runtime.engine.step()
        executor = runtime.engine.executor
        assert isinstance(executor, StagedExecutor)
        os.kill(executor._leader.pids[victim], signal.SIGKILL)
        with pytest.raises(DeviceError, match=r"rank \d (ended|failed)"):  # noqa: PT012
            while turn.finish is None:
                assert runtime.engine.step()


def test_invalid_stages_are_refused_at_the_start(tmp_path: Path) -> None:
    folder, data = write_model(tmp_path / "model", QWEN_2_5, "deep"), tmp_path / "data"
    with pytest.raises(UnsupportedModel, match="it has 5 layers, so use at most 5 stages"):
        started(folder, data, pipeline_stages="6")
    with pytest.raises(ConfigError, match="needs --stream auto or off"):
        started(folder, data, pipeline_stages="2", stream="on")
