"""Graphs are cut into subgraphs, and Algorithm 1 of BatchMaker chooses what runs."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from pensieve.cells.graph import CellType, Graph, Node, chain, tree
from pensieve.cells.scheduler import Scheduler, Task
from pensieve.cells.workload import complete_tree, random_tree

A = CellType("a", priority=0, batch_max=4)
B = CellType("b", priority=1, batch_max=4)


def links(cell: CellType, count: int) -> Graph:
    return chain((cell, [()] * count))


def leaves(cell: CellType, count: int) -> Graph:
    """Return nodes that are all ready at once."""
    return Graph(Node(cell) for _ in range(count))


def scheduler(*graphs: Graph, limit: int = 5) -> Scheduler:
    made = Scheduler((A, B), limit)
    for request, graph in enumerate(graphs):
        made.add(request, graph)
    return made


def members(tasks: Iterable[Task]) -> list[list[tuple[int, int]]]:
    return [[(row.request, row.node) for row in task.rows if row] for task in tasks]


def test_a_tree_of_16_leaves_has_17_subgraphs() -> None:
    graph = tree(A, B, complete_tree(4))
    assert len(graph.nodes) == 31
    assert sorted(map(len, graph.subgraphs)) == [1] * 16 + [15]


def test_a_chain_of_two_types_has_two_subgraphs_and_the_second_waits_for_the_first() -> None:
    graph = chain((A, [()] * 3), (B, [()] * 2))
    assert graph.subgraphs == [[0, 1, 2], [3, 4]]
    assert graph.awaited == [set(), {0}]


def test_no_two_subgraphs_wait_for_each_other() -> None:
    """0 and 3 are connected and of one type, but 3 also waits for 2, which waits for 0."""
    graph = Graph([Node(A), Node(A, (0,)), Node(B, (0,)), Node(A, (1, 2))])
    assert graph.subgraphs == [[0, 1], [2], [3]]


def test_a_node_reads_only_earlier_nodes() -> None:
    with pytest.raises(ValueError, match="node 0 must read earlier nodes"):
        Graph([Node(A, (0,))])


def test_a_type_with_a_full_batch_comes_first_whatever_its_priority() -> None:
    assert scheduler(leaves(A, 4), leaves(B, 3)).schedule(0)[0].cell is A


def test_the_priority_decides_between_types_with_full_batches() -> None:
    assert scheduler(leaves(A, 9), leaves(B, 4)).schedule(0)[0].cell is B


def test_without_full_batches_an_idle_type_runs_before_a_running_type() -> None:
    made = scheduler(leaves(B, 1))
    made.schedule(0)
    made.add(1, leaves(B, 3))
    made.add(2, leaves(A, 1))
    assert made.schedule(1)[0].cell is A
    assert made.schedule(1)[0].cell is B  # now both are running


def test_types_alternate_even_if_all_their_tasks_have_completed() -> None:
    made = scheduler(links(B, 11), leaves(A, 3))
    order = []
    for _ in range(5):
        tasks = made.schedule(0)
        order.append((tasks[0].cell.name, len(tasks)))
        for task in tasks:
            made.complete(task)
        made.add(len(order) + 1, leaves(A, 1))
    assert order == [("b", 5), ("a", 1), ("b", 5), ("a", 1), ("b", 1)]


def test_if_all_types_are_running_the_priority_decides() -> None:
    made = scheduler(leaves(A, 1), leaves(B, 1))
    made.schedule(0)
    made.schedule(1)
    made.add(2, leaves(A, 2))
    made.add(3, leaves(B, 1))
    assert made.schedule(0)[0].cell is B


def test_one_decision_submits_five_tasks_of_a_chain_before_any_has_ended() -> None:
    tasks = scheduler(links(A, 8)).schedule(0)
    assert members(tasks) == [[(0, 0)], [(0, 1)], [(0, 2)], [(0, 3)], [(0, 4)]]


def test_the_limit_of_tasks_is_a_parameter() -> None:
    assert len(scheduler(links(A, 8), limit=2).schedule(0)) == 2


def test_only_the_first_task_may_be_smaller_than_the_minimum_batch() -> None:
    pairs = CellType("pairs", batch_max=4, batch_min=2)
    made = Scheduler([pairs])
    made.add(0, links(pairs, 1))
    made.add(1, links(pairs, 3))
    assert members(made.schedule(0)) == [[(0, 0), (1, 0)]]
    assert members(made.schedule(0)) == [[(1, 1)]]


def test_a_batch_takes_the_oldest_requests_up_to_its_maximum() -> None:
    made = scheduler(*[links(A, 1)] * 6)
    assert members(made.schedule(0)) == [[(0, 0), (1, 0), (2, 0), (3, 0)], [(4, 0), (5, 0)]]


def test_a_subgraph_with_running_tasks_stays_on_its_worker() -> None:
    made = scheduler(links(A, 3), limit=2)
    first, second = made.schedule(0)
    assert made.schedule(1) == []
    made.complete(first)
    assert made.schedule(1) == []  # the second task is still running
    made.complete(second)
    assert members(made.schedule(1)) == [[(0, 2)]]


def test_nodes_of_another_worker_do_not_count_towards_a_full_batch() -> None:
    made = scheduler(*[links(A, 9)] * 4, links(B, 1))
    made.schedule(0)
    assert made.schedule(1)[0].cell is B


def test_a_subgraph_is_released_by_the_end_of_the_subgraphs_that_it_awaits() -> None:
    made = scheduler(chain((A, [()]), (B, [()])))
    (task,) = made.schedule(0)
    # the first subgraph is only submitted, not complete; the second may run on another worker
    assert made.schedule(0) == []
    assert made.complete(task) == []
    assert members(made.schedule(1)) == [[(0, 1)]]


def test_a_request_is_finished_by_its_last_node_though_others_of_its_batch_go_on() -> None:
    made = scheduler(links(A, 1), links(A, 3))
    tasks = made.schedule(0)
    assert [made.complete(task) for task in tasks] == [[0], [], [1]]


def test_requests_join_and_leave_between_two_decisions() -> None:
    made = scheduler(links(A, 2), links(A, 9), limit=2)
    for task in made.schedule(0):
        made.complete(task)
    made.add(2, links(A, 9))
    assert members(made.schedule(0)) == [[(1, 2), (2, 0)], [(1, 3), (2, 1)]]


def test_unsubmitted_nodes_of_an_ended_request_never_run() -> None:
    made = scheduler(links(A, 20), links(A, 7))
    first, *others = made.schedule(0)
    assert made.complete(first, {0}) == [0]
    for task in others:
        assert made.complete(task, {0}) == []
    assert members(made.schedule(0)) == [[(1, 5)], [(1, 6)]]
    made.check()


@pytest.mark.parametrize("seed", range(20))
def test_with_any_order_of_ends_each_node_runs_once_and_after_its_inputs(seed: int) -> None:
    rng = random.Random(seed)
    graphs = [tree(A, B, random_tree(rng, rng.randrange(1, 12))) for _ in range(12)]
    graphs += [chain((A, [()] * rng.randrange(1, 9)), (B, [()] * 4)) for _ in range(12)]
    made = scheduler(*graphs)
    fifos: list[list[Task]] = [[], [], []]
    done: set[tuple[int, int]] = set()
    finished: list[int] = []
    while len(finished) < len(graphs):
        worker = rng.randrange(3)
        if not fifos[worker]:
            fifos[worker] = made.schedule(worker)
        elif rng.random() < 0.7:
            task = fifos[worker].pop(0)
            for request, node in [row for row in task.rows if row]:
                assert all(
                    (request, source) in done for source in graphs[request].nodes[node].inputs
                )
                assert (request, node) not in done
                done.add((request, node))
            finished += made.complete(task)
        made.check()
    assert sorted(finished) == list(range(len(graphs)))
    assert len(done) == sum(len(graph.nodes) for graph in graphs)
