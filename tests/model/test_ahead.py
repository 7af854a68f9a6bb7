"""Planning one iteration ahead: the replies at depth 2 equal the replies at depth 1.

The tests use the engine, the scheduler, two tiers and a tiny model. Turns use every field of `Sampling`. With
so few pages, turns are suspended, and chunks are moved, dropped and recomputed.
"""

from __future__ import annotations

import random
import re
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pensieve.core.cache import CacheConfig
from pensieve.core.constraint import Constraint, ConstraintKind
from pensieve.core.cost import CostProfile
from pensieve.core.iteration import Iteration, Outcome, SampledToken, SwapIn, SwapOut
from pensieve.core.policies.registry import policy_named
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.core.turn import FinishReason, TurnOptions
from pensieve.engine.engine import Engine, EngineConfigs
from pensieve.engine.mailbox import Mailbox
from pensieve.engine.messages import CancelTurn, EngineEvent, SubmitTurn, TurnAdmitted, TurnEnded
from pensieve.engine.ports import Ports
from pensieve.kernels.layer import cpu as dense
from pensieve.model.batch import Batch
from pensieve.model.executor import TorchExecutor
from pensieve.model.kv.memory import KVMemory
from pensieve.model.loader import LoadedModel, load
from pensieve.model.sampling import draw as draw_module
from pensieve.model.sampling import sampler as sampler_module
from pensieve.model.sampling.sampler import Sampler
from pensieve.sampling import Sampling
from pensieve.sim.executor import VirtualClock
from tests.model.world import GAP_MAX, World, largest_gap, letter_tokenizer, plain_model

FolderOf = Callable[[str], Path]
Loaded = Callable[[str], LoadedModel]

POISON = 50  # a token whose embedding is NaN
EOS = frozenset({5, 17, 60})

ORDINARY = {
    "greedy": Sampling(),
    "temperature": Sampling(temperature=1.0),
    "cold": Sampling(temperature=0.05),
    "top_k": Sampling(temperature=1.0, top_k=7),
    "top_p": Sampling(temperature=1.0, top_p=0.8),
    "min_p": Sampling(temperature=1.5, min_p=0.9),
    "all cuts": Sampling(temperature=1.2, top_k=40, top_p=0.95, min_p=0.02, logprobs=2),
    "repetition": Sampling(repetition_penalty=3.0),
    "repetition below one": Sampling(repetition_penalty=0.5, logprobs=1),
    "presence": Sampling(presence_penalty=0.02),
    "frequency": Sampling(frequency_penalty=0.01, ignore_eos=True),
    "negative frequency": Sampling(temperature=0.05, frequency_penalty=-0.1),
    "bias": Sampling(temperature=1.0, logit_bias=((3, 2.0), (4, -100.0)), logprobs=3),
    "min_tokens": Sampling(min_tokens=6, stop_token_ids=(8,), logit_bias=((8, 50.0),)),
    "min_tokens of one": Sampling(min_tokens=1, logit_bias=((5, 50.0),)),
    "stop string": Sampling(temperature=3.0, stop=("e", "xy")),
    "stop string after min_tokens": Sampling(temperature=3.0, stop=("a", "b"), min_tokens=4),
    "logprobs": Sampling(logprobs=20),
    "repeats itself": Sampling(logit_bias=((9, 100.0),), stop_repetition=8),
    "held to a pattern": Sampling(temperature=1.0, logprobs=2),
    "held to a pattern, greedy": Sampling(repetition_penalty=1.5, logprobs=1),
    "held to a choice": Sampling(temperature=2.0, top_k=50),
    "held to a choice, too short": Sampling(min_tokens=30),
    "held to what no token says": Sampling(temperature=1.0),
    "everything": Sampling(
        temperature=0.9,
        top_k=50,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.4,
        logit_bias=((3, 1.0), (9, -3.0)),
        min_tokens=3,
        stop=("qu",),
        logprobs=4,
    ),
}
PATTERNS = {
    "held to a pattern": "[d-q]{3,20}(ab|c+d)",
    "held to a pattern, greedy": "([a-m]{2}[n-x]){2,5}€?",
    "held to a choice": "yes|no|perhaps",
    "held to a choice, too short": "abc|abd",
    "held to what no token says": "a[A-Z]",
}
FAILING = {
    "fails soon": Sampling(temperature=1.0, logit_bias=((POISON, 3.0),), logprobs=1),
    "fails at once": Sampling(logit_bias=((POISON, 100.0),)),
}


@dataclass
class ClientReply:
    """What a client sees of a turn."""

    tokens: list[int] = field(default_factory=list)
    deltas: list[tuple[object, ...]] = field(default_factory=list)
    finish: FinishReason | None = None
    failure: str | None = None


class Crowd:
    """Several conversations with several turns each. They do not depend on when iterations are planned."""

    def __init__(self, model: LoadedModel, depth: int, cache: CacheConfig, seed: int) -> None:
        self.clock = VirtualClock(1.0)
        self.seed = seed
        cost = CostProfile.analytic(1000, 2, 2, 8, cache.chunk_tokens)
        policy = policy_named("value", cost, cache.chunk_tokens)
        self.memory = KVMemory(
            model.shape, cache.device_pages, cache.host_pages, cache.chunk_tokens
        )
        self.memory.device_arena.fill_(float("nan"))
        self.memory.host_arena.fill_(float("nan"))
        sampler = Sampler(model.shape.vocab_size, EOS)
        self.executor = TorchExecutor(model, self.memory, sampler, letter_tokenizer(), depth)
        self.mailbox = Mailbox()
        configs = EngineConfigs.fitted(cache, SchedulerConfig(48, 12))
        ports = Ports(self.clock, self.mailbox, self)
        self.engine = Engine(configs, policy, self.executor, ports, [self])
        self.scheduler = self.engine.scheduler
        self.turns: dict[int, ClientReply] = {}
        self.cancels: dict[int, int] = {}  # turn -> number of tokens after which it is cancelled
        self.most_launched = 0
        self._num_planned = self._num_committed = 0
        self.events: list[EngineEvent] = []

    # -- the engine's sink and observer --

    def publish(self, events: Sequence[EngineEvent]) -> None:
        self.events.extend(events)

    def published(self, events: Sequence[EngineEvent]) -> None:
        return

    def received(self, message: object, now: float) -> None:
        return

    def planned(self, iteration: Iteration | None, now: float) -> None:
        self._num_planned += iteration is not None
        self.most_launched = max(self.most_launched, self._num_planned - self._num_committed)

    def committed(self, iteration: Iteration, outcome: Outcome, now: float) -> None:
        self._num_committed += 1
        self.scheduler.check(now)

    # -- clients --

    def run(self, samplings: dict[str, Sampling], num_turns: int) -> dict[str, list[ClientReply]]:
        """Run all conversations at once; each sends its turns one after another."""
        logs: dict[str, list[int]] = {name: [] for name in samplings}
        history: dict[str, list[ClientReply]] = {name: [] for name in samplings}
        speaking: dict[int, tuple[str, list[int]]] = {}
        while True:
            for name, sampling in samplings.items():
                number = len(history[name])
                busy = any(each == name for each, _ in speaking.values())
                if number < num_turns and not busy:
                    self._submit(name, number, sampling, logs[name], speaking)
            worked = self.engine.step()
            self.clock.advance(0.1)
            for event in self.events:
                self._hear(event, logs, history, speaking)
            self.events.clear()
            if not worked and not speaking and self.engine.mailbox.closed:
                self.executor.close()
                return history
            if all(len(each) == num_turns for each in history.values()) and not speaking:
                self.mailbox.close()

    def _submit(
        self,
        name: str,
        number: int,
        sampling: Sampling,
        log: list[int],
        speaking: dict[int, tuple[str, list[int]]],
    ) -> None:
        chance = random.Random(f"{name} {number} {self.seed}")
        attempt_id = 100 * number + sorted([*ORDINARY, *FAILING]).index(name)
        prompt = [chance.choice([n for n in range(3, 128) if n != POISON]) for _ in range(9)]
        seed, max_tokens = chance.randrange(2**64), chance.randint(6, 40)
        if chance.random() < 0.15:
            self.cancels[attempt_id] = chance.randint(1, 5)
        tokens = array("I", log + prompt)
        asked = replace(sampling, seed=seed, max_tokens=max_tokens)
        self.turns[attempt_id] = ClientReply()
        speaking[attempt_id] = (name, list(tokens))
        pattern = PATTERNS.get(name)
        constraint = Constraint(ConstraintKind.REGEX, pattern) if pattern else None
        options = TurnOptions(asked, constraint=constraint)
        self.mailbox.put(SubmitTurn(attempt_id, name, tokens.tobytes(), len(log), options))

    def _hear(
        self,
        event: EngineEvent,
        logs: dict[str, list[int]],
        history: dict[str, list[ClientReply]],
        speaking: dict[int, tuple[str, list[int]]],
    ) -> None:
        if isinstance(event, TurnAdmitted):
            return
        assert isinstance(event, SampledToken | TurnEnded)
        said = self.turns[event.attempt_id]
        limit = self.cancels.get(event.attempt_id)
        name, asked = speaking[event.attempt_id]
        if isinstance(event, SampledToken):
            if limit is None or len(said.tokens) < limit:
                said.tokens.append(event.token_id)
                said.deltas.append((event.token_id, event.text, event.logprob, event.top_logprobs))
                if limit == len(said.tokens):
                    self.mailbox.put(CancelTurn(event.attempt_id, len(asked) + limit))
            return
        said.finish, said.failure = event.finish, event.failure
        if limit is not None and len(said.tokens) == limit:
            # The turn may have ended before the cancellation arrived. Compare only the tokens up to it.
            said.finish = FinishReason.CANCELLED
        if said.finish is not FinishReason.FAILED:
            logs[name] = asked + said.tokens
        history[name].append(said)
        del speaking[event.attempt_id]


def poisoned(folder: Path) -> LoadedModel:
    model = load(folder)
    model.flat.module.get_input_embeddings().weight[POISON] = float("nan")
    return model


@pytest.mark.parametrize(
    ("chunk_tokens", "device_pages", "host_pages"),
    [(8, 18, 50), (32, 7, 16)],
    ids=["reference pages", "compiled pages"],
)
def test_every_reply_is_the_same_at_both_depths(
    folder_of: FolderOf, chunk_tokens: int, device_pages: int, host_pages: int
) -> None:
    model = poisoned(folder_of("llama-gqa"))
    exact = chunk_tokens == 32 and dense.available(torch.float32)
    counted = {1: Counter[str](), 2: Counter[str]()}
    finishes: Counter[FinishReason | None] = Counter()
    held: Counter[str] = Counter()
    for seed in range(3):
        heard: dict[int, dict[str, list[ClientReply]]] = {}
        for depth in (1, 2):
            cache = CacheConfig(device_pages, host_pages, chunk_tokens)
            crowd = Crowd(model, depth, cache, seed)
            heard[depth] = crowd.run(ORDINARY | FAILING, num_turns=4)
            counted[depth].update(vars(crowd.scheduler.counters))
            counted[depth].update(vars(crowd.scheduler.cache.counters))
            assert crowd.most_launched == depth
        for name in ORDINARY | FAILING:
            for number, (one, two) in enumerate(zip(heard[1][name], heard[2][name], strict=True)):
                where = f"seed {seed}, turn {number} of {name!r}"
                assert one.tokens == two.tokens, where
                assert (one.finish, one.failure) == (two.finish, two.failure), where
                assert one.deltas == (two.deltas if exact else approximately(two.deltas)), where
                finishes[one.finish] += 1
                if name in PATTERNS and one.finish is FinishReason.STOP:
                    held[name] += 1
                    assert re.fullmatch(PATTERNS[name], "".join(str(d[1]) for d in one.deltas))
                elif name == "held to what no token says" and one.finish is FinishReason.FAILED:
                    held[name] += 1
                    assert (one.failure, len(one.tokens)) == ("CONSTRAINT_FAILED", 1)
    assert min(held[name] for name in PATTERNS) > 2, held
    assert finishes.pop(FinishReason.REPETITION) > 4
    rare = {FinishReason.WARMED, FinishReason.REPETITION}
    assert min(finishes[each] for each in FinishReason if each not in rare) > 20
    wanted = {"suspensions", "resumptions", "recomputed_tokens", "failed", "discarded"}
    wanted |= {"swapped_out", "swapped_in", "dropped"}
    for depth in (1, 2):
        never = sorted(each for each in wanted if not counted[depth][each])
        assert not never, f"never happened at depth {depth}: {never} in {counted[depth]}"
    assert counted[1]["idle_tokens"] == 0
    assert counted[2]["idle_tokens"] > finishes[FinishReason.STOP]


def approximately(deltas: list[tuple[object, ...]]) -> list[tuple[object, ...]]:
    """Allow for rounding in log-probabilities, where products depend on the batch."""
    return [
        (
            token_id,
            text,
            logprob if logprob is None else pytest.approx(logprob, abs=1e-5),
            tuple((each[0], pytest.approx(each[1], abs=1e-5)) for each in top),  # type: ignore[attr-defined]
        )
        for token_id, text, logprob, top in deltas
    ]


# -- the executor, driven by explicit calls ----------------------------------------------------------


def test_replies_at_depth_2_match_plain_transformers(loaded: Loaded, folder_of: FolderOf) -> None:
    """At first, one turn is alone in the batch. Later, holes are recomputed, in one slice and in two.

    The slices include a token that only the device knows.
    """
    world = World(loaded("llama-gqa"), depth=2)
    first, second = world.turn(6), world.turn(5)
    world.launch((first, 0, 6, True))
    world.launch((second, 0, 5, True), (first, 6, 7, True))
    world.collect()
    for _ in range(5):
        slices = [(turn, len(turn.tokens), len(turn.tokens) + 1, True) for turn in (first, second)]
        world.launch(*slices)
        world.collect()
    length = len(first.tokens)
    world.replace_page(first, 1)
    world.launch((first, 4, 8, False), (first, 8, length + 1, True))
    world.collect()
    world.replace_page(first, 0)
    world.replace_page(first, 1)
    world.launch((first, 0, length + 2, True))
    world.collect()
    world.collect()
    world.executor.close()
    assert (first.num_output_tokens, second.num_output_tokens) == (9, 6)
    plain = plain_model(folder_of("llama-gqa"))
    assert largest_gap(plain, first) <= GAP_MAX
    assert largest_gap(plain, second) <= GAP_MAX


def test_a_launch_beyond_the_depth_is_refused(loaded: Loaded) -> None:
    for depth in (None, 1, 2):
        world = World(loaded("llama-gqa"), depth=depth)
        turn = world.turn(6)
        for start in range(depth or 1):
            world.launch((turn, start, start + 1, False))
        with pytest.raises(AssertionError, match="not collected"):
            world.launch((turn, 2, 3, False))
        world.executor.close()


def test_a_failed_row_does_not_affect_later_launches(
    folder_of: FolderOf,
) -> None:
    world = World(poisoned(folder_of("llama-gqa")), depth=2)
    sick, well = world.turn(0, tokens=[7, POISON, 9]), world.turn(4)
    world.launch((sick, 0, 3, True), (well, 0, 4, True))
    world.launch((sick, 3, 4, True), (well, 4, 5, True))
    ((attempt_id, reason, message),) = world.collect(failing=[sick]).failures
    assert (attempt_id, reason) == (sick.attempt_id, "NAN_LOGITS")
    assert message == "the model's logits at position 2 are not finite"
    outcome = world.collect(failing=[sick])
    assert outcome.failures[0].message == "the model's logits at position 3 are not finite"
    assert len(outcome.samples) == 1
    world.executor.close()
    assert largest_gap(plain_model(folder_of("llama-gqa")), well) <= GAP_MAX


def test_only_the_token_id_is_reported_for_a_turn_that_has_ended(loaded: Loaded) -> None:
    """The turn's detokeniser and stop strings stay as they were when the turn ended."""
    world = World(loaded("llama-gqa"), depth=2, eos_token_ids=frozenset(range(128)))
    turn = world.turn(4, sampling=Sampling(logprobs=1))
    world.launch((turn, 0, 4, True))
    world.launch((turn, 4, 5, True))
    (last,) = world.collect().samples
    assert last.stopped
    (idle,) = world.collect().samples
    world.executor.close()
    assert (idle.attempt_id, idle.text, idle.stopped, idle.logprob) == (
        turn.attempt_id,
        "",
        False,
        None,
    )


def test_copies_are_reported_once_whichever_iteration_is_collected_first(loaded: Loaded) -> None:
    world = World(loaded("llama-gqa"), depth=2)
    turn = world.turn(8)
    world.step((turn, 0, 8, True))
    world.launch(swap_outs=[SwapOut(1, turn.page_table[0], 0, 4)])
    world.launch((turn, 8, 9, True), swap_outs=[SwapOut(2, turn.page_table[1], 1, 4)])
    finished = list(world.collect().finished_copies)
    assert finished  # an iteration without slices waits for a copy
    finished += world.collect().finished_copies
    page = world.replace_page(turn, 0)[1]
    if finished != [1, 2]:
        finished += world.step().finished_copies
    assert sorted(finished) == [1, 2]
    world.launch((turn, 9, 10, True), swap_ins=[SwapIn(3, 0, page, 4)])
    world.launch((turn, 10, 11, True))
    finished = [*world.collect().finished_copies, *world.collect().finished_copies]
    world.executor.close()
    assert finished == [3]
    assert bool(world.memory.device_arena[:, page].isfinite().all())


@pytest.mark.parametrize("compiled", [True, False])
def test_launching_never_reads_values_from_the_device(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    """On a GPU, each such question would wait for all earlier launches. Here the CPU stands in for it."""
    if not compiled:
        monkeypatch.setattr(dense, "available", lambda dtype: False)
    for module in (draw_module, sampler_module):
        monkeypatch.setattr(module, "reading_is_free", lambda values: False)
    world = World(loaded("llama-gqa"), depth=2, eos_token_ids=EOS, device_pages=200)
    asked: list[str] = []
    watch = False

    def watched(called: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            nonlocal watch
            watch = True
            try:
                return called(*given)
            finally:
                watch = False

        return call

    def noted(name: str) -> Callable[..., Any]:
        ask = getattr(torch.Tensor, name)

        def call(tensor: torch.Tensor, *given: Any) -> Any:
            if watch:
                asked.append(name)
            return ask(tensor, *given)

        return call

    for name in ("tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, noted(name))
    sampler = world.sampler
    monkeypatch.setattr(sampler, "draw", watched(sampler.draw))
    monkeypatch.setattr(Batch, "from_slices", watched(Batch.from_slices))
    turns = [world.turn(4, sampling=replace(each, seed=3)) for each in ORDINARY.values()]
    world.launch(*((turn, 0, 4, True) for turn in turns))
    world.launch(*((turn, 4, 5, True) for turn in turns))
    assert asked == []
    assert len(world.collect().samples) == len(world.collect().samples) == len(turns)
    world.executor.close()
