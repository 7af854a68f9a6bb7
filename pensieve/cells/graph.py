"""Unfolded requests: graphs of cells, and their partition into subgraphs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias


@dataclass(frozen=True, eq=False)
class CellType:
    """A computation with its own weights and input shapes. Only nodes of one type share a batch.

    If several types could run, the type with the highest priority runs. Later cells of a request
    should have higher priorities than earlier ones.
    """

    name: str
    priority: int = 0
    batch_max: int = 512
    batch_min: int = 1  # a smaller batch runs only as the first task that a worker gets


class Node(NamedTuple):
    """One cell of a request. `inputs` are the indices of earlier nodes whose outputs it reads."""

    cell: CellType
    inputs: tuple[int, ...] = ()
    payload: tuple[int, ...] = ()  # what the request gives to this node: token ids


class Graph:
    """The nodes of a request, in topological order, and their subgraphs.

    A subgraph is a maximal set of connected nodes of one type that waits for other subgraphs only before
    its first node. A chain of encoders and a chain of decoders are two subgraphs. A binary tree with 16
    leaves has 17: each leaf, and all 15 inner nodes together.
    """

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.nodes = tuple(nodes)
        if not self.nodes:
            raise ValueError("a graph needs a node")
        self.consumers: list[list[int]] = [[] for _ in self.nodes]
        self.stages: dict[CellType, list[int]] = {}  # the nodes of each type
        for index, node in enumerate(self.nodes):
            if any(not 0 <= source < index for source in node.inputs):
                raise ValueError(f"node {index} must read earlier nodes, not {node.inputs}")
            for source in node.inputs:
                self.consumers[source].append(index)
            self.stages.setdefault(node.cell, []).append(index)
        self.subgraph_of = self._partition()
        self.subgraphs: list[list[int]] = [[] for _ in range(max(self.subgraph_of, default=-1) + 1)]
        self.awaited: list[set[int]] = [set() for _ in self.subgraphs]
        self.inner_inputs: list[int] = []  # per node, how many inputs are in its own subgraph
        for index, node in enumerate(self.nodes):
            home = self.subgraph_of[index]
            self.subgraphs[home].append(index)
            sources = [self.subgraph_of[source] for source in node.inputs]
            self.inner_inputs.append(sources.count(home))
            self.awaited[home].update(each for each in sources if each != home)
        self.dependents: list[list[int]] = [[] for _ in self.subgraphs]
        for index, awaited in enumerate(self.awaited):
            for source in awaited:
                self.dependents[source].append(index)

    def _partition(self) -> list[int]:
        """Return the subgraph of each node. Nodes are connected if they have equal type and stage.

        The stage counts the changes of type on the way to a node. So no two subgraphs wait for each other.
        """
        stage: list[int] = []
        root = list(range(len(self.nodes)))
        for index, node in enumerate(self.nodes):
            cells = [(source, self.nodes[source].cell is node.cell) for source in node.inputs]
            stage.append(max((stage[source] + (not same) for source, same in cells), default=0))
            for source, same in cells:
                if same and stage[source] == stage[index]:
                    root[_find(root, source)] = _find(root, index)
        numbers: dict[int, int] = {}
        return [numbers.setdefault(_find(root, each), len(numbers)) for each in root]


def _find(root: list[int], node: int) -> int:
    while root[node] != node:
        root[node] = node = root[root[node]]
    return node


def chain(*stages: tuple[CellType, Sequence[tuple[int, ...]]]) -> Graph:
    """Return a chain: for each stage, one node of its type for each payload."""
    cells = [(cell, payload) for cell, payloads in stages for payload in payloads]
    return Graph(
        Node(cell, (index - 1,) if index else (), payload)
        for index, (cell, payload) in enumerate(cells)
    )


Tree: TypeAlias = "int | tuple[Tree, Tree]"  # a token, or two subtrees


def tree(leaf: CellType, inner: CellType, words: Tree) -> Graph:
    """Return the cells of a binary tree, children before parents."""
    nodes: list[Node] = []

    def visit(part: Tree) -> int:
        if isinstance(part, int):
            nodes.append(Node(leaf, (), (part,)))
        else:
            left, right = visit(part[0]), visit(part[1])
            nodes.append(Node(inner, (left, right)))
        return len(nodes) - 1

    visit(words)
    return Graph(nodes)
