"""The engine over the ledger: messages in, events out, and nothing else."""

from __future__ import annotations

import io
import json
import random
import threading
from array import array
from collections import Counter
from collections.abc import Sequence

import pytest

from pensieve.core.cache import CacheConfig, KVCache
from pensieve.core.cost import CostProfile
from pensieve.core.iteration import Iteration, Outcome, SampledToken
from pensieve.core.policies.registry import policy_named
from pensieve.core.sampling import Sampling
from pensieve.core.scheduler import Scheduler, SchedulerConfig
from pensieve.core.turn import FinishReason, TurnOptions
from pensieve.engine.engine import Engine, EngineConfig
from pensieve.engine.journal import Journal, replay
from pensieve.engine.mailbox import Mailbox, Outbox
from pensieve.engine.messages import (
    Answer,
    CancelTurn,
    CheckIntegrity,
    DeleteConversation,
    Event,
    EvictConversation,
    ForkConversation,
    GetStats,
    Message,
    RewindConversation,
    SubmitTurn,
    TurnEnded,
)
from pensieve.engine.ports import Observer
from pensieve.errors import DeviceError, QueueFull, Unavailable
from pensieve.sim.clock import VirtualClock
from tests.fakes import LedgerExecutor, reply_to
from tests.scale import SCALE

COST = CostProfile.analytic(num_parameters=1000, num_layers=2, num_heads=2, head_size=8)
CACHE = CacheConfig(device_pages=12, host_pages=20, chunk_tokens=4)
SCHEDULER = SchedulerConfig(batch_tokens_max=16, turns_max=8)
ENGINE = EngineConfig(context_max=CACHE.device_tokens_max, turns_queued_max=4)


class ListSink:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def publish(self, events: Sequence[Event]) -> None:
        self.events.extend(events)

    def ends(self) -> dict[int, TurnEnded]:
        return {event.turn_id: event for event in self.events if isinstance(event, TurnEnded)}

    def said(self, turn_id: int) -> list[int]:
        deltas = [event for event in self.events if isinstance(event, SampledToken)]
        return [event.token_id for event in deltas if event.turn_id == turn_id]


class Auditor:
    """An observer that checks every invariant after every commit, and counts."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.num_commits = 0
        self.num_ahead = 0  # commits while a later iteration was launched already
        self._num_planned = 0

    def received(self, message: Message, now: float) -> None:
        return

    def planned(self, iteration: Iteration | None, now: float) -> None:
        self._num_planned += iteration is not None

    def committed(self, iteration: Iteration, outcome: Outcome, now: float) -> None:
        self.scheduler.check(now)
        self.num_commits += 1
        self.num_ahead += self._num_planned > self.num_commits

    def published(self, events: Sequence[Event]) -> None:
        return


class Rig:
    def __init__(
        self,
        seed: int = 0,
        journal: io.StringIO | None = None,
        *,
        depth: int = 1,
        failing: float = 0.0,
        stops: bool = True,
    ) -> None:
        self.clock = VirtualClock()
        policy = policy_named("value", COST, CACHE.chunk_tokens)
        self.scheduler = Scheduler(KVCache(CACHE, policy), SCHEDULER)
        self.executor = LedgerExecutor(
            CACHE.device_pages,
            CACHE.host_pages,
            CACHE.chunk_tokens,
            seed,
            failing=failing,
            stops=stops,
            depth=depth,
        )
        self.mailbox, self.sink = Mailbox(), ListSink()
        self.auditor = Auditor(self.scheduler)
        observers: list[Observer] = [self.auditor]
        if journal is not None:
            observers.append(Journal(journal, ENGINE, CACHE, SCHEDULER, "value", COST))
        self.engine = Engine(
            ENGINE, self.scheduler, self.executor, self.clock, self.mailbox, self.sink, observers
        )

    def run(self) -> None:
        while self.engine.step():
            self.clock.advance(0.05)


def packed(tokens: Sequence[int]) -> bytes:
    return array("I", tokens).tobytes()


def options_of(reply: int) -> TurnOptions:
    return TurnOptions(Sampling(max_tokens=reply))


def submit(
    turn_id: int, name: str, log: list[int], prompt: list[int], reply: int = 6
) -> SubmitTurn:
    return SubmitTurn(turn_id, name, packed(log + prompt), len(log), options_of(reply))


def test_a_turn_streams_its_tokens_and_then_ends():
    rig = Rig()
    rig.mailbox.put(submit(1, "a", [], [5, 6, 7], reply=3))
    rig.run()
    expected = reply_to([5, 6, 7], 6)
    assert rig.sink.said(1) == expected
    end = rig.sink.ends()[1]
    assert end.usage.output_tokens == len(expected)
    assert (end.usage.new_tokens, end.usage.prompt_tokens) == (3, 3)
    assert isinstance(rig.sink.events[-1], TurnEnded)


def test_a_second_turn_computes_only_what_is_new():
    rig = Rig()
    rig.mailbox.put(submit(1, "a", [], [5, 6, 7], reply=3))
    rig.run()
    log = [5, 6, 7, *rig.sink.said(1)]
    rig.mailbox.put(submit(2, "a", log, [9, 9], reply=3))
    rig.run()
    usage = rig.sink.ends()[2].usage
    assert usage.device_tokens == len(log) - 1  # all but the last sampled token
    assert usage.new_tokens == 3
    assert usage.recomputed_tokens == 0


@pytest.mark.parametrize("to_host", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_an_eviction_right_after_the_end_is_not_lost(depth: int, to_host: bool):
    """At depth 2 a turn that ends by what it says still has a slice under way, which holds its pages."""
    rig = Rig(depth=depth)
    rig.mailbox.put(submit(1, "a", [], [5, 6, 7], reply=400))  # it stops before
    while 1 not in rig.sink.ends():
        assert rig.engine.step()
        rig.clock.advance(0.05)
    assert rig.sink.ends()[1].finish is FinishReason.STOP
    assert (rig.scheduler.cache.conversations["a"].turn_id is None) == (depth == 1)
    rig.mailbox.put(EvictConversation("a", to_host=to_host, query_id=7))
    rig.run()
    answer = next(event for event in rig.sink.events if isinstance(event, Answer))
    assert answer.figures["chunks"] > 0
    assert {location for _, _, location, _ in rig.scheduler.cache.locations("a")} <= (
        {"host"} if to_host else set()
    )


def test_a_message_turns_a_warm_into_the_turn():
    rig = Rig()
    rig.mailbox.put(submit(1, "a", [], list(range(5, 35)), reply=3))
    rig.run()
    log = [*range(5, 35), *rig.sink.said(1)]
    rig.mailbox.put(EvictConversation("a"))
    rig.mailbox.put(SubmitTurn(2, "a", packed(log), len(log), warm=True))
    rig.engine.step()  # half of it is computed again
    rig.mailbox.put(submit(3, "a", log, [9, 9], reply=3))
    rig.run()
    ends = rig.sink.ends()
    assert ends[2].finish is FinishReason.CANCELLED
    assert ends[3].failure is None
    assert rig.sink.said(3) == reply_to([*log, 9, 9], len(log) + 2 + 3)
    assert 0 < ends[3].usage.recomputed_tokens < len(log) - 1


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (submit(1, "a", [], list(range(44))), "CONTEXT_FULL"),
        (submit(1, "a", [1, 2], []), "NO_TOKENS"),
    ],
)
def test_an_impossible_turn_ends_at_once_and_harms_nobody(message: SubmitTurn, reason: str):
    rig = Rig()
    rig.mailbox.put(message)
    rig.mailbox.put(submit(2, "b", [], [1, 2, 3]))
    rig.run()
    assert rig.sink.ends()[1].failure == reason
    assert rig.sink.said(2) == reply_to([1, 2, 3], 9)


def test_a_second_turn_beside_a_running_one_is_refused():
    rig = Rig()
    rig.mailbox.put(submit(1, "a", [], [1, 2, 3], reply=20))
    rig.mailbox.put(submit(2, "a", [], [4], reply=2))
    rig.run()
    assert rig.sink.ends()[2].failure == "TURN_RUNNING"
    assert rig.sink.ends()[1].failure is None


def test_the_queue_is_bounded_and_says_so():
    rig = Rig()
    for turn_id in range(1, 7):
        rig.mailbox.put(submit(turn_id, f"c{turn_id}", [], [turn_id]))
    rig.run()
    refused = [turn_id for turn_id, end in rig.sink.ends().items() if end.failure == "QUEUE_FULL"]
    assert refused == [5, 6]


def test_the_mailbox_is_bounded_but_takes_what_frees_something():
    box = Mailbox(messages_max=2)
    box.put(GetStats(1))
    box.put(GetStats(2))
    with pytest.raises(QueueFull):
        box.put(GetStats(3))
    box.put(CancelTurn(1, 0))
    box.put(DeleteConversation("a"))
    assert len(box.drain()) == 4
    box.close("bye")
    with pytest.raises(Unavailable, match="bye"):
        box.put(GetStats(4))


def test_queries_are_answered():
    rig = Rig()
    rig.mailbox.put(submit(1, "a", [], [1, 2, 3]))
    rig.run()
    rig.mailbox.put(GetStats(7))
    rig.mailbox.put(CheckIntegrity(8))
    rig.run()
    stats, check = (event for event in rig.sink.events if isinstance(event, Answer))
    assert stats.query_id == 7
    assert stats.figures["new_tokens"] == 3
    assert stats.figures["turns_stop"] + stats.figures["turns_length"] == 1
    assert stats.figures["tokens_idle"] == 0
    assert (check.query_id, check.problems) == (8, ())


def test_integrity_problems_are_named():
    rig = Rig()
    rig.mailbox.put(submit(1, "a", [], [1, 2, 3]))
    rig.run()
    rig.scheduler.cache.device.take()  # a page that nobody holds
    rig.mailbox.put(CheckIntegrity(8))
    rig.run()
    answer = rig.sink.events[-1]
    assert isinstance(answer, Answer)
    assert "disagree" in answer.problems[0]


def test_a_failing_executor_ends_every_turn_and_closes_the_mailbox():
    rig = Rig()

    def launch(iteration: Iteration) -> None:
        raise DeviceError("the device is gone")

    rig.executor.launch = launch  # type: ignore[method-assign]
    rig.mailbox.put(submit(1, "a", [], [1, 2, 3]))
    rig.mailbox.put(submit(2, "b", [], [1, 2, 3]))
    with pytest.raises(DeviceError):
        rig.engine.run()
    assert {end.failure for end in rig.sink.ends().values()} == {"ENGINE_FAILED"}
    assert set(rig.sink.ends()) == {1, 2}
    with pytest.raises(Unavailable):
        rig.mailbox.put(GetStats(1))


def test_the_engine_runs_in_a_thread_until_its_mailbox_closes():
    rig, outbox = Rig(), Outbox()
    rig.engine.sink = outbox
    thread = threading.Thread(target=rig.engine.run)
    thread.start()
    rig.mailbox.put(submit(1, "a", [], [3, 4]))
    said: list[int] = []
    while not isinstance(event := outbox.get(10.0), TurnEnded):
        assert isinstance(event, SampledToken)
        said.append(event.token_id)
    rig.mailbox.close()
    thread.join(60.0)
    assert not thread.is_alive()
    assert said == reply_to([3, 4], 8)


def test_an_outbox_makes_its_writer_wait_when_it_is_full():
    outbox = Outbox(events_max=1)
    outbox.publish([Answer(1)])
    writer = threading.Thread(target=outbox.publish, args=([Answer(2)],))
    writer.start()
    writer.join(0.05)
    assert writer.is_alive()
    assert outbox.get() == Answer(1)
    writer.join(60.0)
    assert outbox.get(5.0) == Answer(2)
    outbox.close()
    assert outbox.get() is None


def traffic(rig: Rig, seed: int, num_messages: int, reply_max: int = 9) -> None:
    """Several conversations at once, with everything that a client may ask for."""
    choose = random.Random(seed)
    logs: dict[str, list[int]] = {}
    prompts: dict[int, tuple[str, list[int]]] = {}
    turn_id, num_names, num_seen = 0, 0, 0
    for _ in range(num_messages):
        running = {name for turn, (name, _) in prompts.items() if turn not in rig.sink.ends()}
        resting = [name for name in logs if name not in running]
        roll = choose.random()
        if roll < 0.6:
            if len(logs) < 6:
                num_names += 1
                logs[f"c{num_names}"] = []
                resting.append(f"c{num_names}")
            if resting:
                turn_id += 1
                name = choose.choice(resting)
                prompt = [choose.randrange(500) for _ in range(choose.randint(1, 9))]
                prompts[turn_id] = (name, logs[name] + prompt)
                reply = choose.randint(1, reply_max)
                rig.mailbox.put(submit(turn_id, name, logs[name], prompt, reply))
        elif roll < 0.7 and running:
            turn, (name, _) = next((t, p) for t, p in prompts.items() if p[0] in running)
            rig.mailbox.put(CancelTurn(turn, len(logs[name])))
        elif roll < 0.8 and resting and len(logs) < 6:
            num_names += 1
            source = choose.choice(resting)
            logs[f"c{num_names}"] = list(logs[source])
            rig.mailbox.put(ForkConversation(source, len(logs[source]), f"c{num_names}"))
        elif roll < 0.85 and resting:
            name = choose.choice(resting)
            del logs[name][len(logs[name]) // 2 :]
            rig.mailbox.put(RewindConversation(name, len(logs[name])))
        elif roll < 0.9 and resting:
            name = choose.choice(resting)
            del logs[name]
            rig.mailbox.put(DeleteConversation(name))
        elif resting:
            rig.mailbox.put(EvictConversation(choose.choice(resting)))
        for _ in range(choose.randint(0, 3)):
            rig.engine.step()
            rig.clock.advance(choose.choice((0.01, 5.0)))
        for event in rig.sink.events[num_seen:]:
            if isinstance(event, TurnEnded):
                name, asked = prompts[event.turn_id]
                said = rig.sink.said(event.turn_id)
                if event.finish in (FinishReason.STOP, FinishReason.LENGTH):
                    assert said == reply_to(asked, len(asked) + len(said))
                    logs[name] = asked + said
        num_seen = len(rig.sink.events)
    rig.run()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_a_journal_replays_to_the_same_iterations(seed: int, depth: int):
    lines = io.StringIO()
    rig = Rig(seed, lines, depth=depth, failing=0.02)
    traffic(rig, seed, 60)
    lines.seek(0)
    assert replay(lines) == rig.scheduler.counters.iterations > 60


def test_a_journal_tells_how_far_planning_ran_ahead():
    lines = io.StringIO()
    rig = Rig(0, lines, depth=2, stops=False)
    rig.mailbox.put(submit(1, "a", [], [1, 2, 3], reply=3))
    rig.run()
    kinds = [next(iter(json.loads(line))) for line in lines.getvalue().splitlines()[1:]]
    ahead = ["message", "plan", "plan", "commit", "plan", "commit", "plan", "commit", "plan"]
    assert kinds == ahead
    lines.seek(0)
    assert replay(lines) == 3


# -- one iteration ahead ----------------------------------------------------------------------------


def test_the_next_iteration_is_launched_before_the_present_one_is_collected():
    told: list[str] = []
    rig = Rig(depth=2, stops=False)
    launch, collect = rig.executor.launch, rig.executor.collect

    def noted_launch(iteration: Iteration) -> None:
        told.append(f"launch {iteration.index}")
        launch(iteration)

    def noted_collect() -> Outcome:
        told.append("collect")
        return collect()

    rig.executor.launch = noted_launch  # type: ignore[method-assign]
    rig.executor.collect = noted_collect  # type: ignore[method-assign]
    rig.mailbox.put(submit(1, "a", [], [1, 2, 3], reply=3))
    steps = []
    while rig.engine.step():
        steps.append(" ".join(told))
        told.clear()
    assert steps == ["launch 1", "launch 2 collect", "launch 3 collect", "collect"]
    assert told == []
    assert rig.sink.said(1) == reply_to([1, 2, 3], 6, stops=False)
    assert rig.scheduler.counters.idle_tokens == 0  # an end by length is known beforehand


def test_a_turn_that_stops_costs_one_token_for_nothing_when_planning_runs_ahead():
    prompt = next([n] for n in range(99) if len(reply_to([n], 30)) == 4)
    for depth, idle in ((1, 0), (2, 1)):
        rig = Rig(depth=depth)
        rig.mailbox.put(submit(1, "a", [], prompt, reply=29))
        rig.mailbox.put(GetStats(1))
        rig.run()
        assert rig.sink.said(1) == reply_to(prompt, 30)
        assert rig.scheduler.counters.idle_tokens == idle
        assert rig.engine.metrics.figures(1.0)["tokens_idle"] == idle
        assert rig.scheduler.counters.tokens == 1 + 3 + idle


def test_an_iteration_that_waits_for_a_copy_is_collected_when_one_has_finished():
    """With nothing to compute meanwhile; whoever comes then is launched first."""
    rig = Rig(depth=2, stops=False)
    rig.executor.late = 1.0
    rig.mailbox.put(submit(1, "a", [], list(range(20)), reply=2))
    rig.run()
    rig.mailbox.put(EvictConversation("a", to_host=True))
    rig.engine.step()
    assert len(rig.executor.outstanding) == 6  # swap-outs alone: launched, not collected
    rig.mailbox.put(submit(2, "b", [], [1, 2], reply=2))
    rig.engine.step()
    assert len(rig.executor.outstanding) == 5
    assert rig.sink.said(2) == []
    rig.run()
    assert rig.executor.outstanding == []
    assert rig.sink.said(2) == reply_to([1, 2], 4, stops=False)


def test_an_executor_that_fails_ahead_ends_every_turn():
    rig = Rig(depth=2)
    launch = rig.executor.launch

    def failing(iteration: Iteration) -> None:
        if iteration.index == 3:
            raise DeviceError("the device is gone")
        launch(iteration)

    rig.executor.launch = failing  # type: ignore[method-assign]
    rig.mailbox.put(submit(1, "a", [], [1, 2, 3], reply=9))
    rig.mailbox.put(submit(2, "b", [], [1, 2, 3], reply=9))
    with pytest.raises(DeviceError):
        rig.engine.run()
    assert {end.failure for end in rig.sink.ends().values()} == {"ENGINE_FAILED"}
    assert set(rig.sink.ends()) == {1, 2}


@pytest.mark.parametrize("depth", [1, 2])
def test_every_reply_is_right_however_far_planning_runs_ahead(depth: int):
    """Turns, cancels, forks, rewinds, deletions and evictions; every commit is audited."""
    total: Counter[str] = Counter()
    for seed in range(40 * SCALE):
        rig = Rig(seed, depth=depth, failing=0.01 if seed % 2 else 0.0)
        try:
            traffic(rig, seed, 60, reply_max=30)
        except BaseException as error:
            error.add_note(f"seed {seed} at depth {depth}")
            raise
        assert rig.auditor.num_commits == rig.scheduler.counters.iterations
        assert not rig.scheduler.num_turns
        assert rig.executor.outstanding == []
        total.update(vars(rig.scheduler.counters))
        total.update(vars(rig.scheduler.cache.counters))
        total["ahead"] += rig.auditor.num_ahead
    wanted = {"suspensions", "resumptions", "failed", "swapped_in", "dropped", "copied_on_write"}
    never = sorted(each for each in wanted if not total[each])
    assert not never, f"never happened: {never} in {dict(total)}"
    assert (total["ahead"] > 0) == (total["idle_tokens"] > 0) == (depth == 2), dict(total)


def test_a_journal_that_was_tampered_with_is_refused():
    lines = io.StringIO()
    rig = Rig(0, lines)
    rig.mailbox.put(submit(1, "a", [], [1, 2, 3, 4, 5]))
    rig.run()
    assert "[1, 2, 3, 4, 5]" not in lines.getvalue()  # lengths, no ids
    tampered = lines.getvalue().replace('"tokens":20', '"tokens":24')
    with pytest.raises(ValueError, match="replay plans"):
        replay(tampered.splitlines())
    with pytest.raises(ValueError, match="not a journal"):
        replay(["{}"])
