"""The executor's contract: what an iteration does, what it reports, and that failures affect one turn."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pensieve.core.iteration import Iteration, PageCopy, SwapIn, SwapOut, TurnStart
from pensieve.errors import DeviceError
from pensieve.kernels.layer import cpu as dense
from pensieve.kernels.layer.cpu import CpuPackedWeights
from pensieve.model.kv.memory import KVMemory, PageMoves
from pensieve.model.loader import LoadedModel, load
from pensieve.sampling import Sampling
from tests.model.world import CHUNK_TOKENS, GAP_MAX, World, largest_gap, plain_model

FolderOf = Callable[[str], Path]
Loaded = Callable[[str], LoadedModel]


@pytest.fixture
def world(loaded: Loaded) -> Iterator[World]:
    world = World(loaded("llama-gqa"))
    yield world
    world.executor.close()


def test_only_slices_that_need_a_token_are_sampled(world: World) -> None:
    turn, warm = world.turn(6), world.turn(5, warm=True)
    outcome = world.step((turn, 0, 4, False), (warm, 0, 5, False))
    assert outcome.samples == ()
    (sample,) = world.step((turn, 4, 6, True)).samples
    assert sample.attempt_id == turn.attempt_id
    assert len(sample.text) == 1
    assert not sample.stopped


@pytest.mark.parametrize("family", ["llama-gqa", "opt"])
def test_logits_are_computed_for_the_needed_rows_only(
    family: str, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(family)
    rows: list[int] = []
    multiply = CpuPackedWeights.multiply

    def counted(packed: CpuPackedWeights, given: torch.Tensor, out: torch.Tensor) -> None:
        if packed.outputs == model.shape.vocab_size:
            rows.append(len(given))
        multiply(packed, given, out)

    monkeypatch.setattr(CpuPackedWeights, "multiply", counted)
    world = World(model)
    first, second = world.turn(9), world.turn(7)
    world.step((first, 0, 9, True), (second, 0, 5, False))
    world.step((second, 5, 6, False))
    world.executor.close()
    assert rows == [1, 0]


def test_the_last_token_of_a_turn_releases_its_withheld_text(world: World) -> None:
    alone = world.turn(0, tokens=[5, 6, 7])
    text = world.step((alone, 0, 3, True)).samples[0].text
    sampling = Sampling(ignore_eos=True, stop=(f"{text}…",))
    longer = world.turn(0, tokens=[5, 6, 7], num_outputs_max=2, sampling=sampling)
    assert world.step((longer, 0, 3, True)).samples[0].text == ""
    turn = world.turn(0, tokens=[5, 6, 7], num_outputs_max=1, sampling=sampling)
    (token,) = world.step((turn, 0, 3, True)).samples
    assert (token.text, token.stopped) == (text, False)


def test_an_end_of_turn_token_stops_a_turn(loaded: Loaded) -> None:
    everything = frozenset(range(128))
    world = World(loaded("llama-gqa"), eos_token_ids=everything)
    turn, deaf = world.turn(3, sampling=Sampling()), world.turn(3)
    samples = world.step((turn, 0, 3, True), (deaf, 0, 3, True)).samples
    world.executor.close()
    assert [sample.stopped for sample in samples] == [True, False]
    assert samples[0].text == ""


def test_logprobs_reach_the_sample(world: World) -> None:
    turn = world.turn(3, sampling=Sampling(logprobs=2, ignore_eos=True))
    (sample,) = world.step((turn, 0, 3, True)).samples
    assert sample.logprob is not None
    assert sample.top_logprobs[0].token_id == sample.token_id
    assert len(sample.top_logprobs) == 2


def test_a_turn_with_nan_logits_fails_alone(folder_of: FolderOf) -> None:
    """The embedding of token 50 is NaN. Its turn fails, and the other turns are not affected."""
    model = load(folder_of("llama-gqa"))
    model.flat.module.get_input_embeddings().weight[50] = float("nan")
    world = World(model)
    sick = world.turn(0, tokens=[7, 50, 9])
    well, late = world.turn(0, tokens=[8, 9, 10, 11, 12]), world.turn(0, tokens=[3])
    outcome = world.step((well, 0, 5, True), (sick, 0, 3, True), (late, 0, 1, True), failing=[sick])
    assert [sample.attempt_id for sample in outcome.samples] == [well.attempt_id, late.attempt_id]
    ((attempt_id, reason, message),) = outcome.failures
    assert (attempt_id, reason) == (sick.attempt_id, "NAN_LOGITS")
    assert message == "the model's logits at position 2 are not finite"
    # The failed turn's pages contain NaN. Another turn gets such a page and fills only some of its slots.
    late.page_table.append(sick.page_table[0])
    for _ in range(6):
        world.decode(well, late)
    world.executor.close()
    plain = plain_model(folder_of("llama-gqa"))
    assert largest_gap(plain, well) <= GAP_MAX
    assert largest_gap(plain, late) <= GAP_MAX


def test_an_iteration_without_slices_waits_for_one_copy(world: World) -> None:
    turn = world.turn(8)
    world.step((turn, 0, 8, True))
    outs = [SwapOut(3, turn.page_table[0], 0, 4), SwapOut(4, turn.page_table[1], 1, 4)]
    assert world.step(swap_outs=outs).finished_copies == (3, 4)
    assert world.step().finished_copies == ()


def test_page_copies_without_slices_happen_at_once(world: World) -> None:
    turn = world.turn(4)
    world.step((turn, 0, 4, True))
    source, target = turn.page_table[0], world.free_pages.pop()
    assert world.step(copies=[PageCopy(source, target, 3)]).finished_copies == ()
    arena = world.memory.device_arena
    assert torch.equal(arena[:, target, :, :, :3], arena[:, source, :, :, :3])
    assert bool(arena[:, target, :, :, 3:].isnan().all())


def test_a_slice_attends_to_tokens_of_another_slice_in_its_iteration(
    world: World, folder_of: FolderOf
) -> None:
    """Two turns share a chunk. One of the turns computes it in this iteration."""
    first = world.turn(6)
    second = world.turn(0, tokens=[*first.tokens[:4], 40, 41])
    second.page_table[0] = first.page_table[0]
    world.step((first, 0, 6, True), (second, 4, 6, True))
    plain = plain_model(folder_of("llama-gqa"))
    assert largest_gap(plain, first) <= GAP_MAX
    assert largest_gap(plain, second) <= GAP_MAX


def test_a_failed_copy_is_a_device_error(world: World) -> None:
    turn = world.turn(4)
    with pytest.raises(DeviceError, match="copying pages between the tiers failed"):
        world.step((turn, 0, 4, True), swap_ins=[SwapIn(1, 99, 3, 4)])


def test_close_ends_the_copier(world: World) -> None:
    workers = [each for each in threading.enumerate() if each.name == "pensieve-copier"]
    world.executor.close()
    ended = [worker for worker in workers if not worker.is_alive()]
    assert len(ended) == 1, "other copier threads may belong to executors that were not closed"


class MeetingMemory(KVMemory):
    """The copy of layer 1 and the compute of layer 0 wait for each other, so they must overlap."""

    def __init__(self, model: LoadedModel) -> None:
        super().__init__(model.shape, 16, 8, CHUNK_TOKENS)
        self.meeting = threading.Barrier(2, timeout=60)
        self.layers_in: list[int] = []

    def swap_in(self, layer: int, moves: PageMoves) -> None:
        if layer == 1:
            self.meeting.wait()
        super().swap_in(layer, moves)
        self.layers_in.append(layer)
        if layer == 1:
            self.meeting.wait()


@pytest.mark.parametrize("compiled", [True, False])
def test_compute_of_one_layer_overlaps_with_the_copy_of_the_next(
    compiled: bool, folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer 0's MLP waits until layer 1's copy has begun, and continues only after that copy.

    The test would hang if copies finished before the forward pass, or began only when a layer needs them.
    """
    if not compiled:
        monkeypatch.setattr(dense, "available", lambda dtype: False)
    elif not dense.available(torch.float32):
        pytest.skip("there is no compiled library")
    model = load(folder_of("llama-gqa"))
    memory = MeetingMemory(model)
    world = World(model, memory=memory)
    turn = world.turn(8)
    world.step((turn, 0, 8, True))
    world.step(swap_outs=[SwapOut(1, turn.page_table[0], 2, 4)])
    page = world.replace_page(turn, 0)[1]
    computed_when_copied: list[list[int]] = []

    def meet(*_: object) -> None:
        memory.meeting.wait()  # layer 1's copy has begun, and layer 0 is being computed
        memory.meeting.wait()
        computed_when_copied.append(list(memory.layers_in))

    first = model.flat.module.model.layers[0]
    with monkeypatch.context() as patch:
        if compiled:
            after_attention = first.dense.after_attention
            patch.setattr(
                first.dense, "after_attention", lambda *rows: (meet(), after_attention(*rows))[1]
            )
        else:
            forward = first.mlp.forward
            patch.setattr(first.mlp, "forward", lambda x: (meet(), forward(x))[1])
        outcome = world.decode(turn, swap_ins=[SwapIn(2, 2, page, 4)])
    assert computed_when_copied == [[0, 1]]
    assert outcome.finished_copies == (2,)
    world.decode(turn)
    world.executor.close()
    assert largest_gap(plain_model(folder_of("llama-gqa")), turn) <= GAP_MAX


class SlowMemory(KVMemory):
    """Swap-ins take much longer than computing."""

    def swap_in(self, layer: int, moves: PageMoves) -> None:
        time.sleep(0.05)
        super().swap_in(layer, moves)


def test_a_layer_never_attends_before_its_pages_have_come(
    loaded: Loaded, folder_of: FolderOf
) -> None:
    model = loaded("llama-gqa")
    world = World(model, memory=SlowMemory(model.shape, 16, 8, CHUNK_TOKENS))
    turn = world.turn(8)
    world.step((turn, 0, 8, True))
    world.step(swap_outs=[SwapOut(1, turn.page_table[0], 2, 4)])
    page = world.replace_page(turn, 0)[1]
    world.decode(turn, swap_ins=[SwapIn(2, 2, page, 4)])
    world.executor.close()
    assert largest_gap(plain_model(folder_of("llama-gqa")), turn) <= GAP_MAX


def test_a_stop_string_may_be_completed_by_a_later_token(world: World) -> None:
    """Text that a turn holds back is kept from one iteration to the next."""
    alone = world.turn(0, tokens=[5, 6, 7])
    texts = [world.step((alone, 0, 3, True)).samples[0].text]
    texts += [world.decode(alone).samples[0].text for _ in range(2)]
    assert all(len(text) == 1 for text in texts)
    stop = "".join(texts)
    turn = world.turn(0, tokens=[5, 6, 7], sampling=Sampling(ignore_eos=True, stop=(stop,)))
    samples = [world.step((turn, 0, 3, True)).samples[0]]
    samples += [world.decode(turn).samples[0] for _ in range(2)]
    assert [sample.text for sample in samples] == ["", "", ""]
    assert [sample.stopped for sample in samples] == [False, False, True]


def test_a_turn_that_starts_and_ends_in_one_iteration_is_forgotten(loaded: Loaded) -> None:
    world = World(loaded("llama-gqa"))
    start = TurnStart(7, array("I", [5, 6, 7]), Sampling())
    world.executor.launch(Iteration(1, (), (PageCopy(0, 1, 1),), started=(start,), ended=(7,)))
    world.executor.collect()
    assert not world.executor._replies
    world.executor.close()
