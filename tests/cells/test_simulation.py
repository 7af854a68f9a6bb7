"""The simulator and the baselines: times and tasks that can be computed by hand."""

from __future__ import annotations

import pytest

from pensieve.cells.baselines import GraphBatching, Merging, NodeByNode, Padding
from pensieve.cells.graph import CellType, Graph, Node, chain, tree
from pensieve.cells.scheduler import Scheduler, Task
from pensieve.cells.workload import complete_tree
from scripts.papers.cell_simulation import Arrival, Costs, Run, simulate

A, B = CellType("a", 0, 64), CellType("b", 1, 64)
COSTS = Costs({A: [(1, 1.0), (3, 2.0)], B: [(1, 1.0)]})


def links(*counts: int) -> Graph:
    return chain(*((cell, [()] * count) for cell, count in zip((A, B), counts, strict=False)))


def tasks(policy: GraphBatching, *graphs: Graph) -> list[tuple[str, list[int | None]]]:
    """Return type and requests of each task of the next batch."""
    for request, graph in enumerate(graphs):
        policy.add(request, graph)
    made = policy.schedule(0)
    assert [policy.complete(task) for task in made[:-1]] == [[]] * (len(made) - 1)
    members = {row.request for task in made for row in task.rows if row}
    assert set(policy.complete(made[-1])) == members, "all are answered together"
    return [(task.cell.name, [row and row.request for row in task.rows]) for task in made]


def cellular(*arrivals: Arrival, costs: Costs = COSTS, num_workers: int = 1) -> Run:
    return simulate(arrivals, Scheduler((A, B)), costs, num_workers)


def test_a_step_takes_a_time_between_those_of_the_nearest_sizes() -> None:
    assert [COSTS.seconds(A, size) for size in (1, 2, 3, 6)] == [1.0, 1.5, 2.0, 4.0]
    assert Costs(COSTS.points, 0.5, 0.1).seconds(A, 3) == pytest.approx(2.8)


def test_padding_computes_the_upper_end_of_a_bucket_and_answers_all_together() -> None:
    assert tasks(Padding(4), links(2), links(3)) == [
        *[("a", [0, 1])] * 2,
        ("a", [None, 1]),
        ("a", [None, None]),
    ]
    run = simulate([Arrival(0, links(1)), Arrival(0, links(4))], Padding(4), COSTS)
    assert run.finished == [6.0, 6.0]


def test_the_second_stage_of_a_padded_batch_ends_with_the_longest_request() -> None:
    found = tasks(Padding(2), links(1, 1), links(2, 3))
    assert [rows for cell, rows in found if cell == "b"] == [[0, 1], [None, 1], [None, 1]]


def test_buckets_take_turns_and_full_ones_may_go_first() -> None:
    def order(full_first: bool) -> list[list[int]]:
        policy = Padding(1, 2, full_first)
        for request, count in enumerate((1, 2, 3, 3)):
            policy.add(request, links(count))
        batches = [policy.schedule(0)]
        policy.add(4, links(1))
        while batches[-1]:
            batches.append(policy.schedule(0))
        return [[row.request for row in batch[0].rows if row] for batch in batches[:-1]]

    assert order(False) == [[0], [1], [2, 3], [4]]
    assert order(True) == [[2, 3], [0, 4], [1]]


def test_merging_runs_all_ready_nodes_of_a_type_at_once() -> None:
    two = tree(A, B, complete_tree(2))
    sizes = [(cell, len(rows)) for cell, rows in tasks(Merging(2), two, two, two)]
    assert sizes == [("a", 8), ("b", 4), ("b", 2)]


def test_merging_runs_the_type_with_the_shallowest_ready_nodes() -> None:
    found = tasks(Merging(2), links(1, 3), links(2, 1))
    assert found == [("a", [0, 1]), ("b", [0]), ("a", [1]), ("b", [0, 1]), ("b", [0])]


def test_merging_compares_the_mean_depths_of_types_and_not_when_they_became_ready() -> None:
    """After a, the two nodes of b have the mean depth 0.5, and c has 0."""
    c = CellType("c")
    found = tasks(Merging(), Graph([Node(A), Node(B), Node(c), Node(B, (0,))]))
    assert found == [("a", [0]), ("c", [0]), ("b", [0, 0])]


def test_merging_a_graph_takes_time_for_each_of_its_nodes() -> None:
    costs = Costs(COSTS.points, per_row=0.25)
    run = simulate([Arrival(0, links(1, 1))], Merging(), costs)
    assert run.finished == [2.5]


def test_the_ideal_runs_a_tree_node_by_node_for_all_requests() -> None:
    one = tree(A, B, complete_tree(1))
    assert tasks(NodeByNode(64), one, one) == [("a", [0, 1]), ("a", [0, 1]), ("b", [0, 1])]


def test_a_request_waits_for_the_tasks_that_are_submitted_before_it() -> None:
    run = cellular(Arrival(0, links(9)), Arrival(0.5, links(1)))
    assert run.started == [0, 5.0]
    assert run.finished == [4 + 1 + 1.5 + 3, 6.5]


def test_gathering_takes_time_in_each_task_of_cellular_batching() -> None:
    run = cellular(Arrival(0, links(2)), costs=Costs(COSTS.points, 0.5, 0.25))
    assert run.finished == [3.5]


def test_two_workers_serve_two_requests_at_once() -> None:
    run = cellular(Arrival(0, links(3)), Arrival(0.5, links(3)), num_workers=2)
    assert run.finished == [3.0, 3.5]


def test_the_first_tasks_of_figure_2_5_have_the_papers_members() -> None:
    made: list[Task] = []

    class Recorded(Scheduler):
        def schedule(self, worker: int) -> list[Task]:
            tasks = super().schedule(worker)
            made.extend(tasks)
            return tasks

    cell = CellType("cell", 0, batch_max=4, batch_min=4)
    lengths = zip((0, 0, 0, 0, 1.5, 2.5, 2.5, 4.5), (2, 3, 3, 5, 5, 7, 3, 1), strict=True)
    arrivals = [Arrival(at, chain((cell, [()] * count))) for at, count in lengths]
    simulate(arrivals, Recorded([cell]), Costs({cell: [(4, 1.0)]}))
    members = [[row.request + 1 for row in task.rows if row] for task in made[:4]]
    assert members == [[1, 2, 3, 4], [1, 2, 3, 4], [2, 3, 4, 5], [4, 5, 6, 7]]
