"""Streamed turns give the same bits as resident turns, and leave the same keys and values."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pensieve.core.iteration import PageCopy, PageGroup, SampledToken, SwapIn, SwapOut
from pensieve.errors import DeviceError
from pensieve.model.executor import TorchExecutor
from pensieve.model.kv.checksums import PageChecksums
from pensieve.model.kv.memory import IN_PLACE, KVMemory
from pensieve.model.kv.streamer import StagedStreamer
from pensieve.model.loader import LoadedModel, load
from pensieve.model.streamed_pass import StreamedPass
from pensieve.sampling import Sampling
from tests.model.streamed_world import Piece, StreamedWorld
from tests.model.world import letter_tokenizer

FolderOf = Callable[[str], Path]
Loaded = Callable[[str], LoadedModel]
SIZE = 32  # tokens per page
LOGPROBS = Sampling(ignore_eos=True, logprobs=4)


class Twins:
    """Two worlds with the same turns. In one world all turns are resident."""

    def __init__(self, model: LoadedModel, staging_pages: int, seed: int = 0, **rest: Any) -> None:
        self.streamed = StreamedWorld(model, staging_pages=staging_pages, seed=seed, **rest)
        self.resident = StreamedWorld(model, staging_pages=0, seed=seed, **rest)
        self.num_tokens: dict[int, int] = {}  # turn -> number of computed tokens

    def turns(self, lengths: list[int], num_resident: int = 0) -> list[int]:
        """Make turns with prompts of these lengths. The first `num_resident` are resident in both worlds."""
        made = []
        draw = random.Random(sum(lengths))
        for index, length in enumerate(lengths):
            tokens = [draw.randrange(3, 100) for _ in range(length)]
            make = self.streamed.turn if index < num_resident else self.streamed.streamed_turn
            turn = make(0, tokens=tokens, sampling=LOGPROBS)
            self.resident.turn(0, tokens=tokens, sampling=LOGPROBS)
            made.append(turn.attempt_id)
        return made

    def turns_with_opening(self, opening: list[int], lengths: list[int]) -> list[int]:
        """Make streamed turns whose prompts begin with the same tokens."""
        made = []
        for length in lengths:
            tokens = [*opening, *(7 + each for each in range(length))]
            made.append(self.streamed.streamed_turn(0, tokens=tokens, sampling=LOGPROBS).attempt_id)
            self.resident.turn(0, tokens=tokens, sampling=LOGPROBS)
        return made

    def share(self, turn: int, other: int, num_chunks: int) -> None:
        for world in (self.streamed, self.resident):
            world.share(world.turns[turn], world.turns[other], num_chunks)

    def is_full(self, slices: list[tuple[int, int, int]]) -> bool:
        """Return whether an arena with these slices might have no room for another turn's pages."""
        turns = {index for index, _, _ in slices}
        return sum(len(self.streamed.turns[each].page_table) + 1 for each in turns) > 18

    def step(
        self,
        resident: list[tuple[int, int, int]],
        *groups: list[tuple[int, int, int]],
        **movements: Any,
    ) -> None:
        """Run slices (turn, start, stop) as an iteration. Sample where a slice ends at the last token."""

        def pieces(world: StreamedWorld, slices: list[tuple[int, int, int]]) -> list[Piece]:
            return [
                (turn := world.turns[index], start, stop, stop == len(turn.tokens))
                for index, start, stop in slices
            ]

        together = [each for part in (resident, *groups) for each in part]
        expected = self.resident.step(*pieces(self.resident, together))
        of_groups = [pieces(self.streamed, each) for each in groups]
        got = self.streamed.step_groups(pieces(self.streamed, resident), *of_groups, **movements)
        self.compare(got.samples, expected.samples)
        for index, _, stop in together:
            self.num_tokens[index] = max(self.num_tokens.get(index, 0), stop)

    def compare(self, got: tuple[SampledToken, ...], expected: tuple[SampledToken, ...]) -> None:
        """Compare the samples. Equal logprobs show that the logits have the same bits."""
        assert got == expected

    def decodes(self, *turns: int) -> list[tuple[int, int, int]]:
        lengths = [len(self.streamed.turns[each].tokens) for each in turns]
        return [(each, n - 1, n) for each, n in zip(turns, lengths, strict=True)]

    def drop(self, turn: int, chunk: int) -> tuple[int, int, int]:
        for world in (self.streamed, self.resident):
            piece = world.drop(world.turns[turn], chunk)
        return turn, piece[1], piece[2]

    def check_pages(self) -> None:
        for index, count in self.num_tokens.items():
            one, other = (
                world.pages_of(world.turns[index], count)
                for world in (self.streamed, self.resident)
            )
            assert torch.equal(one.view(torch.uint8), other.contiguous().view(torch.uint8)), index

    def close(self) -> None:
        for world in (self.streamed, self.resident):
            world.executor.close()


def prefills(twins: Twins, turns: list[int]) -> list[tuple[int, int, int]]:
    return [(each, 0, len(twins.streamed.turns[each].tokens)) for each in turns]


def test_prefill_and_decodes_in_one_group_of_one(loaded: Loaded) -> None:
    twins = Twins(loaded("llama-gqa"), 5)
    (turn,) = twins.turns([70])
    twins.step([], [(turn, 0, 40)])
    twins.step([], [(turn, 40, 70)])
    for _ in range(30):
        twins.step([], twins.decodes(turn))
    twins.check_pages()
    twins.close()


def test_many_groups_beside_resident_turns(loaded: Loaded) -> None:
    """More groups than arenas, of one or several turns, with prefills and decodes mixed."""
    twins = Twins(loaded("llama-gqa"), 8)
    a, b, c, d, e, f, g = twins.turns([50, 33, 64, 20, 90, 31, 65], num_resident=2)
    twins.step(prefills(twins, [a, b]), prefills(twins, [c, d]), [(e, 0, 40)])
    for _ in range(4):
        twins.step(
            twins.decodes(a, b),
            twins.decodes(c),
            [*twins.decodes(d), (e, 40, 60)],
            [(f, 0, 31)] if f not in twins.num_tokens else twins.decodes(f),
            prefills(twins, [g]) if g not in twins.num_tokens else twins.decodes(g),
        )
        twins.step([], twins.decodes(g), twins.decodes(f), twins.decodes(c, d))
    twins.check_pages()
    twins.close()


def play(twins: Twins, seed: int, num_iterations: int = 14) -> None:
    """Run random slices of resident and streamed turns in random groups, with holes and shared chunks."""
    draw = random.Random(seed)
    resident = twins.turns([draw.randint(1, 80) for _ in range(2)], num_resident=2)
    shared = 70
    opening = [draw.randrange(3, 100) for _ in range(shared)]
    first = twins.turns([draw.randint(1, 100) for _ in range(3)])
    sharing = twins.turns_with_opening(opening, [draw.randint(1, 40) for _ in range(3)])
    twins.step([], [(sharing[0], 0, shared)])
    for other in sharing[1:]:
        twins.share(other, sharing[0], shared // SIZE)
    done = {**dict.fromkeys(resident + first, 0), **dict.fromkeys(sharing, shared // SIZE * SIZE)}
    done[sharing[0]] = shared
    for _ in range(num_iterations):
        chosen = [turn for turn in done if draw.random() < 0.8]
        draw.shuffle(chosen)
        parts: list[list[tuple[int, int, int]]] = [[]]
        for turn in sorted(chosen, key=lambda turn: turn not in resident):
            length = len(twins.streamed.turns[turn].tokens)
            stop = min(length, done[turn] + draw.randint(1, 60))
            pieces = [(turn, done[turn], stop)]
            chunk = draw.randrange(max(done[turn] // SIZE, 1))
            if turn not in sharing and done[turn] >= SIZE and draw.random() < 0.3:
                pieces.insert(0, twins.drop(turn, chunk))
            done[turn] = stop
            if turn in resident:
                parts[0] += pieces
            else:
                if len(parts) == 1 or draw.random() < 0.5 or twins.is_full(parts[-1]):
                    parts.append([])
                parts[-1] += pieces
        if chosen:
            twins.step(parts[0], *parts[1:])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("staging_pages", [26, IN_PLACE])
def test_random_streamed_and_resident_turns_have_the_bits_of_resident_turns(
    loaded: Loaded, seed: int, staging_pages: int
) -> None:
    twins = Twins(loaded("llama-gqa"), staging_pages, seed)
    play(twins, seed)
    twins.check_pages()
    twins.close()


@pytest.mark.parametrize("family", ["opt", "qwen3-moe"])
def test_layers_of_other_families_give_the_same_bits(loaded: Loaded, family: str) -> None:
    twins = Twins(loaded(family), 26)
    play(twins, 3, 6)
    twins.check_pages()
    twins.close()


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [(torch.bfloat16, "auto"), (None, "int8"), (torch.bfloat16, "int8")]
)
def test_rounded_kv_gives_the_same_bits(
    folder_of: FolderOf, dtype: torch.dtype | None, kv_dtype: str
) -> None:
    twins = Twins(load(folder_of("llama-gqa"), dtype=dtype, kv_dtype=kv_dtype), 26)
    play(twins, 5)
    twins.check_pages()
    twins.close()


class ApproximateTwins(Twins):
    """Allow for rounding: torch's attention sums depend on the batch."""

    def compare(self, got: tuple[SampledToken, ...], expected: tuple[SampledToken, ...]) -> None:
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert one.token_id == other.token_id
            assert one.logprob == pytest.approx(other.logprob, abs=0.02)


def test_kv_in_fp8_gives_the_same_tokens(folder_of: FolderOf) -> None:
    twins = ApproximateTwins(load(folder_of("llama-gqa"), kv_dtype="fp8"), 26)
    play(twins, 2)
    twins.close()


def test_old_contents_of_an_arena_do_not_affect_a_pass(loaded: Loaded) -> None:
    """Infinity, or the rows of other turns, in slots that no group of the pass fills."""
    twins = Twins(loaded("llama-gqa"), 9)
    a, b = twins.turns([33, 64])
    twins.step([], prefills(twins, [a]), prefills(twins, [b]))
    for _ in range(5):
        twins.streamed.memory.staging_arena.fill_(float("inf"))
        twins.step([], twins.decodes(a), twins.decodes(b))
        twins.step([], twins.decodes(b, a))
    twins.check_pages()
    twins.close()


def test_resident_turns_are_swapped_and_copied_beside_streamed_turns(loaded: Loaded) -> None:
    twins = Twins(loaded("llama-gqa"), 9)
    world = twins.streamed
    a, b, c = twins.turns([70, 40, 60], num_resident=1)
    twins.step(prefills(twins, [a]), prefills(twins, [b]), prefills(twins, [c]))
    turn, host_page = world.turns[a], world.free_host.pop()
    out = SwapOut(1, turn.page_table[0], host_page, SIZE)
    twins.step(twins.decodes(a), twins.decodes(b), twins.decodes(c), swap_outs=(out,))
    world.step()
    _, new = world.replace_page(turn, 0)
    old, page = turn.page_table[1], world.free_pages.pop()
    turn.page_table[1] = page
    twins.step(
        twins.decodes(a),
        twins.decodes(b, c),
        copies=(PageCopy(old, page, SIZE),),
        swap_ins=(SwapIn(2, host_page, new, SIZE),),
    )
    twins.check_pages()
    twins.close()


def test_a_pass_that_does_not_fit_is_computed_by_groups_and_in_halves(
    folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(folder_of("llama-gqa"))
    twins = Twins(model, 20)
    a, b, c, d = twins.turns([70, 40, 100, 31], num_resident=1)
    logits = model.flat.logits
    computed: list[int] = []

    def short_of_memory(input_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        answer = logits(input_ids, *rest)  # a failing pass may already have written anything
        if isinstance(rest[-1], StreamedPass):
            computed.append(len(input_ids))
            if len(input_ids) > 30:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return answer

    monkeypatch.setattr(model.flat, "logits", short_of_memory)
    hole = twins.turns([64])[0]
    twins.step([], [(hole, 0, 64)])
    twins.step(prefills(twins, [a]), prefills(twins, [b]), prefills(twins, [c, d]))
    twins.step([], [twins.drop(hole, 0), *twins.decodes(hole, b)], twins.decodes(c, d))
    twins.check_pages()
    assert len([each for each in computed if each > 30]) > 4
    twins.close()


def test_a_token_that_does_not_fit_is_a_device_error(
    folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(folder_of("llama-gqa"))
    twins = Twins(model, 5)
    (turn,) = twins.turns([2])

    def failing(*rest: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(model.flat, "logits", failing)
    with pytest.raises(DeviceError, match="a batch of 1 tokens"):
        twins.streamed.step_groups([], [(twins.streamed.turns[turn], 0, 2, True)])
    twins.close()


# -- planted faults: each must be found --


def arenas_swapped(patch: pytest.MonkeyPatch) -> None:
    """Attention reads the other arena than the copies write."""
    staged = KVMemory.staged_pages
    patch.setattr(KVMemory, "staged_pages", lambda memory, arena: staged(memory, 1 - arena))


def one_store_lost(patch: pytest.MonkeyPatch) -> None:
    store = KVMemory.store

    def lossy(memory: KVMemory, layer: int, *rest: Any) -> None:
        if layer != memory.shape.num_layers - 1:
            store(memory, layer, *rest)

    patch.setattr(KVMemory, "store", lossy)


def two_groups_swapped(patch: pytest.MonkeyPatch) -> None:
    begin = StagedStreamer.begin
    patch.setattr(StagedStreamer, "begin", lambda one, groups: begin(one, groups[::-1]))


def loads_of_the_layer_before(patch: pytest.MonkeyPatch) -> None:
    load_pages = KVMemory.load
    patch.setattr(
        KVMemory, "load", lambda one, layer, *rest: load_pages(one, max(layer - 1, 0), *rest)
    )


def written_to_the_device(patch: pytest.MonkeyPatch) -> None:
    """Staged slots are taken for slots of device pages."""
    patch.setattr(
        KVMemory,
        "staged_pages",
        lambda one, arena: (one.device_arena[0, :, 0], one.device_arena[0, :, 1]),
    )


def nothing_loaded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVMemory, "load", lambda *rest: None)


@pytest.mark.parametrize(
    "plant",
    [
        arenas_swapped,
        one_store_lost,
        two_groups_swapped,
        loads_of_the_layer_before,
        written_to_the_device,
        nothing_loaded,
    ],
    ids=lambda plant: plant.__name__,
)
def test_a_planted_fault_is_found(
    loaded: Loaded, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    twins = Twins(loaded("llama-gqa"), 26)
    with pytest.raises(AssertionError):
        played_and_checked(twins)
    twins.close()


def played_and_checked(twins: Twins) -> None:
    play(twins, 1)
    twins.check_pages()


# -- checksums of host pages --


def group_storing(page: int, num_slots: int) -> PageGroup:
    return PageGroup(0, 1, *(array("i", [each]) for each in (page, 0, num_slots)))


def test_a_growing_host_page_gets_a_checksum_when_it_is_full(
    caplog: pytest.LogCaptureFixture,
) -> None:
    arena = torch.zeros(2, 3, 2, 1, 4, 8)
    sums = PageChecksums(arena)
    assert not sums.is_intact(1), "nothing was ever copied there"
    sums.copied(1, 2)
    for num_slots in (3, 0):
        sums.stored([group_storing(1, num_slots)])
        arena[1, 1, 0, 0, 2, 3] += 1.0
        assert sums.is_intact(1), "it has no sum"
    sums.stored([group_storing(1, 4)])
    assert sums.is_intact(1)
    sums.stored([group_storing(1, 0)])
    arena[1, 1, 0, 0, 3, 3] += 1.0
    assert not sums.is_intact(1)
    assert "page 1 of the host tier" in caplog.text


def test_the_executor_computes_checksums_of_pages_that_groups_have_stored(loaded: Loaded) -> None:
    world = StreamedWorld(loaded("llama-gqa"), staging_pages=5)
    sums = PageChecksums(world.memory.host_arena)
    world.executor.close()
    world.executor = TorchExecutor(
        loaded("llama-gqa"), world.memory, world.sampler, letter_tokenizer(), checksums=sums
    )
    turn = world.streamed_turn(40)
    world.step_groups([], [(turn, 0, 40, True)])
    full, growing = turn.page_table
    for page in (full, growing):
        assert sums.is_intact(page)
        world.memory.host_arena[0, page] += 1.0
    assert not sums.is_intact(full)
    assert sums.is_intact(growing)
    world.executor.close()


# -- one iteration ahead --


def test_a_group_may_use_a_token_that_is_still_being_sampled(loaded: Loaded) -> None:
    said = []
    for depth in (1, 2):
        world = StreamedWorld(loaded("llama-gqa"), staging_pages=5, depth=depth)
        a, b = (world.streamed_turn(0, tokens=tokens) for tokens in ([7] * 33, [8] * 20))
        world.launch_groups([], [(a, 0, 33, True)], [(b, 0, 20, True)])
        for _ in range(15):
            if depth == 1:
                world.collect()
            pieces = [
                (turn, n - 1, n, True) for turn in (a, b) for n in [len(turn.tokens) + depth - 1]
            ]
            world.launch_groups([], *([piece] for piece in pieces))
            if depth == 2:
                world.collect()
        world.collect()
        said.append([list(turn.tokens) for turn in (a, b)])
        world.executor.close()
    assert said[0] == said[1]
