"""A batch on a real engine: whatever happens, each request gets exactly one reply, as if it ran alone."""

from __future__ import annotations

import io
import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from pensieve.core.cache import CacheConfig
from pensieve.core.group_feed import FeedConfig, GroupFeed
from pensieve.core.iteration import Iteration
from pensieve.core.prefix_groups import prefix_groups
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.core.turn import FinishReason, TurnOptions
from pensieve.engine.batch_run import (
    WAITING_MAX,
    BatchRequest,
    BatchRun,
    Finished,
    PrefixSharing,
)
from pensieve.engine.engine import EngineConfig
from pensieve.engine.journal import Replay
from pensieve.engine.messages import CancelTurn, EngineMessage, EvictConversation, TurnEnded
from pensieve.sampling import Sampling
from tests.engine.rig import Rig, submit
from tests.fakes import reply_to
from tests.scale import SCALE

CHUNK = 4
LARGE = CacheConfig(64, 0, CHUNK)


def request(*tokens: int, reply: int = 3) -> BatchRequest:
    return BatchRequest(array("I", tokens), TurnOptions(Sampling(max_tokens=reply)))


def family(
    first: int, prefix: int, number: int, own: int = 4, reply: int = 3
) -> list[BatchRequest]:
    """Return `number` requests that share a prefix of `prefix` tokens."""
    shared = range(first, first + prefix)
    return [
        request(*shared, *(first + 500 + 10 * n + i for i in range(own)), reply=reply)
        for n in range(number)
    ]


class Bench:
    """Runs a batch on an engine, step by step. If the engine is lost, another engine takes over."""

    def __init__(
        self,
        requests: Sequence[BatchRequest],
        cache: CacheConfig = LARGE,
        *,
        seed: int = 0,
        pages_max: int | None = None,  # 1: one request at a time
        queued_max: int = 99,
        sharing: PrefixSharing = "groups",
        **options: Any,
    ) -> None:
        self.requests, self.cache, self.seed, self.options = requests, cache, seed, options
        self.config = EngineConfig(cache.device_tokens_max, queued_max)
        self.numbers = count(1)
        self.run = BatchRun(
            "b",
            requests,
            FeedConfig(pages_max or cache.device_pages, cache.chunk_tokens),
            lambda: next(self.numbers),
            sharing=sharing,
            root="r",
        )
        self.results: dict[int, Finished] = {}
        self.computed_tokens = 0  # computed prompt tokens
        self.new_engine()

    def new_engine(self) -> None:
        options: dict[str, Any] = {"scheduler": SchedulerConfig(16, 8), "stops": False}
        options |= self.options
        self.rig = Rig(self.seed, cache=self.cache, config=self.config, **options)
        self.num_seen = 0
        launch = self.rig.executor.launch

        def count_tokens(iteration: Iteration) -> None:
            launch(iteration)
            for piece in iteration.slices:
                number = self.run.request_of(piece.attempt_id)
                prompt = len(self.requests[number].tokens) if number is not None else 0
                self.computed_tokens += max(min(piece.stop, prompt) - piece.start, 0)

        self.rig.executor.launch = count_tokens  # type: ignore[method-assign]

    def put(self, messages: Sequence[EngineMessage]) -> None:
        for message in messages:
            self.rig.mailbox.put(message)

    def step(self) -> bool:
        """Run one step. Return False if there was nothing to do."""
        self.put(self.run.go())
        self.run.check()
        busy = self.rig.engine.step()
        self.rig.clock.advance(0.05)
        return self.take() or busy

    def take(self) -> bool:
        events = self.rig.sink.events[self.num_seen :]
        self.num_seen += len(events)
        for event in events:
            result = self.run.take(event)
            if result is not None:
                assert result.request not in self.results, "answered twice"
                self.results[result.request] = result
        return bool(events)

    def finish(self) -> None:
        for _ in range(20_000):
            self.step()
            if self.run.is_done:
                break
        assert self.run.is_done, f"{self.run.num_left} requests are left"
        self.rig.run()
        self.take()

    def check_results(self, skip: Sequence[int] = ()) -> None:
        """Check that each reply equals the reply to the request alone, and that no conversation is kept."""
        assert sorted(self.results) == list(range(len(self.requests)))
        for number, result in self.results.items():
            if number in skip:
                continue
            tokens, options = self.requests[number].tokens, self.requests[number].options
            most = self.config.context_max
            if len(tokens) >= most:
                assert result.failure == "CONTEXT_FULL"
                continue
            assert result.failure is None, f"request {number}: {result.failure}"
            length_max = min(len(tokens) + options.sampling.max_tokens, most)
            assert result.token_ids == reply_to(tokens, length_max, self.rig.executor.stops)
        left = [name for name in self.rig.scheduler.cache.conversations if name[0] == "~"]
        assert left == []
        assert self.run.num_active == 0


def test_a_prefix_is_computed_once_and_the_engine_forgets_it_with_the_last_reply() -> None:
    bench = Bench(family(0, 14, 5) + family(100, 9, 3))
    bench.finish()
    bench.check_results()
    assert bench.computed_tokens == (14 + 5 * 4) + (9 + 3 * 4)
    assert bench.run.saved_tokens == 4 * 14 + 2 * 9
    assert bench.run.prompt_tokens == 5 * 18 + 3 * 13
    assert bench.rig.scheduler.counters.suspensions == 0


def test_a_prefix_that_leaves_no_room_for_a_warm_is_shared_too() -> None:
    """A warm must leave 25 % of the pages free. The first request of a group is an ordinary turn instead."""
    bench = Bench(family(0, 28, 4), CacheConfig(10, 0, CHUNK), pages_max=10)
    bench.finish()
    bench.check_results()
    assert bench.computed_tokens == 28 + 4 * 4


def test_identical_requests_share_all_but_the_last_token() -> None:
    bench = Bench([request(*range(12)) for _ in range(4)])
    bench.finish()
    bench.check_results()
    assert bench.computed_tokens == 12 + 3 * 1


def test_an_evicted_prefix_is_recomputed_once_by_the_next_request() -> None:
    bench = Bench(family(0, 16, 6), pages_max=1)
    while len(bench.results) < 3:
        bench.step()
    assert bench.run.pause() == []
    bench.step()  # the ended request is forgotten, and only the opener's conversation has the prefix
    bench.put([EvictConversation("~batch/b/0")])
    bench.run.resume()
    bench.finish()
    bench.check_results()
    assert bench.computed_tokens == 2 * 16 + 6 * 4


def test_lost_pages_of_a_prefix_are_recomputed_by_one_of_its_holders() -> None:
    """While the batch is paused, a message takes all pages of the prefix but one."""
    bench = Bench(family(0, 16, 6), CacheConfig(12, 0, CHUNK), pages_max=10)
    while len(bench.results) < 2:
        bench.step()
    bench.put(bench.run.pause())
    bench.put([submit(1000, "chat", [], list(range(40)), 3)])
    bench.rig.run()
    bench.take()
    before, left = bench.computed_tokens, bench.run.num_left
    bench.run.resume()
    bench.finish()
    bench.check_results()
    assert bench.computed_tokens - before == 12 + left * 4


def test_requests_with_different_salts_are_in_different_groups() -> None:
    requests = [
        replace(each, cache_salt="ab"[number % 2]) for number, each in enumerate(family(0, 16, 6))
    ]
    bench = Bench(requests, pages_max=1)
    bench.finish()
    bench.check_results()
    assert bench.computed_tokens == 2 * 16 + 6 * 4


def test_a_batch_waits_while_the_queue_is_full() -> None:
    bench = Bench(family(0, 8, 12), queued_max=2)
    bench.finish()
    bench.check_results()
    refused = [
        each
        for each in bench.rig.sink.events
        if isinstance(each, TurnEnded) and each.failure == "QUEUE_FULL"
    ]
    assert 0 < len(refused) < 99


def test_a_batch_queues_few_turns_even_if_many_requests_fit_into_memory() -> None:
    requests = [request(n, n + 1) for n in range(WAITING_MAX + 50)]
    bench = Bench(requests, CacheConfig(2000, 0, CHUNK), queued_max=WAITING_MAX + 1)
    assert len(bench.run.go()) == WAITING_MAX
    bench = Bench(requests, CacheConfig(2000, 0, CHUNK), queued_max=WAITING_MAX + 1)
    bench.finish()
    bench.check_results()
    assert not any(
        isinstance(each, TurnEnded) and each.failure == "QUEUE_FULL"
        for each in bench.rig.sink.events
    )


def test_a_job_fills_the_device_and_a_message_is_served_at_once() -> None:
    """Of 100 pages, each request takes 10. Then a message comes that needs half of the device."""
    requests = [background(request(*range(40 * n, 40 * n + 36), reply=4)) for n in range(30)]
    bench = Bench(requests, CacheConfig(100, 0, CHUNK), scheduler=SchedulerConfig(400, 90))
    bench.step()
    bench.step()
    scheduler = bench.rig.scheduler
    assert sum(len(turn.chunks) for turn in scheduler.running.values()) == 100
    bench.put([submit(1000, "chat", [], list(range(200)), 3)])
    bench.step()
    assert [turn.conversation_id for turn in scheduler.running.values()] == ["chat"]
    assert len(scheduler.suspended) == 10
    assert len(bench.rig.sink.reply_of(1000)) == 1
    bench.finish()
    bench.check_results()
    assert bench.rig.sink.reply_of(1000) == reply_to(list(range(200)), 203, False)


def background(each: BatchRequest) -> BatchRequest:
    return replace(each, options=replace(each.options, background=True))


def test_only_the_request_that_is_too_long_is_refused() -> None:
    requests = [request(*range(60)), request(*range(70)), request(1, 2), request()]
    bench = Bench(requests, CacheConfig(16, 0, CHUNK))
    bench.finish()
    bench.check_results(skip=(3,))
    assert [bench.results[n].failure for n in range(4)] == [
        "CONTEXT_FULL",
        "CONTEXT_FULL",
        None,
        "NO_TOKENS",
    ]


def test_if_the_opener_fails_the_next_request_computes_the_prefix() -> None:
    bench = Bench(family(0, 12, 4))
    bench.put(bench.run.go())
    bench.rig.executor.failing_turns.add(1)
    bench.finish()
    bench.check_results(skip=(0,))
    assert (bench.results[0].finish, bench.results[0].failure) == (
        FinishReason.FAILED,
        "NAN_LOGITS",
    )
    assert bench.computed_tokens == 2 * 12 + 4 * 4


def test_a_request_whose_turn_is_cancelled_is_computed_again() -> None:
    bench = Bench(family(0, 12, 3, reply=9))
    for _ in range(3):
        bench.step()
    bench.put([CancelTurn(1, 14)])
    bench.finish()
    bench.check_results()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_batch_can_pause_and_resume_at_any_step(depth: int) -> None:
    for after in range(40):
        bench = Bench(family(0, 13, 5) + family(100, 8, 3), pages_max=11, depth=depth)
        for _ in range(after):
            bench.step()
        bench.put(bench.run.pause())
        if after % 2:
            bench.rig.run()
            bench.take()
            assert bench.run.num_active == 0
        bench.run.resume()
        bench.finish()
        bench.check_results()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_batch_survives_the_loss_of_its_engine_at_any_step(depth: int) -> None:
    for after in range(40):
        bench = Bench(family(0, 13, 5) + family(100, 8, 3), pages_max=11, depth=depth)
        for _ in range(after):
            bench.step()
        bench.run.engine_lost()
        assert bench.run.num_active == 0
        bench.new_engine()
        bench.finish()
        bench.check_results()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_batch_that_is_stopped_leaves_nothing_in_the_engine(depth: int) -> None:
    for after in range(30):
        bench = Bench(family(0, 13, 5) + family(100, 8, 3), pages_max=11, depth=depth)
        for _ in range(after):
            bench.step()
        bench.put(bench.run.stop())
        bench.rig.run()
        bench.take()
        assert bench.run.num_active == 0
        assert [name for name in bench.rig.scheduler.cache.conversations if name[0] == "~"] == []
        assert len(bench.results) + bench.run.num_left == 8


def test_an_engine_that_fails_ends_its_turns_and_the_next_one_computes_them() -> None:
    bench = Bench(family(0, 13, 5))
    for _ in range(3):
        bench.step()
    bench.rig.engine._end_everything()  # `run` does this, too
    bench.take()
    assert bench.run.num_active == 0
    bench.run.engine_lost()
    bench.new_engine()
    bench.finish()
    bench.check_results()


# -- other ways of sharing, for comparison --


def interleaved(*families: list[BatchRequest]) -> list[BatchRequest]:
    return [each for together in zip(*families, strict=True) for each in together]


def test_without_sharing_every_request_is_computed_alone() -> None:
    bench = Bench(interleaved(family(0, 16, 4), family(100, 16, 4)), sharing="off")
    bench.finish()
    bench.check_results()
    assert bench.computed_tokens == 8 * 20
    assert bench.run.saved_tokens == 0


def test_lru_shares_prefixes_that_earlier_requests_left_in_the_cache() -> None:
    requests = interleaved(family(0, 16, 4), family(100, 16, 4))
    bench = Bench(requests, sharing="lru", pages_max=1)
    bench.finish()
    bench.check_results()
    assert bench.computed_tokens == 2 * 16 + 8 * 4
    small = Bench(requests, CacheConfig(8, 0, CHUNK), sharing="lru", pages_max=1)
    small.finish()
    small.check_results()
    assert small.computed_tokens > bench.computed_tokens  # two groups do not fit into the cache


# -- anything at any time --


def random_requests(choose: random.Random, longest: int) -> list[BatchRequest]:
    def words(most: int) -> list[int]:
        return [choose.randrange(900) for _ in range(choose.randint(1, most))]

    found: list[BatchRequest] = []
    instructions = words(longest // 3)
    for _ in range(choose.randint(1, 4)):
        document = instructions + words(longest // 2)
        for _ in range(choose.choice((1, 2, 5))):
            prompt = document + words(longest // 3) if choose.random() < 0.9 else document
            found.append(request(*prompt, reply=choose.randint(1, 9)))
    choose.shuffle(found)
    return found


def run_random_batch(seed: int) -> Bench:
    """Run a batch in a small cache, among other messages, with every event that may occur."""
    choose = random.Random(seed)
    cache = CacheConfig(choose.randint(8, 20), choose.choice((0, 0, 6, 20)), CHUNK)
    bench = Bench(
        random_requests(choose, cache.device_tokens_max),
        cache,
        seed=seed,
        pages_max=choose.randint(4, 2 * cache.device_pages),
        queued_max=choose.choice((2, 99)),
        sharing=choose.choice(("groups", "groups", "groups", "lru", "off")),
        depth=choose.choice((1, 2)),
        stops=choose.random() < 0.5,
    )
    restless = choose.choice((0.0, 0.1, 0.3))
    for number in range(400):
        bench.step()
        if bench.run.is_done:
            break
        if choose.random() >= restless:
            continue
        roll = choose.random()
        if roll < 0.5:
            prompt = [choose.randrange(900) for _ in range(choose.randint(1, 20))]
            bench.put([submit(10_000 + number, f"chat {number}", [], prompt, choose.randint(1, 6))])
        elif roll < 0.6:
            bench.put(bench.run.pause())
        elif roll < 0.8:
            bench.run.resume()
        elif roll < 0.95:
            names = sorted(bench.rig.scheduler.cache.conversations)
            if names:
                bench.put([EvictConversation(choose.choice(names), choose.random() < 0.3)])
        else:
            bench.run.engine_lost()
            bench.new_engine()
    bench.run.resume()
    bench.finish()
    bench.check_results()
    return bench


@pytest.mark.parametrize("first", range(0, 60 * SCALE, 60))
def test_each_request_has_exactly_one_reply_under_random_faults(first: int) -> None:
    for seed in range(first, first + 60):
        run_random_batch(seed)


@pytest.mark.parametrize("pages_max", [50, 200])
def test_without_faults_every_group_computes_its_prefix_at_most_once(pages_max: int) -> None:
    for seed in range(40):
        requests = random_requests(random.Random(seed), 60)
        bench = Bench(requests, CacheConfig(200, 0, CHUNK), pages_max=pages_max)
        bench.finish()
        bench.check_results()
        expected = 0
        for prefix, members in prefix_groups([each.tokens for each in requests]):
            lengths = [len(requests[each].tokens) for each in members]
            if prefix < CHUNK:
                expected += sum(lengths)
            else:  # a request that is not longer than the prefix computes the last token itself
                expected += lengths[0] + sum(max(each - prefix, 1) for each in lengths[1:])
        # Groups may share more than their own prefixes. The last, partly filled chunk of a prefix is found
        # only if one of its latest holders has it.
        assert 0.7 * expected < bench.computed_tokens <= 1.1 * expected, f"seed {seed}"


def test_a_journal_of_a_batch_replays_to_the_same_iterations() -> None:
    for seed in range(10):
        requests = random_requests(random.Random(seed), 40)
        journal = io.StringIO()
        bench = Bench(requests, CacheConfig(14, 6, CHUNK), seed=seed, journal=journal)
        bench.finish()
        replay = Replay(journal.getvalue().splitlines())
        assert len(list(replay)) == replay.num_agreed == bench.rig.auditor.num_commits


# -- planted faults: each must be found --

Change = Callable[..., Any]


def answer_twice(original: Change, run: BatchRun, active: Any, event: TurnEnded) -> Any:
    result = original(run, active, event)
    if result is not None:
        run._active[event.attempt_id] = active
    return result


def lose_cancelled(original: Change, run: BatchRun, active: Any, event: TurnEnded) -> Any:
    if event.finish is FinishReason.CANCELLED:
        del run._active[event.attempt_id]
        return None
    return original(run, active, event)


def accept_partial_reply(original: Change, run: BatchRun, active: Any, event: TurnEnded) -> Any:
    if event.finish is FinishReason.CANCELLED:
        event = TurnEnded(event.attempt_id, event.conversation_id, FinishReason.STOP, event.usage)
    return original(run, active, event)


def delete_nothing(original: Change, run: BatchRun, conversation_id: str) -> Any:
    original(run, conversation_id)
    return []


@pytest.mark.parametrize(
    ("owner", "name", "change"),
    [
        (BatchRun, "_end", answer_twice),
        (BatchRun, "_end", lose_cancelled),
        (BatchRun, "_end", accept_partial_reply),
        (BatchRun, "_delete", delete_nothing),
        (GroupFeed, "take_back", lambda original, feed, number: feed._deactivate(number)),
    ],
)
def test_a_planted_fault_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, change: Change
) -> None:
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda self, *rest: change(original, self, *rest))
    with pytest.raises((AssertionError, KeyError)):
        run_random_batches(60)


def run_random_batches(number: int) -> None:
    for seed in range(number):
        run_random_batch(seed)
