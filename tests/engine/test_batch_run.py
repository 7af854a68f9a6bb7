"""A batch on a real engine: whatever happens, each request gets once the reply that it would get alone."""

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

        def counted(iteration: Iteration) -> None:
            launch(iteration)
            for piece in iteration.slices:
                number = self.run.request_of(piece.attempt_id)
                prompt = len(self.requests[number].tokens) if number is not None else 0
                self.computed_tokens += max(min(piece.stop, prompt) - piece.start, 0)

        self.rig.executor.launch = counted  # type: ignore[method-assign]

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
        news = self.rig.sink.events[self.num_seen :]
        self.num_seen += len(news)
        for event in news:
            result = self.run.take(event)
            if result is not None:
                assert result.request not in self.results, "answered twice"
                self.results[result.request] = result
        return bool(news)

    def finish(self) -> None:
        for _ in range(20_000):
            self.step()
            if self.run.is_done:
                break
        assert self.run.is_done, f"{self.run.num_left} requests are left"
        self.rig.run()
        self.take()

    def check_results(self, but: Sequence[int] = ()) -> None:
        """Check that each request has the reply that it would get alone, and that the engine keeps none."""
        assert sorted(self.results) == list(range(len(self.requests)))
        for number, result in self.results.items():
            if number in but:
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
    one = Bench(family(0, 14, 5) + family(100, 9, 3))
    one.finish()
    one.check_results()
    assert one.computed_tokens == (14 + 5 * 4) + (9 + 3 * 4)
    assert one.run.saved_tokens == 4 * 14 + 2 * 9
    assert one.run.prompt_tokens == 5 * 18 + 3 * 13
    assert one.rig.scheduler.counters.suspensions == 0


def test_a_prefix_that_leaves_no_room_for_a_warm_is_shared_too() -> None:
    """A warm must leave 25 % of the pages free. The first request of a group is an ordinary turn instead."""
    one = Bench(family(0, 28, 4), CacheConfig(10, 0, CHUNK), pages_max=10)
    one.finish()
    one.check_results()
    assert one.computed_tokens == 28 + 4 * 4


def test_identical_requests_share_all_but_the_last_token() -> None:
    one = Bench([request(*range(12)) for _ in range(4)])
    one.finish()
    one.check_results()
    assert one.computed_tokens == 12 + 3 * 1


def test_an_evicted_prefix_is_recomputed_once_by_the_next_request() -> None:
    one = Bench(family(0, 16, 6), pages_max=1)
    while len(one.results) < 3:
        one.step()
    assert one.run.pause() == []
    one.step()  # the ended request is forgotten, and only the opener's conversation has the prefix
    one.put([EvictConversation("~batch/b/0")])
    one.run.resume()
    one.finish()
    one.check_results()
    assert one.computed_tokens == 2 * 16 + 6 * 4


def test_lost_pages_of_a_prefix_are_recomputed_by_one_of_its_holders() -> None:
    """While the batch is paused, a message takes all pages of the prefix but one."""
    one = Bench(family(0, 16, 6), CacheConfig(12, 0, CHUNK), pages_max=10)
    while len(one.results) < 2:
        one.step()
    one.put(one.run.pause())
    one.put([submit(1000, "chat", [], list(range(40)), 3)])
    one.rig.run()
    one.take()
    before, left = one.computed_tokens, one.run.num_left
    one.run.resume()
    one.finish()
    one.check_results()
    assert one.computed_tokens - before == 12 + left * 4


def test_requests_with_different_salts_are_in_different_groups() -> None:
    requests = [
        replace(each, cache_salt="ab"[number % 2]) for number, each in enumerate(family(0, 16, 6))
    ]
    one = Bench(requests, pages_max=1)
    one.finish()
    one.check_results()
    assert one.computed_tokens == 2 * 16 + 6 * 4


def test_a_batch_waits_while_the_queue_is_full() -> None:
    one = Bench(family(0, 8, 12), queued_max=2)
    one.finish()
    one.check_results()
    refused = [
        each
        for each in one.rig.sink.events
        if isinstance(each, TurnEnded) and each.failure == "QUEUE_FULL"
    ]
    assert 0 < len(refused) < 99


def test_a_batch_queues_few_turns_even_if_many_requests_fit_into_memory() -> None:
    requests = [request(n, n + 1) for n in range(WAITING_MAX + 50)]
    one = Bench(requests, CacheConfig(2000, 0, CHUNK), queued_max=WAITING_MAX + 1)
    assert len(one.run.go()) == WAITING_MAX
    one = Bench(requests, CacheConfig(2000, 0, CHUNK), queued_max=WAITING_MAX + 1)
    one.finish()
    one.check_results()
    assert not any(
        isinstance(each, TurnEnded) and each.failure == "QUEUE_FULL" for each in one.rig.sink.events
    )


def test_a_job_fills_the_device_and_a_message_is_served_at_once() -> None:
    """Of 100 pages, each request takes 10. Then a message comes that needs half of the device."""
    requests = [background(request(*range(40 * n, 40 * n + 36), reply=4)) for n in range(30)]
    one = Bench(requests, CacheConfig(100, 0, CHUNK), scheduler=SchedulerConfig(400, 90))
    one.step()
    one.step()
    scheduler = one.rig.scheduler
    assert sum(len(turn.chunks) for turn in scheduler.running.values()) == 100
    one.put([submit(1000, "chat", [], list(range(200)), 3)])
    one.step()
    assert [turn.conversation_id for turn in scheduler.running.values()] == ["chat"]
    assert len(scheduler.suspended) == 10
    assert len(one.rig.sink.reply_of(1000)) == 1
    one.finish()
    one.check_results()
    assert one.rig.sink.reply_of(1000) == reply_to(list(range(200)), 203, False)


def background(one: BatchRequest) -> BatchRequest:
    return replace(one, options=replace(one.options, background=True))


def test_only_the_request_that_is_too_long_is_refused() -> None:
    requests = [request(*range(60)), request(*range(70)), request(1, 2), request()]
    one = Bench(requests, CacheConfig(16, 0, CHUNK))
    one.finish()
    one.check_results(but=(3,))
    assert [one.results[n].failure for n in range(4)] == [
        "CONTEXT_FULL",
        "CONTEXT_FULL",
        None,
        "NO_TOKENS",
    ]


def test_if_the_opener_fails_the_next_request_computes_the_prefix() -> None:
    one = Bench(family(0, 12, 4))
    one.put(one.run.go())
    one.rig.executor.failing_turns.add(1)
    one.finish()
    one.check_results(but=(0,))
    assert (one.results[0].finish, one.results[0].failure) == (FinishReason.FAILED, "NAN_LOGITS")
    assert one.computed_tokens == 2 * 12 + 4 * 4


def test_a_request_whose_turn_is_cancelled_is_computed_again() -> None:
    one = Bench(family(0, 12, 3, reply=9))
    for _ in range(3):
        one.step()
    one.put([CancelTurn(1, 14)])
    one.finish()
    one.check_results()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_batch_can_pause_and_resume_at_any_step(depth: int) -> None:
    for after in range(40):
        one = Bench(family(0, 13, 5) + family(100, 8, 3), pages_max=11, depth=depth)
        for _ in range(after):
            one.step()
        one.put(one.run.pause())
        if after % 2:
            one.rig.run()
            one.take()
            assert one.run.num_active == 0
        one.run.resume()
        one.finish()
        one.check_results()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_batch_survives_the_loss_of_its_engine_at_any_step(depth: int) -> None:
    for after in range(40):
        one = Bench(family(0, 13, 5) + family(100, 8, 3), pages_max=11, depth=depth)
        for _ in range(after):
            one.step()
        one.run.engine_lost()
        assert one.run.num_active == 0
        one.new_engine()
        one.finish()
        one.check_results()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_batch_that_is_stopped_leaves_nothing_in_the_engine(depth: int) -> None:
    for after in range(30):
        one = Bench(family(0, 13, 5) + family(100, 8, 3), pages_max=11, depth=depth)
        for _ in range(after):
            one.step()
        one.put(one.run.stop())
        one.rig.run()
        one.take()
        assert one.run.num_active == 0
        assert [name for name in one.rig.scheduler.cache.conversations if name[0] == "~"] == []
        assert len(one.results) + one.run.num_left == 8


def test_an_engine_that_fails_ends_its_turns_and_the_next_one_computes_them() -> None:
    one = Bench(family(0, 13, 5))
    for _ in range(3):
        one.step()
    one.rig.engine._end_everything()  # `run` does this, too
    one.take()
    assert one.run.num_active == 0
    one.run.engine_lost()
    one.new_engine()
    one.finish()
    one.check_results()


# -- other ways of sharing, for comparison --


def interleaved(*families: list[BatchRequest]) -> list[BatchRequest]:
    return [each for together in zip(*families, strict=True) for each in together]


def test_without_sharing_every_request_is_computed_alone() -> None:
    one = Bench(interleaved(family(0, 16, 4), family(100, 16, 4)), sharing="off")
    one.finish()
    one.check_results()
    assert one.computed_tokens == 8 * 20
    assert one.run.saved_tokens == 0


def test_lru_shares_prefixes_that_earlier_requests_left_in_the_cache() -> None:
    requests = interleaved(family(0, 16, 4), family(100, 16, 4))
    one = Bench(requests, sharing="lru", pages_max=1)
    one.finish()
    one.check_results()
    assert one.computed_tokens == 2 * 16 + 8 * 4
    small = Bench(requests, CacheConfig(8, 0, CHUNK), sharing="lru", pages_max=1)
    small.finish()
    small.check_results()
    assert small.computed_tokens > one.computed_tokens  # two groups do not fit into the cache


# -- anything at any time --


def drawn_requests(choose: random.Random, longest: int) -> list[BatchRequest]:
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
    one = Bench(
        drawn_requests(choose, cache.device_tokens_max),
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
        one.step()
        if one.run.is_done:
            break
        if choose.random() >= restless:
            continue
        roll = choose.random()
        if roll < 0.5:
            prompt = [choose.randrange(900) for _ in range(choose.randint(1, 20))]
            one.put([submit(10_000 + number, f"chat {number}", [], prompt, choose.randint(1, 6))])
        elif roll < 0.6:
            one.put(one.run.pause())
        elif roll < 0.8:
            one.run.resume()
        elif roll < 0.95:
            names = sorted(one.rig.scheduler.cache.conversations)
            if names:
                one.put([EvictConversation(choose.choice(names), choose.random() < 0.3)])
        else:
            one.run.engine_lost()
            one.new_engine()
    one.run.resume()
    one.finish()
    one.check_results()
    return one


@pytest.mark.parametrize("first", range(0, 60 * SCALE, 60))
def test_each_request_has_exactly_one_reply_under_random_faults(first: int) -> None:
    for seed in range(first, first + 60):
        run_random_batch(seed)


@pytest.mark.parametrize("pages_max", [50, 200])
def test_without_faults_every_group_computes_its_prefix_at_most_once(pages_max: int) -> None:
    for seed in range(40):
        requests = drawn_requests(random.Random(seed), 60)
        one = Bench(requests, CacheConfig(200, 0, CHUNK), pages_max=pages_max)
        one.finish()
        one.check_results()
        expected = 0
        for prefix, members in prefix_groups([each.tokens for each in requests]):
            lengths = [len(requests[each].tokens) for each in members]
            if prefix < CHUNK:
                expected += sum(lengths)
            else:  # a request that is not longer than the prefix computes the last token itself
                expected += lengths[0] + sum(max(each - prefix, 1) for each in lengths[1:])
        # Groups may share more than their own prefixes. The last, partly filled chunk of a prefix is found
        # only if one of its latest holders has it.
        assert 0.7 * expected < one.computed_tokens <= 1.1 * expected, f"seed {seed}"


def test_a_journal_of_a_batch_replays_to_the_same_iterations() -> None:
    for seed in range(10):
        requests = drawn_requests(random.Random(seed), 40)
        journal = io.StringIO()
        one = Bench(requests, CacheConfig(14, 6, CHUNK), seed=seed, journal=journal)
        one.finish()
        replay = Replay(journal.getvalue().splitlines())
        assert len(list(replay)) == replay.num_agreed == one.rig.auditor.num_commits


# -- planted faults: each must be found --

Change = Callable[..., Any]


def twice(original: Change, run: BatchRun, active: Any, event: TurnEnded) -> Any:
    result = original(run, active, event)
    if result is not None:
        run._active[event.attempt_id] = active
    return result


def lost_when_cancelled(original: Change, run: BatchRun, active: Any, event: TurnEnded) -> Any:
    if event.finish is FinishReason.CANCELLED:
        del run._active[event.attempt_id]
        return None
    return original(run, active, event)


def partial_reply(original: Change, run: BatchRun, active: Any, event: TurnEnded) -> Any:
    if event.finish is FinishReason.CANCELLED:
        event = TurnEnded(event.attempt_id, event.conversation_id, FinishReason.STOP, event.usage)
    return original(run, active, event)


def nothing_deleted(original: Change, run: BatchRun, conversation_id: str) -> Any:
    original(run, conversation_id)
    return []


@pytest.mark.parametrize(
    ("owner", "name", "change"),
    [
        (BatchRun, "_end", twice),
        (BatchRun, "_end", lost_when_cancelled),
        (BatchRun, "_end", partial_reply),
        (BatchRun, "_delete", nothing_deleted),
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
