"""A simulated set of conversations around the real scheduler and cache, driven by a seed.

`ScriptedWorld` is the same simulation, driven by explicit calls of a test.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

from pensieve.core.adoption import Adopted, Adoption
from pensieve.core.cache import CacheConfig, KVCache
from pensieve.core.cost import CostProfile, IterationCost
from pensieve.core.identities import Identities
from pensieve.core.iteration import Iteration
from pensieve.core.policies.registry import policy_named
from pensieve.core.policies.return_policy import ReturnPolicy
from pensieve.core.policies.shadow_cache import Order, Trial
from pensieve.core.prefix_tree import Chunk
from pensieve.core.scheduler import PASSES_MAX, Scheduler
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.core.turn import Ended, FinishReason, Turn, TurnOptions
from pensieve.sim.executor import VirtualClock
from tests.fakes import VOCAB, LedgerExecutor, prefixes_of, reply_to

COST = CostProfile.analytic(
    num_parameters=1000, num_layers=2, num_heads=2, head_size=8, chunk_tokens=4
)


# Client actions and their weights.
ORDINARY = {
    "turn": 45,
    "cancel": 5,
    "fork": 5,
    "rewind": 4,
    "delete": 2,
    "warm": 2,
    "evict": 1,
    "nothing": 36,
}
RESTLESS = {
    "turn": 40,
    "cancel": 10,
    "fork": 20,
    "rewind": 5,
    "delete": 8,
    "warm": 5,
    "evict": 5,
    "nothing": 7,
}


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
    damaging: float = 0.0  # probability that a host page turns out damaged
    spoiling: float = 0.0  # probability that a sampling turn finds wrong KV in its own context
    overlap: bool = False  # plan the next iteration before the last one is committed
    conversations: int = 6
    prompt_max: int = 14
    reply_max: int = 12
    stops: bool = True  # False: each reply has its maximum length
    reserve: float = 0.10
    swap_out_below: float = 0.25
    swap_outs_max: int = 64
    copy_share: float = 0.0  # time to copy a chunk between tiers, divided by the time to compute it
    iteration_seconds: float = 0.01  # fixed time of an iteration
    token_seconds: float = 0.0  # time that each token adds
    prompt_seconds_max: float = 0.0
    tbt_seconds: float = 0.0
    time_share: int = 0
    first_come: bool = False
    tile_tokens: int = 1
    key_seconds: float = 0.0  # time that each position adds that a slice reads
    foreseen: float = 1.0  # predicted time of an iteration, divided by the real time
    background: float = 0.0  # probability that a turn belongs to a batch job
    staging_pages: int = 0  # pages of each arena, for streamed turns
    stream: str = "on"
    scope: str = ""  # prefix of all names
    restless: bool = False  # many forks, cancels, deletions and evictions
    twins: float = (
        0.0  # probability that a conversation on the host and a fork of it get a turn together
    )
    adopting: float = 0.0  # probability that KV from another engine arrives
    repeating: float = 0.0  # probability that a message repeats what another conversation has said
    roots: int = 0  # tenants that share chunks by content; 0: no tenant does
    switching: bool = False  # `return` follows another random order whenever a conversation returns


class SwitchingTrial(Trial):
    def __init__(self, policy: ReturnPolicy, seed: int) -> None:
        super().__init__(policy._value_of_bucket, policy._seconds_of)
        self._random = random.Random(seed)

    def _choose(self) -> None:
        self.followed = self._random.choice(list(Order))


# A conversation and its fork begin turns together. Parts of their host KV are lost; the device is too small.
TWINS = Shape(
    twins=0.5,
    damaging=0.5,
    staging_pages=12,
    host_pages=60,
    conversations=12,
    late=0.2,
    device_pages=10,
    batch_tokens_max=64,
    prompt_max=9,
    reply_max=24,
)
# Turns repair holes that forks share, are streamed or suspended, and fail while a repair is being copied.
SPOILED = Shape(
    spoiling=0.02,
    damaging=0.3,
    restless=True,
    conversations=14,
    chunk_tokens=2,
    device_pages=14,
    host_pages=40,
    staging_pages=12,
    swap_out_below=1.0,
    late=0.95,
    turns_max=4,
    time_share=1,
    prompt_max=6,
    reply_max=20,
)


# Conversations of three tenants repeat the same texts. Turns fail, and pages get wrong KV.
REPEATING = Shape(
    repeating=0.7,
    roots=3,
    failing=0.01,
    spoiling=0.01,
    damaging=0.1,
    restless=True,
    conversations=14,
    chunk_tokens=2,
    device_pages=30,
    host_pages=40,
    turns_max=6,
    prompt_max=8,
    reply_max=10,
)


class World:
    """Conversations with known logs, so that every reply can be compared with `reply_to`."""

    def __init__(self, seed: int, shape: Shape) -> None:
        self.random = random.Random(seed)
        self.hints = random.Random(seed)
        self.shape = shape
        self.clock = VirtualClock(1.0)
        cost = replace(COST, copy_seconds=shape.copy_share * COST.chunk_seconds(0))
        cost_policy = policy_named(shape.policy, cost, shape.chunk_tokens)
        if shape.switching:
            assert isinstance(cost_policy, ReturnPolicy)
            cost_policy.trial = SwitchingTrial(cost_policy, seed)
        config = CacheConfig(
            shape.device_pages,
            shape.host_pages,
            shape.chunk_tokens,
            shape.swap_out_below,
            shape.reserve,
            shape.swap_outs_max,
            shape.staging_pages,
        )
        damages = random.Random(seed)
        self.cache = KVCache(config, cost_policy, lambda page: damages.random() >= shape.damaging)
        self.scheduler = Scheduler(
            self.cache,
            SchedulerConfig(
                shape.batch_tokens_max,
                shape.turns_max,
                shape.prompt_seconds_max,
                shape.tbt_seconds,
                IterationCost(
                    shape.foreseen * shape.token_seconds,
                    0.0,
                    0.0,
                    shape.foreseen * shape.key_seconds,
                    shape.foreseen * shape.iteration_seconds,
                    tile_tokens=shape.tile_tokens,
                ),
                shape.time_share,
                shape.stream,
                first_come=shape.first_come,
            ),
        )
        self.executor = LedgerExecutor(
            shape.device_pages,
            shape.host_pages,
            shape.chunk_tokens,
            seed,
            shape.late,
            shape.failing,
            shape.stops,
            staging_pages=shape.staging_pages,
        )
        self.logs: dict[str, list[int]] = {}
        self.commits: dict[str, list[int]] = {}  # lengths of the log after each turn
        self.turns: dict[str, Turn] = {}  # conversation -> running turn
        self.names: dict[int, str] = {}  # attempt_id -> conversation
        self.launched: list[Iteration] = []
        self.latest: Iteration | None = None  # planned in the last step
        self.num_replies = 0
        self.adoptions = random.Random(seed)
        self.spoils = random.Random(seed)
        self.moved: set[str] = set()  # conversations moved to the host, for twins
        self.failed: list[str] = []  # conversations with failed turns, to be asked again
        self.arriving: dict[
            str, int
        ] = {}  # conversation -> number of chunks that have not arrived from another engine
        self.roots: dict[str, str] = {}  # by conversation
        self.said: list[list[int]] = []  # contexts of earlier turns, of all tenants
        self.repeats = random.Random(seed)
        self._num_turns = 0
        self._num_conversations = 0

    # -- what clients do --

    def act(self) -> None:
        """Do one random client action, and let some time pass."""
        actions = RESTLESS if self.shape.restless else ORDINARY
        action = self.random.choices(list(actions), list(actions.values()))[0]
        idle = [name for name in self.logs if name not in self.turns]
        full = len(self.logs) >= self.shape.conversations
        if action == "turn":
            if not full and (not idle or self.random.random() < 0.3):
                self._num_conversations += 1
                name = f"{self.shape.scope}c{self._num_conversations}"
                self.logs[name], self.commits[name] = [], [0]
                idle = [name]
            if idle:
                self.submit(self.random.choice(idle))
        elif action == "cancel" and self.turns:
            self.cancel(self.random.choice(list(self.turns)))
        elif action == "fork" and self.logs and not full:
            name = self.random.choice(list(self.logs))
            # Chunks that the fork shares would not be discarded if the turn failed because of wrong KV.
            if not (
                self.shape.spoiling and name in self.turns and self.turns[name].num_uncommitted
            ):
                self.fork(name)
        elif action == "rewind" and idle:
            name = self.random.choice(idle)
            self.rewind(name, self.random.choice(self.commits[name]))
        elif action == "delete" and self.logs:
            self.delete(self.random.choice(list(self.logs)))
        elif action == "warm" and idle:
            self.submit(self.random.choice(idle), warm=True)
        elif action == "evict" and self.logs:
            leave = self.cache.move_to_host if self.hints.random() < 0.5 else self.cache.evict
            leave(self.random.choice(list(self.logs)), self.clock.now())
        if self.adoptions.random() < self.shape.adopting:
            self._adopt_something()
        if self.shape.twins and self.random.random() < self.shape.twins:
            self._ask_twins()
        while self.failed:
            if (name := self.failed.pop()) in self.logs and name not in self.turns:
                self.submit(name)
        self.clock.advance(self.random.choice((0.0, 0.1, 1.0, 30.0)))

    def submit(
        self,
        name: str,
        warm: bool = False,
        prompt: list[int] | None = None,
        reply_max: int | None = None,
        priority: int = 0,
        share: str = "",
        weight: float = 1.0,
        background: bool = False,
    ) -> None:
        self.arriving.pop(name, None)
        log, longest = self.logs[name], self.cache.config.device_tokens_max
        if prompt is None:
            count = self.random.randint(1, self.shape.prompt_max)
            prompt = [self.random.randrange(VOCAB) for _ in range(count)]
            if self.repeats.random() < self.shape.repeating:
                prompt = self._said_after(log) or prompt
        if warm:
            if not log:
                return
            prompt = []
        if len(log) + len(prompt) >= longest:
            return  # the service would refuse this turn with OUT_OF_RANGE
        if reply_max is None:
            reply_max = self.random.randint(1, self.shape.reply_max)
        self._num_turns += 1
        tokens = array("I", log + prompt)
        if self.shape.restless:
            share = str(crc32(name.encode()) % 3)
            weight = 1.0 + int(share)
        if self.shape.background and self.hints.random() < self.shape.background:
            background = True
        if background:
            share = "~batch"
        turn = Turn(
            attempt_id=self._num_turns,
            conversation_id=name,
            tokens=tokens,
            history_tokens=len(log),
            prompt_end=len(tokens),
            length_max=min(len(tokens) + reply_max, longest),
            options=TurnOptions(
                away_seconds=self.hints.choice((0.3, 30.0)) if self.shape.restless else 0.0,
                priority=self.hints.choice((0, 0, -1, 1)) if self.shape.restless else priority,
                background=background,
            ),
            warm=warm,
            share=share,
            weight=weight,
        )
        if self.shape.roots:
            root = self.roots.setdefault(name, str(self.repeats.randrange(self.shape.roots)))
            conversation = self.cache.conversations.get(name)
            known = conversation.identities if conversation is not None else None
            turn.identities = known.beginning(len(log)) if known else self._identities(root)
            turn.is_temporary = not log and self.repeats.random() < 0.4
        self.names[turn.attempt_id] = name
        self.turns[name] = turn
        self.scheduler.submit(turn, self.clock.now())

    def _identities(self, root: str) -> Identities:
        return Identities(root, self.shape.chunk_tokens)

    def _said_after(self, log: list[int]) -> list[int]:
        """Return tokens that followed this log in an earlier turn, perhaps with a random token at the end."""
        known = [each for each in self.said if each[: len(log)] == log and len(each) > len(log)]
        if not known:
            return []
        rest = self.repeats.choice(known)[len(log) :]
        piece = rest[: self.repeats.randint(1, len(rest))]
        return piece + [self.repeats.randrange(VOCAB)] * (self.repeats.random() < 0.5)

    def cancel(self, name: str) -> None:
        turn = self.turns[name]
        keep = turn.history_tokens
        if not turn.warm and self.random.random() < 0.7 and len(turn.tokens) > turn.prompt_end:
            keep = self.random.randint(turn.prompt_end + 1, len(turn.tokens))
        self.scheduler.cancel(turn.attempt_id, keep, self.clock.now())
        self._take_ends()

    def fork(self, name: str, at: int | None = None) -> str:
        self._num_conversations += 1
        target = f"{self.shape.scope}c{self._num_conversations}"
        if at is None:
            at = self.random.choice(self.commits[name])
        if name in self.roots:
            self.roots[target] = self.roots[name]
        self.logs[target] = self.logs[name][:at]
        self.commits[target] = [length for length in self.commits[name] if length <= at]
        self.cache.fork(name, at, target, self.clock.now())
        return target

    def _ask_twins(self) -> None:
        """Fork a conversation whose KV is on the host, and begin turns of both at once."""
        resting = [name for name in self.logs if self.logs[name] and name not in self.turns]
        moved = [name for name in resting if name in self.moved]
        self.moved.clear()
        if moved:
            name = self.random.choice(moved)
            twin = self.fork(name, len(self.logs[name]))
            self.submit(name)
            self.submit(twin)
        for name in resting:
            if name not in self.turns:
                self.cache.move_to_host(name, self.clock.now())
                self.moved.add(name)

    def rewind(self, name: str, at: int) -> None:
        self.arriving.pop(name, None)
        self.logs[name] = self.logs[name][:at]
        self.commits[name] = [length for length in self.commits[name] if length <= at]
        self.scheduler.rewind(name, at, self.clock.now())

    def delete(self, name: str) -> None:
        self.arriving.pop(name, None)
        self.scheduler.delete(name, self.clock.now())
        self._take_ends()
        if name in self.logs:  # otherwise the end of its only turn has already removed it
            del self.logs[name], self.commits[name]

    # -- what another engine does --

    def _adopt_something(self) -> None:
        """Let some of a conversation's KV arrive from another engine, last chunks first."""
        choose, size = self.adoptions, self.shape.chunk_tokens
        resting = [
            name for name, log in self.logs.items() if len(log) > 1 and name not in self.turns
        ]
        # As if another engine had since run this conversation.
        if resting and choose.random() < 0.4:
            away = choose.choice(resting)
            self.arriving.pop(away, None)
            self.scheduler.delete(away, self.clock.now())
        names = [name for name in resting if name not in self.cache.conversations]
        if self.arriving and (not names or choose.random() < 0.6):
            name = choose.choice(list(self.arriving))
            stop = self.arriving[name]
            first = choose.randrange(stop)
            slots = [choose.choice((size, size, size, 0)) for _ in range(first, stop)]
        elif names:
            name = choose.choice(names)
            kv_tokens = choose.randint(1, len(self.logs[name]) - 1)
            stop = -(-kv_tokens // size)
            first = choose.randrange(stop)
            slots = [choose.choice((size, size, 0)) for _ in range(first, stop - 1)]
            slots.append(kv_tokens - (stop - 1) * size)
        else:
            return
        self.adopt(name, first, slots)

    def adopt(self, name: str, first: int, slots: list[int]) -> list[Adopted]:
        """Let the KV of these chunks arrive."""
        known = self.cache.conversations.get(name)
        if name in self.arriving and known is None:
            del self.arriving[name]  # the chunks that arrived earlier were evicted
            return []
        log = array("I", self.logs[name])
        adopted = Adoption(self.cache).adopt(name, log, first, slots, self.clock.now())
        prefixes = prefixes_of(log)
        size = self.shape.chunk_tokens
        for index, page, num_slots in adopted:
            kept = self.executor.host[page] = [None] * size
            for slot in range(num_slots):
                kept[slot] = (prefixes[index * size + slot + 1], 0)
        self.arriving.pop(name, None)
        if first and name in self.cache.conversations:
            self.arriving[name] = first
        self.scheduler.check(self.clock.now())
        return adopted

    # -- what the engine does --

    def step(self, check: bool = True) -> bool:
        now = self.clock.now()
        before = Places.of(self.scheduler)
        iteration = self.latest = self.scheduler.plan(now)
        if check:
            before.check_order(self.scheduler)
        self._take_ends()
        if iteration is not None:
            assert iteration.num_tokens <= self.shape.batch_tokens_max
            self._spoil_something(iteration)
            self.executor.launch(iteration)
            self.launched.append(iteration)
        if self.launched and (
            iteration is None or not self.shape.overlap or len(self.launched) > 1
        ):
            oldest = self.launched.pop(0)
            self.clock.advance(self.seconds_of(oldest))
            events = self.scheduler.commit(oldest, self.executor.collect(), self.clock.now())
            for each in events:
                if isinstance(each, Ended):
                    self._take(each)
            if check:
                self.scheduler.check(self.clock.now())
                self._check_roots()
            return True
        return iteration is not None

    def _check_roots(self) -> None:
        """Check that no chunk is held by two tenants."""
        for name, conversation in self.cache.conversations.items():
            for branch in conversation.path() if self.shape.roots else ():
                for other in branch.holders:
                    assert self.roots.get(other.conversation_id) == self.roots.get(name), (
                        f"{name} and {other} share {branch}"
                    )

    def _spoil_something(self, iteration: Iteration) -> None:
        """Make a turn fail because of a wrong slot, in a chunk that it holds alone or that it has repaired.

        Repaired chunks that are being copied to the host are the most likely: their copies must not be used.
        """
        if not self.shape.spoiling:
            return
        moving = {swap.source for swap in self.cache.tiers.swaps.values() if not swap.inward}
        for piece in iteration.slices:
            turn = self.scheduler.turn(piece.attempt_id)
            assert turn is not None
            own = [c for c in turn.chunks if c.branch is not None and len(c.branch.holders) == 1]
            repaired = [c for c in turn.chunks if c in turn.discard_if_failed and c not in own]
            at_risk = [chunk for chunk in repaired if chunk in moving]
            likely = max(self.shape.spoiling, 0.7 if at_risk else 0.0)
            suspects = at_risk or [*own, *repaired]
            if not piece.needs_token or not suspects or self.spoils.random() >= likely:
                continue
            chunk = self.spoils.choice(suspects)
            page = chunk.host_page if turn.streamed else chunk.device_page
            assert page is not None
            pages = self.executor.host if turn.streamed else self.executor.device
            self.executor.spoil(pages, page, self.spoils.randrange(self.shape.chunk_tokens))

    def seconds_of(self, iteration: Iteration) -> float:
        shape, num_keys = self.shape, sum(each.stop for each in iteration.slices)
        tokens = shape.token_seconds * iteration.num_tokens
        return shape.iteration_seconds + tokens + shape.key_seconds * num_keys

    def run_until_idle(self, checks_every: int = 1) -> None:
        """Run until there is nothing left to do, and check that every turn has ended."""
        steps = 0
        while self.step(check=steps % checks_every == 0):
            steps += 1
            assert steps < 5000, "turns do not end"
        assert not self.turns, f"never ended: {self.turns}"
        assert not self.scheduler.num_turns

    def _take_ends(self) -> None:
        for ended in self.scheduler.drain_ended():
            self._take(ended)

    def _take(self, ended: Ended) -> None:
        turn, finish = ended.turn, ended.finish
        name, usage = turn.conversation_id, turn.usage
        assert self.turns.pop(name) is turn, "a turn ended twice"
        assert usage.output_tokens == turn.num_output_tokens
        if usage.admitted_at is not None:
            assert usage.prompt_tokens == turn.prompt_end, f"{usage} of {turn.prompt_end} tokens"
            assert min(usage.device_tokens, usage.host_tokens, usage.recomputed_tokens) >= 0
        if finish is FinishReason.FAILED and self.shape.spoiling:
            self.failed.append(name)
        if finish in (FinishReason.FAILED, FinishReason.WARMED):
            return
        if finish is FinishReason.CANCELLED:
            assert turn.log_tokens is not None
            tokens = list(turn.tokens[: turn.log_tokens])
            said = tokens[turn.prompt_end :]
            expected = reply_to(turn.tokens[: turn.prompt_end], turn.length_max, self.shape.stops)
            assert said == expected[: len(said)], f"turn {turn.attempt_id} said something else"
        else:
            tokens = list(turn.tokens)
            expected = reply_to(tokens[: turn.prompt_end], turn.length_max, self.shape.stops)
            assert tokens[turn.prompt_end :] == expected, (
                f"turn {turn.attempt_id} said something else"
            )
            self.num_replies += 1
        if self.shape.repeating:
            self.said = [*self.said[-30:], tokens]
        if turn.is_temporary:
            del self.logs[name], self.commits[name]
        elif len(tokens) > turn.history_tokens:
            self.logs[name] = tokens
            self.commits[name].append(len(tokens))


@dataclass(frozen=True)
class Places:
    """The running, suspended and waiting turns before an iteration is planned."""

    levels: dict[int, int]  # levels of the running turns, by attempt_id
    suspended: list[Turn]
    queued: list[Turn]
    num_preemptions: int
    claimant: Turn | None

    @classmethod
    def of(cls, scheduler: Scheduler) -> Places:
        levels = {turn.attempt_id: turn.level for turn in scheduler.running.values()}
        suspended, queued = list(scheduler.suspended), list(scheduler.queued)
        num_preemptions = scheduler.counters.preemptions
        return cls(levels, suspended, queued, num_preemptions, scheduler.preemption.claimant)

    def check_order(self, scheduler: Scheduler) -> None:
        """Check the order of admission: first come first served in each line of a share.

        A suspended turn resumes before other turns of its level. A turn that gives way to another turn of
        its share was below that turn, and its level rises by one.
        """
        running, queued = scheduler.running, {turn.attempt_id for turn in scheduler.queued}
        still_suspended = {turn.attempt_id for turn in scheduler.suspended}
        # A streamed turn takes no page that another turn waits for.
        admitted = [
            turn for turn in self.queued if turn.attempt_id in running and not turn.streamed
        ]
        for turn in admitted:
            for each in self.queued:
                if each.attempt_id in queued and each.share == turn.share:
                    same_line = scheduler.queued.line_of(each) == scheduler.queued.line_of(turn)
                    assert each.num_passed <= PASSES_MAX
                    passed = same_line and each.arrival < turn.arrival
                    assert not passed or each.num_passed, f"{turn} overtook {each}"
            for each in self.suspended:
                passed = each.attempt_id in still_suspended and each.share == turn.share
                if turn.is_background and each.arrival > turn.arrival:
                    passed = False  # with little room, the earlier turn may keep its pages
                if passed and turn is not self.claimant and not each.moved_back:
                    assert each.level < turn.level, f"{turn} passed {each}"
        for turn in scheduler.turns():
            level = self.levels.get(turn.attempt_id, turn.level)
            assert scheduler.config.time_share or not turn.moved_back, (
                f"{turn} gave way to its equal"
            )
            if turn.level == level:
                continue
            assert turn.level == level + 1
            assert scheduler.counters.preemptions > self.num_preemptions
            waited = [*self.suspended, *self.queued]
            assert any(each.share == turn.share and each.level > level for each in waited), (
                f"{turn} gave way to no turn above it"
            )


class ScriptedWorld(World):
    """A world in which the test decides the length of replies and when copies finish.

    Chunks have 4 slots. A copy finishes when a slice waits for it, when there is nothing else to do, or when
    the test calls `land`.
    """

    def __init__(self, device_pages: int, host_pages: int, seed: int = 0, **shape: Any) -> None:
        settings = {"policy": "lru", "late": 1.0, "stops": False, **shape}
        super().__init__(seed, Shape(device_pages, host_pages, **settings))

    def ask(
        self,
        name: str,
        num_prompt: int,
        num_reply: int = 1,
        prompt: list[int] | None = None,
        away_seconds: float = 0.0,
        priority: int = 0,
        share: str = "",
        weight: float = 1.0,
        background: bool = False,
    ) -> Turn:
        """Submit a turn and return it."""
        self.logs.setdefault(name, [])
        self.commits.setdefault(name, [0])
        prompt = prompt or [self.random.randrange(VOCAB) for _ in range(num_prompt)]
        self.submit(
            name,
            prompt=prompt,
            reply_max=num_reply,
            priority=priority,
            share=share,
            weight=weight,
            background=background,
        )
        turn = self.turns[name]
        turn.options = replace(turn.options, away_seconds=away_seconds)
        return self.turns[name]

    def say(self, name: str, num_prompt: int, num_reply: int = 1) -> Turn:
        """Run a whole turn. Copies continue meanwhile."""
        turn = self.ask(name, num_prompt, num_reply)
        self.until_ended(turn)
        return turn

    def until_ended(self, turn: Turn) -> None:
        while turn.finish is None:
            assert self.step(), "no iteration is left to run"

    def next(self) -> Iteration:
        """Plan, launch, collect and commit one iteration."""
        self.step()
        assert self.latest is not None, "there was nothing to do"
        return self.latest

    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def cancel_at(self, turn: Turn, log_tokens: int) -> None:
        self.scheduler.cancel(turn.attempt_id, log_tokens, self.clock.now())
        self._take_ends()

    def fork_at(self, source: str, num_tokens: int, target: str) -> None:
        self.logs[target] = self.logs[source][:num_tokens]
        self.commits[target] = [0, num_tokens]
        self.cache.fork(source, num_tokens, target, self.clock.now())

    def warm(self, name: str) -> Turn:
        self.submit(name, warm=True)
        return self.turns[name]

    def land(self) -> None:
        self.executor.land()

    @property
    def now(self) -> float:
        return self.clock.now()

    def slices(self) -> list[tuple[str, int, int]]:
        """Return (conversation, start, stop) of each slice in the last step."""
        assert self.latest is not None, "there was nothing to do"
        return [
            (self.names[piece.attempt_id], piece.start, piece.stop) for piece in self.latest.slices
        ]

    def chunks(self, name: str) -> list[Chunk]:
        return self.cache.conversations[name].chunks()

    def where(self, name: str) -> str:
        """Return one letter per chunk: d(irty), c(lean), x (marked to drop), h(ost), - (missing)."""
        conversation = self.cache.conversations.get(name)
        return "".join(letter_of(chunk) for chunk in conversation.chunks()) if conversation else ""


def letter_of(chunk: Chunk) -> str:
    if chunk.device_page is None:
        return "-" if chunk.host_page is None else "h"
    if chunk.marked_to_drop:
        return "x"
    return "c" if chunk.host_filled >= chunk.filled else "d"


def run(seed: int, shape: Shape, actions: int = 60, checks_every: int = 1) -> World:
    """Run random traffic until everything has ended. Check the invariants after commits."""
    world = World(seed, shape)
    for step in range(actions):
        world.act()
        if world.random.random() < 0.7:
            world.step(check=step % checks_every == 0)
    world.run_until_idle(checks_every)
    world.scheduler.check(world.clock.now())
    return world
