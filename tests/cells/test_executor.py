"""Real cells: batched replies equal unbatched ones, and rows are copied only if members change."""

from __future__ import annotations

import dataclasses
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration

from pensieve.cells.baselines import Merging, NodeByNode, Padding
from pensieve.cells.comparison import MODELS as COMPARED
from pensieve.cells.comparison import best_batch, compare, equal
from pensieve.cells.executor import CellServer, Launched, Live, Runner, run_alone
from pensieve.cells.graph import Graph, Node
from pensieve.cells.models import Model, bart, lstm, seq2seq, tree_lstm
from pensieve.cells.scheduler import MAX_TASKS_TO_SUBMIT, NodeRef, Scheduler, Task
from pensieve.cells.workload import random_tree
from pensieve.cli.cells import MODELS as MODEL_NAMES
from pensieve.cli.main import main

VOCAB, SOURCE_MAX, REPLY_MAX = 50, 12, 10


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def tiny_bart() -> Any:
    """Return random weights whose replies depend on the source, and end at several lengths."""
    torch.manual_seed(2)
    config = BartConfig(
        vocab_size=VOCAB,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=32,
        forced_eos_token_id=None,
        init_std=0.8,
        tie_word_embeddings=False,
    )
    whole = BartForConditionalGeneration(config).eval()
    whole.final_logits_bias[0, config.eos_token_id] += 6
    return whole


def sentence(rng: random.Random) -> list[int]:
    return [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, SOURCE_MAX + 1))]


def parse_tree(rng: random.Random) -> Any:
    return random_tree(rng, rng.randrange(1, SOURCE_MAX))


MODELS: dict[str, tuple[Callable[[], Model], Callable[[random.Random], Any]]] = {
    "lstm": (lambda: lstm(16, VOCAB, 8), sentence),
    "seq2seq": (lambda: seq2seq(16, VOCAB, 8), sentence),
    "tree": (lambda: tree_lstm(16, batch_max=8), parse_tree),
    "bart": (lambda: bart(tiny_bart(), SOURCE_MAX, REPLY_MAX, 8), sentence),
}
SERVERS: dict[str, Callable[[Model], CellServer]] = {
    "cellular": CellServer,
    "cellular, two workers": lambda model: CellServer(model, num_workers=2),
    "padding": lambda model: CellServer(model, Padding(4, 8)),
    "padding, two workers": lambda model: CellServer(model, Padding(4, 8), 2),
    "merging": lambda model: CellServer(model, Merging(8)),
    "no batching": lambda model: CellServer(model, NodeByNode(1)),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_replies_of_every_server_equal_unbatched_ones(name: str) -> None:
    make, draw = MODELS[name]
    model, rng = make(), random.Random(1)
    graphs = [model.unfold(draw(rng)) for _ in range(24)]
    alone = [run_alone(model, graph) for graph in graphs]
    if model.eos is not None:
        assert len({len(reply) for reply in alone}) > 2, "replies should end at several lengths"
    for kind, serve in SERVERS.items():
        if not (name == "tree" and kind.startswith("padding")):
            with serve(model) as server:
                futures = [server.submit(graph) for graph in graphs]
                replies = [future.result(60) for future in futures]
            assert all(map(equal, replies, alone)), kind
            assert not server.lives, "slots are freed"


@pytest.mark.parametrize("name", MODELS)
def test_later_cells_of_a_model_have_higher_priorities(name: str) -> None:
    make, draw = MODELS[name]
    graph = make().unfold(draw(random.Random(1)))
    for node in graph.nodes:
        for source in (graph.nodes[index].cell for index in node.inputs):
            assert source is node.cell or source.priority < node.cell.priority


def test_a_state_that_two_cells_read_is_kept_for_both() -> None:
    model = tree_lstm(16)
    leaf, inner = model.cells
    shared = Graph([Node(leaf, (), (5,)), Node(inner, (0, 0)), Node(inner, (0, 1))])
    with CellServer(model, Scheduler(model.cells, max_tasks_to_submit=1)) as server:
        assert equal(server.submit(shared).result(60), run_alone(model, shared))


def test_bart_replies_are_those_of_transformers() -> None:
    whole, rng = tiny_bart(), random.Random(2)
    model = bart(whole, SOURCE_MAX, REPLY_MAX)
    for _ in range(8):
        source = sentence(rng)
        expected = whole.generate(torch.tensor([source]), max_new_tokens=REPLY_MAX, num_beams=1)
        assert run_alone(model, model.unfold(source)) == expected[0, 1:].tolist()


def test_a_reply_ends_at_its_end_token_or_at_its_cap() -> None:
    model = seq2seq(16, VOCAB, eos=-1)
    assert len(run_alone(model, model.unfold([5, 6, 7]))) == 13
    assert len(run_alone(model, model.unfold([5, 6, 7], 4))) == 4


def chain_run(*batches: list[tuple[int, int]]) -> tuple[Runner, dict[int, Live]]:
    """Run batches of (request, node) of three chains."""
    model = lstm(16, VOCAB)
    lives = {each: Live(model.unfold([5 + each, 9, 7])) for each in range(3)}
    runner = Runner(model, lives)
    (kind,) = model.cells
    for batch in batches:
        runner.launch(Task(kind, tuple(NodeRef(*row) for row in batch)))
    for request, live in lives.items():
        for node, slot in live.slots.items():
            prefix = model.unfold([5 + request, 9, 7][: node + 1])
            state = tuple(part[slot.row] for part in slot.states)
            assert equal(state, run_alone(model, prefix)), (request, node)
    return runner, lives


FIRST = [(0, 0), (1, 0), (2, 0)]


@pytest.mark.parametrize(
    ("second", "num_gathers"),
    [
        ([(0, 1), (1, 1), (2, 1)], 0),  # the same members
        ([(0, 1), (1, 1)], 0),  # the last one left: the others are still the first rows
        ([(1, 1), (2, 1)], 1),  # the first one left
        ([(1, 1), (0, 1), (2, 1)], 1),  # another order
    ],
)
def test_inputs_are_gathered_only_if_the_members_change(
    second: list[tuple[int, int]], num_gathers: int
) -> None:
    runner, _ = chain_run(FIRST, second)
    assert runner.num_gathers - 1 == num_gathers  # one for the first nodes


def test_a_request_that_joins_is_gathered_with_the_others() -> None:
    runner, _ = chain_run(FIRST[:2], [(0, 1), (1, 1), (2, 0)], [(0, 2), (1, 2), (2, 1)])
    assert runner.num_gathers == 2


def test_a_request_is_answered_while_later_tasks_of_its_batch_wait() -> None:
    """The task after the short request's last one is launched only when the short request is answered."""
    model, launched = (
        lstm(16, VOCAB),
        [False],
    )  # whether a task had the last node of the short request
    with CellServer(model) as server:
        launch = server.runners[0].launch

        def launch_after_the_answer(task: Task) -> Launched:
            if launched[-1]:
                short.result(10)
            launched.append(any(row == NodeRef(2, 1) for row in task.rows))
            return launch(task)

        server.runners[0].launch = launch_after_the_answer  # type: ignore[method-assign]
        long = server.submit(model.unfold([5] * 100))
        short = server.submit(model.unfold([5] * 2))
        assert len(long.result(60)) == 3


def test_after_the_end_token_no_more_decoders_are_submitted() -> None:
    endless = seq2seq(16, VOCAB, eos=-1)
    graph = endless.unfold([5, 6, 7], 400)
    reply = run_alone(endless, graph)
    assert isinstance(reply, list)
    eos = reply[3]
    model, launched = dataclasses.replace(endless, eos=eos), []
    with CellServer(model) as server:
        launch = server.runners[0].launch

        def note(task: Task) -> Launched:
            launched.append(task)
            return launch(task)

        server.runners[0].launch = note  # type: ignore[method-assign]
        assert server.submit(graph).result(60) == reply[: reply.index(eos) + 1]
        assert server.submit(endless.unfold([5], 1)).result(60), (
            "decoders that still run do no harm"
        )
    assert len(launched) <= 3 + 2 * MAX_TASKS_TO_SUBMIT + 2


def test_a_running_request_keeps_only_the_states_that_cells_will_read() -> None:
    model, kept = lstm(16, VOCAB), []
    with CellServer(model) as server:
        launch = server.runners[0].launch

        def count(task: Task) -> Launched:
            kept.append(max(len(live.slots) for live in server.lives.values()))
            return launch(task)

        server.runners[0].launch = count  # type: ignore[method-assign]
        server.submit(model.unfold([5] * 100)).result(60)
    assert max(kept) <= MAX_TASKS_TO_SUBMIT + 1


def test_requests_that_came_together_are_batched_together(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, submitted, sizes = threading.Event(), threading.Event(), list[int]()

    class Inbox(SimpleQueue[Any]):
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            waiting.set()
            assert submitted.wait(60)
            return super().get(block, timeout)

    class Noting(Merging):
        def schedule(self, worker: int) -> list[Task]:
            tasks = super().schedule(worker)
            sizes.extend(len(task.rows) for task in tasks)
            return tasks

    model = lstm(16, VOCAB)
    monkeypatch.setattr("pensieve.cells.executor.SimpleQueue", Inbox)
    with CellServer(model, Noting()) as server:
        assert waiting.wait(60)
        futures = [server.submit(model.unfold([5])) for _ in range(3)]
        submitted.set()
        for future in futures:
            future.result(60)
    assert sizes == [3]


@pytest.mark.parametrize("kind", SERVERS)
def test_an_error_of_a_cell_fails_the_requests_and_the_server_ends(kind: str) -> None:
    model = lstm(16, VOCAB)
    with SERVERS[kind](model) as server:
        wrong: Future[Any] = server.submit(model.unfold([VOCAB + 1]))
        with pytest.raises(IndexError):
            wrong.result(60)
        with pytest.raises(IndexError):
            server.submit(model.unfold([5])).result(60)


def test_requests_that_arrive_while_a_cell_fails_fail_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cell fails while the server adds the second of three requests that came together."""
    model = lstm(16, VOCAB)
    arrived, failing, failed = threading.Event(), threading.Event(), threading.Event()
    running = threading.Event()

    class Failing(Scheduler):
        def add(self, request: int, graph: Graph) -> None:
            if request == 2:
                assert arrived.wait(60)
            if request == 3:
                failing.set()
                assert failed.wait(60)
            super().add(request, graph)

    def launch(task: Task) -> Launched:
        running.set()
        assert failing.wait(60)
        failed.set()
        raise IndexError("a cell")

    with CellServer(model, Failing(model.cells)) as server:
        server.runners[0].launch = launch  # type: ignore[method-assign]
        futures = [server.submit(model.unfold([5]))]
        assert running.wait(60)
        futures += [server.submit(model.unfold([5])) for _ in range(3)]
        arrived.set()
        for future in futures:
            with pytest.raises(IndexError):
                future.result(60)


def test_the_best_batch_is_a_size_that_was_measured() -> None:
    (cell,) = lstm(16, VOCAB).cells.values()
    assert best_batch(cell, 8, 1) in (1, 2, 4, 8)


@pytest.mark.parametrize("name", ["lstm", "seq2seq", "tree"])
def test_policies_are_compared_and_exact(name: str) -> None:
    found = compare(name, 2)
    names = ["cellular", "padding", "merging", "no batching"]
    assert list(found) == [each for each in names if (name, each) != ("tree", "padding")]
    assert all(each.exact and each.throughput > 0 for each in found.values())
    assert all(each.p50_ms <= each.p90_ms <= each.p99_ms for each in found.values())


def test_the_command_knows_all_models_and_prints_each_policy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert tuple(COMPARED) == MODEL_NAMES
    assert main(["cells", "--model", "lstm", "--requests", "1", "--seeds", "1"]) == 0
    head, *policies = capsys.readouterr().out.strip().splitlines()
    assert head.split()[:3] == ["lstm", "1/CPU", "s"]
    assert [line.split()[-1] for line in policies] == ["yes"] * 4


def test_the_daemon_does_not_import_cells() -> None:
    code = "import sys, pensieve.launch.daemon; print([m for m in sys.modules if 'pensieve.cells' in m])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
