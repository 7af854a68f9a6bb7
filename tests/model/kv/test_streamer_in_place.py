"""Where nothing is staged, page tables name host pages."""

from __future__ import annotations

from array import array

from pensieve.core.iteration import PageGroup, Slice
from pensieve.model.kv.streamer_in_place import in_host_pages


def piece(turn_id: int, table: list[int]) -> Slice:
    stop = 4 * len(table)
    return Slice(turn_id, stop - 1, stop, array("I", [7]), array("i", table))


def test_tables_of_groups_become_host_pages_and_others_stay() -> None:
    nothing = array("i", [0] * 4)
    groups = (
        PageGroup(1, 3, array("i", [10, 30, 20, 40]), nothing, nothing),
        PageGroup(3, 4, array("i", [5, 6]), nothing, nothing),
    )
    slices = (piece(0, [2, 3]), piece(1, [0, 1, 2]), piece(2, [0, 3]), piece(3, [1]))
    found = in_host_pages(slices, groups)
    assert [each.page_table.tolist() for each in found] == [[2, 3], [10, 30, 20], [10, 40], [6]]
    assert [each._replace(page_table=nothing) for each in found] == [
        each._replace(page_table=nothing) for each in slices
    ]
