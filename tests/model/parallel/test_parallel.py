"""Two ranks over gloo give the same tokens as one rank, and no rank outlives the other."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from pensieve.core.iteration import Iteration, Outcome, PageCopy, PageGroup, Slice, SwapIn, SwapOut
from pensieve.core.turn import Turn
from pensieve.engine.messages import CheckIntegrity
from pensieve.engine.ports import Executor
from pensieve.errors import ConfigError, DeviceError, UnsupportedModel
from pensieve.launch import programs
from pensieve.model.executor import TorchExecutor
from pensieve.model.kv.checksums import PageChecksums
from pensieve.model.kv.memory import KVMemory
from pensieve.model.loader import LoadedModel, check_divisible, load
from pensieve.model.parallel.executor import ParallelExecutor
from pensieve.model.parallel.leader import Leader, Tally
from pensieve.model.parallel.rank_messages import ControlMessage, RankPipe, packed
from pensieve.model.parallel.worker import WorkerExecutor
from tests.conversations.rig import Crowd, Reference, figures, query, started, write_model
from tests.model.streamed_world import StreamedWorld, Streaming
from tests.model.world import CHUNK_TOKENS, GAP_MAX, World, largest_gap, plain_model
from tests.text.families import QWEN_2_5

FolderOf = Callable[[str], Path]
Loaded = Callable[[str], LoadedModel]
CPU = torch.device("cpu")
PAGES: dict[str, Any] = {"device_pages": 320, "host_pages": 160, "staging_pages": 20}
WAIT_SECONDS = 60.0

# At every layer the two processes wait for each other. On a busy machine, each wait takes long.
pytestmark = pytest.mark.timeout(1200)


class ParallelWorld(Streaming):
    """A world whose iterations run on two ranks."""

    def __init__(self, folder: Path, seed: int = 0, kv_dtype: str = "auto") -> None:
        worker_settings = {
            "folder": str(folder),
            "dtype": None,
            "context_max": None,
            "num_threads": 1,
            "kv_dtype": kv_dtype,
            "check_kv": False,
            "int8": False,
        }
        self.leader = Leader(2, CPU, worker_settings, programs.RANK)
        try:
            model = load(folder, rank=self.leader, kv_dtype=kv_dtype)
            self.leader.check_shapes(model.shape)
            super().__init__(model, **PAGES, seed=seed)
            self.begin_streaming()
            self.leader.allocate(**PAGES, chunk_tokens=CHUNK_TOKENS)
        except BaseException:
            self.leader.close()
            raise
        self.own = self.executor
        self.executor = cast("TorchExecutor", ParallelExecutor(self.own, self.leader))

    def start_again(self, seed: int) -> None:
        """Start again like a new world with this seed, with the same ranks."""
        self.rng = random.Random(seed)
        self.memory.device_arena.fill_(float("nan"))
        self.free_pages = list(range(self.memory.device_pages))
        self.rng.shuffle(self.free_pages)
        self.turns = []


@contextmanager
def parallel_world(folder: Path, seed: int = 0, kv_dtype: str = "auto") -> Iterator[ParallelWorld]:
    world = ParallelWorld(folder, seed, kv_dtype)
    try:
        yield world
    finally:
        world.executor.close()


def traffic(world: World, seed: int) -> Counter[str]:
    """Run random slices, swaps, drops, forks and copies, and return how often each happened.

    Chunks are swapped to other pages through the host, or dropped and recomputed. A fork may begin in the
    middle of a chunk. Some copies are waited for, some are not.
    """
    rng = random.Random(seed)
    turns = [world.turn(rng.randint(1, 20)) for _ in range(4)]
    computed = dict.fromkeys(turns, 0)
    counts: Counter[str] = Counter()
    copy_id = 0
    expected: set[int] = set()
    for _ in range(25):
        slices, ins, outs, copies = [], [], [], []
        for turn in list(turns):
            done = computed[turn]
            roll = rng.random()
            if done > CHUNK_TOKENS and roll < 0.25:
                chunk = rng.randrange(-(-done // CHUNK_TOKENS))
                start = chunk * CHUNK_TOKENS
                slots = min(CHUNK_TOKENS, done - start)
                if sum(turn.page_table[chunk] in each.page_table for each in turns) > 1:
                    continue  # a fork has this page, too
                if roll < 0.1:
                    counts["dropped"] += 1
                    world.replace_page(turn, chunk)
                    slices.append((turn, start, start + slots, False))
                else:
                    counts["swapped"] += 1
                    out = SwapOut(copy_id, turn.page_table[chunk], turn.attempt_id, slots)
                    finished = set(world.step(swap_outs=[out]).finished_copies)
                    while copy_id not in finished:  # an earlier copy may finish first
                        assert len(finished) <= copy_id, "it does not finish"
                        finished |= set(world.step().finished_copies)
                    expected -= finished
                    page = world.replace_page(turn, chunk)[1]
                    ins.append(SwapIn(copy_id + 1, turn.attempt_id, page, slots))
                    copy_id += 2
            elif done >= 6 and roll < 0.32 and len(turns) < 8:
                counts["forked"] += 1
                cut = rng.randrange(CHUNK_TOKENS, done)
                fork = world.turn(0, tokens=[*turn.tokens[:cut], 9, 8])
                whole = cut // CHUNK_TOKENS
                fork.page_table[:whole] = turn.page_table[:whole]
                if cut % CHUNK_TOKENS:
                    copies.append(
                        PageCopy(turn.page_table[whole], fork.page_table[whole], cut % CHUNK_TOKENS)
                    )
                turns.append(fork)
                computed[fork] = cut
            elif done >= CHUNK_TOKENS and roll < 0.42:
                counts["copied ahead"] += 1  # no slice waits for this copy
                host_page = 8 + counts["copied ahead"]
                outs.append(SwapOut(copy_id, turn.page_table[0], host_page, CHUNK_TOKENS))
                copy_id += 1
        for turn in turns:
            stop = min(len(turn.tokens), computed[turn] + rng.randint(1, 7))
            slices.append((turn, computed[turn], stop, stop == len(turn.tokens)))
            computed[turn] = stop
        if ins:
            outs = []  # an iteration has swap-ins or swap-outs, but not both
        expected |= {each.copy_id for each in ins} | {each.copy_id for each in outs}
        outcome = world.step(*slices, copies=copies, swap_ins=ins, swap_outs=outs)
        assert expected >= set(outcome.finished_copies)
        expected -= set(outcome.finished_copies)
        while ins and expected:  # host pages are reused only after their copies have finished
            expected -= set(world.step().finished_copies)
    while expected:
        last = world.step().finished_copies
        assert last
        expected -= set(last)
    assert world.step().finished_copies == ()
    return counts


@pytest.mark.parametrize("family", ["mistral", "qwen3-moe"])
def test_two_ranks_sample_the_same_tokens_as_one(
    family: str, folder_of: FolderOf, loaded: Loaded
) -> None:
    """The models have grouped heads or experts, and pages move in every way."""
    folder, model = folder_of(family), loaded(family)
    plain = plain_model(folder)
    with parallel_world(folder) as two:
        assert two.memory.shape.num_kv_heads == model.shape.num_kv_heads // 2
        assert two.memory.page_bytes == model.shape.kv_bytes_per_page(CHUNK_TOKENS) // 2
        for seed in range(3):
            one = World(model, **PAGES, seed=seed)
            two.start_again(seed)
            counts = traffic(one, seed), traffic(two, seed)
            one.executor.close()
            assert counts[0] == counts[1]
            assert all(counts[0][what] for what in ("dropped", "swapped", "forked", "copied ahead"))
            for alone, shared in zip(one.turns, two.turns, strict=True):
                assert shared.num_output_tokens > 3
                assert list(shared.tokens) == list(alone.tokens), f"seed {seed}"
                assert largest_gap(plain, shared) <= GAP_MAX


def test_two_ranks_stream_turns_with_the_same_tokens_as_one(
    folder_of: FolderOf, loaded: Loaded
) -> None:
    """Each rank has its own arenas, for its own heads. There are more groups than arenas."""
    said = []
    with parallel_world(folder_of("mistral")) as two:
        one = StreamedWorld(loaded("mistral"), **PAGES, chunk_tokens=CHUNK_TOKENS)
        for world in (one, two):
            resident = world.turn(0, tokens=[5, 6, 7, 8, 9])
            turns = [world.streamed_turn(0, tokens=range(9, 9 + n)) for n in (7, 30, 11)]
            world.step_groups(
                [(resident, 0, 5, True)], *([(each, 0, len(each.tokens), True)] for each in turns)
            )
            a, b, c = turns
            for _ in range(6):
                world.step_groups([_next(resident)], [_next(a), _next(c)], [_next(b)])
                world.step_groups([], [world.drop(b, 3), _next(b)], [_next(a)], [_next(c)])
            said.append([list(each.tokens) for each in world.turns])
            assert (
                max(largest_gap(plain_model(folder_of("mistral")), each) for each in turns)
                <= GAP_MAX
            )
        one.executor.close()
    assert said[0] == said[1]


def _next(turn: Turn) -> tuple[Turn, int, int, bool]:
    return turn, len(turn.tokens) - 1, len(turn.tokens), True


def test_each_rank_uses_fp8_scales_of_its_own_heads(folder_of: FolderOf, tmp_path: Path) -> None:
    """A single rank would choose the same scales for these heads. Pages move between both tiers."""
    plain = plain_model(folder_of("mistral"))
    group = plain.config.num_attention_heads // plain.config.num_key_value_heads
    for (
        layer
    ) in plain.model.layers:  # make the values of each head larger than those of the previous head
        attention = layer.self_attn
        for head, rows in enumerate(attention.v_proj.weight.data.split(attention.head_dim)):
            rows *= 64.0**head
        for head, rows in enumerate(attention.o_proj.weight.data.split(attention.head_dim, 1)):
            rows /= 64.0 ** (head // group)
    plain.save_pretrained(tmp_path)
    alone = load(tmp_path, kv_dtype="fp8").shape
    with parallel_world(tmp_path, kv_dtype="fp8") as two:
        shape = two.memory.shape
        own = shape.num_kv_heads
        assert own == alone.num_kv_heads // 2
        halves = tuple(tuple(side[:own] for side in layer) for layer in alone.kv_exponents)
        assert shape.kv_exponents == halves
        assert all(len(set(values)) == len(values) > 1 for _, values in alone.kv_exponents)
        assert two.memory.page_bytes == alone.kv_bytes_per_page(CHUNK_TOKENS) // 2
        counts = traffic(two, 0)
        assert all(counts[what] for what in ("dropped", "swapped", "forked"))
        for turn in two.turns:
            ids = torch.tensor([list(turn.tokens)])
            with torch.inference_mode():
                logits = plain(input_ids=ids, use_cache=False).logits[0]
            assert largest_gap(plain, turn) <= 0.1 * float(logits.max() - logits.min())


class CountedClock:
    """Advances by a millisecond at each call, so that equal runs have equal times."""

    def __init__(self) -> None:
        self._num_looks = 0

    def now(self) -> float:
        self._num_looks += 1
        return self._num_looks / 1000


def with_equal_seeds(iteration: Iteration) -> Iteration:
    """Set all seeds to 0: turns without a seed get a random one. Greedy tokens do not depend on seeds."""
    started = (each._replace(sampling=replace(each.sampling, seed=0)) for each in iteration.started)
    return replace(iteration, started=tuple(started))


class Recorder:
    """Records the iterations of an executor, and the copies that each outcome reported."""

    def __init__(self, own: Executor) -> None:
        self.own = own
        self.iterations: list[Iteration] = []
        self.finished: list[tuple[int, ...]] = []

    @property
    def depth(self) -> int:
        return self.own.depth

    def launch(self, iteration: Iteration) -> None:
        self.iterations.append(with_equal_seeds(iteration))
        self.own.launch(iteration)

    def collect(self) -> Outcome:
        outcome = self.own.collect()
        self.finished.append(outcome.finished_copies)
        return outcome


class Replayer(Recorder):
    """Reports each copy in the same iteration as the recorded run. Waits for copies that take longer here."""

    def __init__(self, own: Executor, recorded: Recorder) -> None:
        super().__init__(own)
        assert own.depth == 1, "the replaying executor must have depth 1"
        self._recorded = recorded
        self._unreported: set[int] = set()

    def launch(self, iteration: Iteration) -> None:
        index = len(self.iterations)
        recorded = self._recorded.iterations[index]
        assert with_equal_seeds(iteration) == recorded, (
            f"iteration {index} differs from the recorded iteration"
        )
        super().launch(iteration)

    def collect(self) -> Outcome:
        outcome = super().collect()
        self._unreported.update(outcome.finished_copies)
        due = self._recorded.finished[len(self.finished) - 1]
        while not self._unreported.issuperset(due):
            self.own.launch(Iteration(0, ()))
            finished = self.own.collect().finished_copies
            assert finished, f"none of {due} is outstanding"
            self._unreported.update(finished)
        self._unreported.difference_update(due)
        return replace(outcome, finished_copies=due)


def test_a_whole_engine_on_two_ranks_is_exact(tmp_path: Path) -> None:
    """Every reply equals the reply of plain transformers, and the reply of one rank.

    Chunks are swapped, dropped and recomputed. Turns are suspended and cancelled. Conversations are forked
    and rewound. Plans depend on when copies finish, which differs from run to run. So two ranks run first,
    and their copies are recorded. Then one rank reports each copy at the recorded time. All its iterations
    and tokens must be the same.
    """
    folder = write_model(tmp_path / "model", QWEN_2_5, "qwen3")
    said = []
    recorded: Recorder | None = None
    for num_ranks in ("2", "1"):
        data = tmp_path / f"data{num_ranks}"
        with started(folder, data, tensor_parallel=num_ranks) as runtime:
            engine = runtime.engine
            engine.clock = CountedClock()
            own = engine.executor
            recorder = Recorder(own) if recorded is None else Replayer(own, recorded)
            engine.executor = recorder
            crowd = Crowd(runtime, seed=4, size=16)
            crowd.run(40)
            crowd.rush()
            now = figures(runtime)
            assert query(runtime, CheckIntegrity(2)).problems == ()
            said.append([list(runtime.store.log(name)) for name in crowd.names])
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
        if recorded is not None:
            assert len(recorder.iterations) == len(recorded.iterations)
        recorded = recorder
    assert said[0] == said[1]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def becomes_true(holds: Callable[[], bool]) -> bool:
    """Wait until `holds` is true. Return False only if that takes too long."""
    limit = time.monotonic() + WAIT_SECONDS
    while not holds() and time.monotonic() < limit:
        time.sleep(0.02)
    return holds()


def ends(pid: int) -> bool:
    return becomes_true(lambda: not alive(pid))


def test_a_copy_is_reported_when_the_slowest_rank_has_finished_it(folder_of: FolderOf) -> None:
    with parallel_world(folder_of("mistral")) as world:
        turn = world.turn(8)
        world.step((turn, 0, 8, True))
        (pid,) = world.leader.pids
        os.kill(pid, signal.SIGSTOP)
        out = SwapOut(5, turn.page_table[0], 0, 4)
        world.executor.launch(Iteration(9, (), swap_outs=(out,)))
        finished: list[tuple[int, ...]] = []
        waiting = threading.Thread(
            target=lambda: finished.append(world.executor.collect().finished_copies)
        )
        waiting.start()
        copied = world.memory.host_arena[:, 0]
        assert becomes_true(lambda: not bool(copied.isnan().any())), "rank 0 does not copy"
        waiting.join(0.3)
        assert finished == []
        os.kill(pid, signal.SIGCONT)
        waiting.join(WAIT_SECONDS)
        assert finished == [(5,)]


def test_a_worker_that_dies_is_a_device_error(
    folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    with parallel_world(folder_of("mistral")) as world:
        turn = world.turn(9)
        world.step((turn, 0, 9, True))
        (pid,) = world.leader.pids
        timer = threading.Timer(0.05, os.kill, (pid, signal.SIGKILL))
        timer.start()
        with pytest.raises(DeviceError, match=r"rank 1 ended \(status -9\)"):  # noqa: PT012
            while True:
                world.step((turn, 0, 9, False))
        launched: list[Iteration] = []
        monkeypatch.setattr(world.own, "launch", launched.append)
        with pytest.raises(DeviceError, match="rank 1 ended"):
            world.executor.launch(Iteration(9, ()))
        assert launched == [], "rank 0 must not wait for the dead rank in a collective"
        assert not alive(pid)


def test_the_error_names_the_reason_of_a_failed_worker(folder_of: FolderOf) -> None:
    """A page does not exist, so the worker's copier fails. Rank 0 raises an error with the reason."""
    with parallel_world(folder_of("mistral")) as world:
        (pid,) = world.leader.pids
        world.leader.send_iteration(Iteration(0, (), swap_ins=(SwapIn(0, 999, 0, 4),)))
        turn = world.turn(9)
        with pytest.raises(DeviceError, match="rank 1 failed: copying pages between the tiers"):  # noqa: PT012
            for _ in range(200):
                world.step((turn, 0, 9, False))
        assert ends(pid)


def test_workers_end_with_rank_0(folder_of: FolderOf) -> None:
    """This also holds if rank 0 is killed."""
    program = (
        "import sys, time, pathlib; from tests.model.parallel.test_parallel import ParallelWorld;"
        "world = ParallelWorld(pathlib.Path(sys.argv[1]));"
        "print(world.leader.pids[0], flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(folder_of("mistral"))],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as rank_0:
        assert rank_0.stdout is not None
        pid = int(rank_0.stdout.readline())
        assert alive(pid)
        rank_0.kill()
    assert ends(pid)


def test_a_model_that_cannot_be_divided_is_refused_before_ranks_start(
    folder_of: FolderOf, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match="its 1 KV heads"):
        check_divisible(folder_of("llama-gqa"), 2)
    with pytest.raises(UnsupportedModel, match="no tensor-parallel plan for opt"):
        check_divisible(folder_of("opt"), 2)
    check_divisible(folder_of("mistral"), 2)
    folder = write_model(tmp_path / "model", QWEN_2_5, "mistral")
    with pytest.raises(ConfigError, match="--weights int8 needs a single rank"):
        started(folder, tmp_path / "data", tensor_parallel="2", weights="int8")


def sent(iteration: Iteration, with_tokens: bool = False) -> Iteration:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        RankPipe(ours).write(packed(iteration, with_tokens))
        got = RankPipe(theirs).receive()
    assert isinstance(got, Iteration)
    return got


def test_a_packed_iteration_contains_everything_except_token_ids() -> None:
    tokens = array("I", range(9))
    iteration = Iteration(
        3,
        (
            Slice(7, 4, 7, tokens[4:7], array("i", [5, 2])),
            Slice(8, 0, 3, tokens[:3], array("i", [1]), True),
            Slice(7, 2, 3, tokens[2:3], array("i", [5])),
        ),
        (PageCopy(1, 2, 3),),
        (SwapIn(1 << 40, 4, 5, 4), SwapIn(6, 7, 8, 1)),
        (SwapOut(9, 1, 0, 2),),
        groups=tuple(
            PageGroup(
                first, first + 1, *(array("i", column) for column in ([4, 7], [3, 0], [0, 1]))
            )
            for first in (1, 2)
        ),
    )
    got = sent(iteration)
    assert got.index == 3
    assert (got.copies, got.swap_ins, got.swap_outs) == (
        iteration.copies,
        iteration.swap_ins,
        iteration.swap_outs,
    )
    for one, other in zip(got.slices, iteration.slices, strict=True):
        assert (one.attempt_id, one.start, one.stop) == (other.attempt_id, other.start, other.stop)
        assert one.needs_token == other.needs_token
        assert one.token_ids.tolist() == [0] * (other.stop - other.start)
        assert one.page_table == other.page_table
    assert got.groups == iteration.groups
    assert sent(Iteration(4, ())) == Iteration(4, ())


def test_a_worker_with_a_corrupted_host_page_fails(loaded: Loaded) -> None:
    """The worker cannot have the page recomputed by itself, so all ranks restart."""
    model = loaded("llama-gqa")
    memory = KVMemory(model.shape, 8, 8, CHUNK_TOKENS)
    ours, theirs = socket.socketpair()
    pipe, other_end = RankPipe(ours), RankPipe(theirs)
    worker = WorkerExecutor(model, memory, other_end, PageChecksums(memory.host_arena))
    memory.device_arena.fill_(1.0)
    worker.launch(Iteration(1, (), swap_outs=(SwapOut(1, 2, 3, CHUNK_TOKENS),)))
    assert pipe.receive() == ControlMessage("finished", {"copy_ids": [1]})
    worker.launch(Iteration(2, (), swap_ins=(SwapIn(2, 3, 4, CHUNK_TOKENS),)))
    assert pipe.receive() == ControlMessage("finished", {"copy_ids": [2]})
    memory.host_arena[0, 3, 1, 0, 0, 0] = 2.0
    with pytest.raises(DeviceError, match="has changed since it was written"):
        worker.launch(Iteration(3, (), swap_ins=(SwapIn(3, 3, 5, CHUNK_TOKENS),)))
    ours.close()
    theirs.close()


def test_a_copy_is_finished_when_every_rank_has_reported_it() -> None:
    tally = Tally(3)
    assert tally.take(wait=True) == ()  # with nothing outstanding, the call returns at once
    tally.add([4, 5])
    tally.add([5])
    assert tally.take(wait=False) == ()
    threading.Timer(0.05, tally.add, ([5, 6],)).start()
    assert tally.take(wait=True) == (5,)
    tally.give_up("rank 2 ended")
    with pytest.raises(DeviceError, match="rank 2 ended"):
        tally.take(wait=True)
