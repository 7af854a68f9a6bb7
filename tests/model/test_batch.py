"""The tensors that are made from an iteration's slices."""

from __future__ import annotations

import random
from array import array

import pytest
import torch

from pensieve.core.iteration import Slice
from pensieve.core.turn import Turn
from pensieve.model.batch import Batch, SampledIds
from pensieve.model.shared_pages import SharedSearch, shared_pages
from tests.model.world import slice_of


def turn_of(attempt_id: int, tokens: list[int], pages: list[int]) -> Turn:
    turn = Turn(attempt_id, "c", array("I", tokens), 0, len(tokens), 99)
    turn.page_table = array("i", pages)
    return turn


def test_the_tensors_of_a_batch_with_a_hole_in_a_turn() -> None:
    first = turn_of(1, [10, 11, 12, 13, 14, 15, 16, 17, 18], [7, 3, 5])
    second = turn_of(2, [20, 21], [4])
    batch = Batch.from_slices(
        [slice_of(first, 1, 3, False), slice_of(second, 1, 2, True), slice_of(first, 7, 9, True)], 4
    )
    assert batch.input_ids.tolist() == [11, 12, 21, 17, 18]
    assert batch.positions.tolist() == [1, 2, 1, 7, 8]
    assert batch.slot_mapping.tolist() == [4 * 7 + 1, 4 * 7 + 2, 4 * 4 + 1, 4 * 3 + 3, 4 * 5]
    assert batch.page_index.page_table.tolist() == [[7, 3, 5], [4, 0, 0]]
    assert batch.page_index.slice_offsets.tolist() == [0, 2, 3, 5]
    assert batch.page_index.slice_turns.tolist() == [0, 1, 0]
    assert batch.page_index.slice_starts.tolist() == [1, 1, 7]
    assert batch.logit_rows.tolist() == [2, 4]
    assert batch.logit_attempt_ids == (2, 1)
    assert batch.logit_positions == (2, 9)
    assert batch.page_index.page_table.dtype == batch.page_index.slice_offsets.dtype == torch.int32
    assert batch.input_ids.dtype == batch.slot_mapping.dtype == torch.int64


def test_pages_after_the_end_of_the_slices_are_left_out() -> None:
    turn = turn_of(1, list(range(20)), [9, 8, 7, 6, 5])
    batch = Batch.from_slices([slice_of(turn, 0, 5, False)], 4)
    assert batch.page_index.page_table.tolist() == [[9, 8]]
    assert batch.logit_rows.tolist() == []


def test_a_token_that_only_the_device_knows_is_inserted() -> None:
    first, second = turn_of(1, [10, 11, 12], [7]), turn_of(2, [20], [4, 5])
    failed = turn_of(3, [30, 31], [6])
    sampled = SampledIds(torch.tensor([77, -1, 88]), {2: 0, 3: 1, 1: 2})
    slices = [
        slice_of(first, 1, 4, True),
        slice_of(failed, 2, 3, True),
        slice_of(second, 0, 1, False),
        slice_of(second, 1, 2, True),
    ]
    batch = Batch.from_slices(slices, 4, sampled=sampled)
    assert batch.input_ids.tolist() == [11, 12, 88, 0, 20, 77]
    assert batch.positions.tolist() == [1, 2, 3, 2, 0, 1]
    assert batch.logit_positions == (4, 3, 2)
    assert sampled.ids.tolist() == [77, -1, 88]


@pytest.mark.parametrize("sampled", [None, SampledIds(torch.tensor([77]), {1: 0})])
def test_a_slice_beyond_known_and_sampled_tokens_is_an_error(sampled: SampledIds | None) -> None:
    turn = turn_of(1, [10, 11], [7, 8])
    with pytest.raises(AssertionError, match=r"lacks token ids|no iteration samples"):
        Batch.from_slices([slice_of(turn, 0, 4 if sampled else 3, True)], 4, sampled=sampled)


def test_slices_that_begin_with_the_same_pages_are_grouped() -> None:
    front, document = list(range(100, 106)), list(range(200, 210))
    tables = [
        [*front, *document, 1, 2],
        [*front, *document, 3, 4],
        [*front, 5, 6],
        [7, 8, 9, 10, 11, 12],
        [*front, 13],
        [*document, 14],  # the document is not after the front
    ]
    turns = [turn_of(i, list(range(4 * len(pages))), pages) for i, pages in enumerate(tables)]
    slices = [slice_of(turn, len(turn.tokens) - 2, len(turn.tokens), True) for turn in turns]
    shared = Batch.from_slices(slices, 4).page_index.shared
    assert shared is not None
    groups = shared.slice_groups.tolist()
    assert groups[0] == groups[1] >= 0
    assert groups[2] == groups[4] >= 0
    assert groups[3] == groups[5] == -1
    assert [int(shared.group_pages[groups[i]]) for i in (0, 2)] == [16, 6]


def test_pages_that_a_slice_writes_to_are_not_shared() -> None:
    pages = list(range(8))
    turns = [turn_of(i, list(range(32)), pages) for i in range(3)]
    starts = (25, 26, 14)  # the last one starts in the fourth page
    slices = [
        slice_of(turn, start, start + 1, True) for turn, start in zip(turns, starts, strict=True)
    ]
    shared = Batch.from_slices(slices, 4).page_index.shared
    assert shared is not None
    assert shared.slice_groups.tolist() == [0, 0, -1]
    assert shared.group_pages.tolist() == [6]
    assert Batch.from_slices(slices[1:], 4).page_index.shared is None


@pytest.mark.parametrize("changed", [1, 5, 11])
def test_shared_pages_are_searched_again_if_a_later_page_changes(changed: int) -> None:
    """A context keeps its first page, but a later chunk was recomputed into another page."""
    search, front = SharedSearch(), list(range(1000, 1012))

    def slices_with(pages_of_second: list[int]) -> list[Slice]:
        turns = [turn_of(1, [0] * 57, [*front, 1, 2, 3]), turn_of(2, [0] * 57, pages_of_second)]
        return [slice_of(turn, 56, 57, True) for turn in turns]

    before = slices_with([*front, 4, 5, 6])
    found = search(before, 4)
    assert found is not None
    assert found.group_pages.tolist() == [12]
    assert search(before, 4) is found
    after = slices_with([*front[:changed], 7777, *front[changed + 1 :], 4, 5, 6])
    assert search(after, 4) == shared_pages(after, 4) != found


def test_shared_pages_are_reused_until_a_page_or_turn_changes() -> None:
    """A reused result stays valid: a group's slices begin with the same pages, and write after them."""
    choose, search = random.Random(3), SharedSearch()
    fronts = [choose.sample(range(1000, 2000), 12) for _ in range(3)]
    turns = {index: fronts[index % 3] + [index] * 30 for index in range(12)}
    lengths = dict.fromkeys(turns, 56)
    num_searched = 0
    for step in range(200):
        if step % 11 == 10:  # a turn gets other pages, or is replaced by another turn
            index, kind = choose.choice(list(turns)), choose.random()
            if kind < 0.3:
                turns[index] = choose.sample(range(3000, 4000), 42)
            elif kind < 0.6:  # replace one of its pages
                page = choose.randrange(12)
                turns[index] = [*turns[index][:page], 5000 + step, *turns[index][page + 1 :]]
            else:
                turns[100 + step], lengths[100 + step] = turns.pop(index), lengths.pop(index)
        slices = []
        for index, pages in turns.items():
            length = lengths[index]
            turn = turn_of(index, [0] * (length + 1), pages)
            slices.append(slice_of(turn, length, length + 1, True))
        found, right = search(slices, 4), shared_pages(slices, 4)
        searched = search._age == 0
        num_searched += searched
        if right is None or found is None:
            assert found is right
            continue
        if searched:
            assert found == right
        groups = found.slice_groups
        for piece, group in zip(slices, groups, strict=True):
            if group >= 0:
                num_pages = found.group_pages[group]
                members = [each for each, own in zip(slices, groups, strict=True) if own == group]
                first_pages = {tuple(each.page_table[:num_pages]) for each in members}
                assert piece.start >= num_pages * 4
                assert len(first_pages) == 1
        lengths = {index: min(length + 1, 160) for index, length in lengths.items()}
    assert 6 < num_searched < 60
