"""A small world of conversations around the real scheduler and cache, driven by a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from pensieve.core.cache import CacheConfig, KVCache
from pensieve.core.cost import CostProfile
from pensieve.core.iteration import Iteration
from pensieve.core.retention import policy_named
from pensieve.core.sampling import Sampling
from pensieve.core.scheduler import Progress, Scheduler, SchedulerConfig, tokens_of
from pensieve.core.turn import FinishReason, Turn
from tests.fakes import VOCAB, LedgerExecutor, VirtualClock, reply_to

COST = CostProfile.analytic(
    num_parameters=1000, num_layers=2, num_heads=2, head_size=8, chunk_tokens=4
)


@dataclass(frozen=True)
class Shape:
    device_pages: int = 12
    host_pages: int = 10
    chunk_tokens: int = 4
    batch_tokens_max: int = 16
    turns_max: int = 8
    policy: str = "value"
    late: float = 0.5
    failing: float = 0.0
    overlap: bool = False  # plan the next iteration while one is uncommitted
    conversations: int = 6
    prompt_max: int = 14
    reply_max: int = 12


class World:
    """Conversations whose logs are known, so every reply can be held against `reply_to`."""

    def __init__(self, seed: int, shape: Shape) -> None:
        self.random = random.Random(seed)
        self.shape = shape
        self.clock = VirtualClock(1.0)
        cost_policy = policy_named(shape.policy, COST, shape.chunk_tokens)
        config = CacheConfig(shape.device_pages, shape.host_pages, shape.chunk_tokens)
        self.cache = KVCache(config, cost_policy)
        self.scheduler = Scheduler(
            self.cache, SchedulerConfig(shape.batch_tokens_max, shape.turns_max)
        )
        self.executor = LedgerExecutor(
            shape.device_pages,
            shape.host_pages,
            shape.chunk_tokens,
            seed,
            shape.late,
            shape.failing,
        )
        self.logs: dict[str, list[int]] = {}
        self.commits: dict[str, list[int]] = {}  # lengths of the log after each turn
        self.turns: dict[str, Turn] = {}  # running, by conversation
        self.launched: list[Iteration] = []
        self.num_replies = 0
        self._num_turns = 0
        self._num_conversations = 0

    # -- what clients do --

    def act(self) -> None:
        roll = self.random.random()
        idle = [name for name in self.logs if name not in self.turns]
        if roll < 0.45:
            if len(self.logs) < self.shape.conversations and (
                not idle or self.random.random() < 0.3
            ):
                self._num_conversations += 1
                name = f"c{self._num_conversations}"
                self.logs[name], self.commits[name] = [], [0]
                idle = [name]
            if idle:
                self.submit(self.random.choice(idle))
        elif roll < 0.50 and self.turns:
            self.cancel(self.random.choice(list(self.turns)))
        elif roll < 0.55 and self.logs and len(self.logs) < self.shape.conversations:
            self.fork(self.random.choice(list(self.logs)))
        elif roll < 0.59 and idle:
            name = self.random.choice(idle)
            self.rewind(name, self.random.choice(self.commits[name]))
        elif roll < 0.61 and self.logs:
            self.delete(self.random.choice(list(self.logs)))
        elif roll < 0.63 and idle:
            self.submit(self.random.choice(idle), warm=True)
        elif roll < 0.64 and idle:
            self.cache.evict(self.random.choice(idle), self.clock.now())
        self.clock.advance(self.random.choice((0.0, 0.1, 1.0, 30.0)))

    def submit(self, name: str, warm: bool = False, prompt: list[int] | None = None) -> None:
        log, longest = self.logs[name], self.cache.config.device_tokens_max
        if prompt is None:
            count = self.random.randint(1, self.shape.prompt_max)
            prompt = [self.random.randrange(VOCAB) for _ in range(count)]
        if warm:
            if not log:
                return
            prompt = []
        if len(log) + len(prompt) >= longest:
            return  # the service refuses it: OUT_OF_RANGE
        self._num_turns += 1
        tokens = tokens_of(log + prompt)
        turn = Turn(
            turn_id=self._num_turns,
            conversation_id=name,
            tokens=tokens,
            history_tokens=len(log),
            prompt_end=len(tokens),
            length_max=min(len(tokens) + self.random.randint(1, self.shape.reply_max), longest),
            sampling=Sampling(),
            warm=warm,
        )
        self.turns[name] = turn
        self.scheduler.submit(turn, self.clock.now())

    def cancel(self, name: str) -> None:
        turn = self.turns[name]
        keep = turn.history_tokens
        if not turn.warm and self.random.random() < 0.7 and len(turn.tokens) > turn.prompt_end:
            keep = self.random.randint(turn.prompt_end + 1, len(turn.tokens))
        self.scheduler.cancel(turn.turn_id, keep, self.clock.now())
        self._take_ends()

    def fork(self, name: str) -> None:
        self._num_conversations += 1
        target = f"c{self._num_conversations}"
        at = self.random.choice(self.commits[name])
        self.logs[target] = self.logs[name][:at]
        self.commits[target] = [length for length in self.commits[name] if length <= at]
        self.cache.fork(name, at, target, self.clock.now())

    def rewind(self, name: str, at: int) -> None:
        self.logs[name] = self.logs[name][:at]
        self.commits[name] = [length for length in self.commits[name] if length <= at]
        self.scheduler.rewind(name, at, self.clock.now())

    def delete(self, name: str) -> None:
        self.scheduler.delete(name, self.clock.now())
        self._take_ends()
        del self.logs[name], self.commits[name]

    # -- what the engine does --

    def step(self, check: bool = True) -> bool:
        now = self.clock.now()
        iteration = self.scheduler.plan(now)
        self._take_ends()
        if iteration is not None:
            assert iteration.num_tokens <= self.shape.batch_tokens_max
            self.executor.launch(iteration)
            self.launched.append(iteration)
        if self.launched and (
            iteration is None or not self.shape.overlap or len(self.launched) > 1
        ):
            self.clock.advance(0.01)
            oldest = self.launched.pop(0)
            progress = self.scheduler.commit(oldest, self.executor.collect(), self.clock.now())
            for each in progress:
                self._take(each)
            if check:
                self.scheduler.check(self.clock.now())
            return True
        return iteration is not None

    def settle(self) -> None:
        """Run until nothing is left to do; every turn ends."""
        steps = 0
        while self.step():
            steps += 1
            assert steps < 5000, "turns do not end"
        assert not self.turns, f"never ended: {self.turns}"
        assert not self.scheduler.num_turns

    def _take_ends(self) -> None:
        for progress in self.scheduler.drain_ended():
            self._take(progress)

    def _take(self, progress: Progress) -> None:
        turn, finish = progress.turn, progress.finish
        if finish is None:
            return
        name = turn.conversation_id
        assert self.turns.pop(name) is turn, "a turn ended twice"
        if finish in (FinishReason.FAILED, FinishReason.WARMED):
            return
        if finish is FinishReason.CANCELLED:
            assert turn.keep_tokens is not None
            tokens = list(turn.tokens[: turn.keep_tokens])
            said = tokens[turn.prompt_end :]
            expected = reply_to(turn.tokens[: turn.prompt_end], turn.length_max)
            assert said == expected[: len(said)], f"turn {turn.turn_id} said something else"
        else:
            tokens = list(turn.tokens)
            expected = reply_to(tokens[: turn.prompt_end], turn.length_max)
            assert tokens[turn.prompt_end :] == expected, f"turn {turn.turn_id} said something else"
            self.num_replies += 1
        if len(tokens) > turn.history_tokens:
            self.logs[name] = tokens
            self.commits[name].append(len(tokens))


def run(seed: int, shape: Shape, actions: int = 60) -> World:
    world = World(seed, shape)
    for _ in range(actions):
        world.act()
        if world.random.random() < 0.7:
            world.step()
    world.settle()
    return world
