"""What runs next: turns over chunks of 4 tokens and a few pages."""

from __future__ import annotations

import pytest

from pensieve.core.cost import CostProfile
from pensieve.core.iteration import Outcome, SampledToken, TurnFailure
from pensieve.core.policies.lru import LruPolicy
from pensieve.core.policies.registry import policy_named
from pensieve.core.policies.value import ValuePolicy
from pensieve.core.scheduler import SchedulerConfig, tokens_of
from pensieve.core.turn import PRIORITY_ARRIVALS, FinishReason, Turn, TurnState
from tests.core.world import Shape, Stage, World

# -- one turn --


def test_a_first_turn_is_one_prefill_and_then_one_token_at_a_time() -> None:
    stage = Stage(8, 0)
    turn = stage.ask("a", 6, 3)
    seen = []
    while turn.finish is None:
        stage.next()
        seen += stage.slices()
    assert seen == [("a", 0, 6), ("a", 6, 7), ("a", 7, 8)]
    assert turn.finish is FinishReason.LENGTH
    assert len(turn.tokens) == 9
    assert (turn.usage.output_tokens, turn.usage.new_tokens) == (3, 6)


def test_the_last_sampled_token_is_fed_with_the_next_turn_and_counts_as_new() -> None:
    stage = Stage(8, 0)
    stage.say("a", 4, 3)
    turn = stage.ask("a", 2)
    stage.next()
    assert stage.slices() == [("a", 6, 9)]
    usage = turn.usage
    assert (usage.device_tokens, usage.new_tokens, usage.recomputed_tokens) == (6, 3, 0)


def test_a_turn_that_reaches_length_max_ends() -> None:
    """A lone turn may fill the device but for one page, and ends with LENGTH at the limit."""
    stage = Stage(6, 0)
    turn = stage.say("a", 1, 1000)
    assert len(turn.tokens) == stage.cache.config.device_tokens_max == 20
    assert turn.finish is FinishReason.LENGTH
    assert turn.usage.suspensions == 0


def test_times_are_those_of_the_engine() -> None:
    stage = Stage(8, 0)
    turn = stage.ask("a", 2, 2)
    stage.wait(3.0)
    stage.until_ended(turn)
    usage = turn.usage
    assert (usage.submitted_at, usage.admitted_at) == (1.0, 4.0)
    assert usage.first_token_at == pytest.approx(4.01)
    assert usage.finished_at == pytest.approx(4.02)


# -- whose turn it is --


def test_a_higher_priority_is_served_before_those_who_wait_longer() -> None:
    stage = Stage(3, 0)
    first = stage.ask("a", 5)
    stage.next()
    low, high = stage.ask("b", 5), stage.ask("c", 5, priority=1)
    assert [turn.conversation_id for turn in stage.scheduler.queued] == ["c", "b"]
    stage.until_ended(low)
    assert first.usage.finished_at is not None
    assert high.usage.admitted_at is not None
    assert low.usage.admitted_at is not None
    assert first.usage.finished_at <= high.usage.admitted_at < low.usage.admitted_at


def test_nobody_is_overtaken_for_ever() -> None:
    stage = Stage(3, 0)
    low = stage.ask("low", 2)
    for number in range(70):
        stage.ask(f"high{number}", 2, priority=1)
    waiting = [turn.conversation_id for turn in stage.scheduler.queued]
    assert waiting.index("low") == PRIORITY_ARRIVALS - 1
    stage.run_until_idle()
    assert low.usage.finished_at is not None


# -- one budget for all --


def test_a_long_prefill_is_cut_and_decodes_ride_along_in_every_iteration() -> None:
    stage = Stage(20, 0, batch_tokens_max=8)
    stage.ask("a", 2, 10)
    stage.next()
    stage.ask("b", 20, 2)
    seen = []
    for _ in range(4):
        stage.next()
        seen.append(stage.slices())
    assert seen == [
        [("a", 2, 3), ("b", 0, 7)],
        [("a", 3, 4), ("b", 7, 14)],
        [("a", 4, 5), ("b", 14, 20)],
        [("a", 5, 6), ("b", 20, 21)],
    ]


def test_started_prefills_go_before_new_turns_and_new_turns_come_in_order() -> None:
    stage = Stage(20, 0, batch_tokens_max=8)
    for name in "abc":
        stage.ask(name, 6, 2)
    seen = []
    for _ in range(3):
        stage.next()
        seen.append(stage.slices())
    assert seen == [
        [("a", 0, 6), ("b", 0, 2)],
        [("a", 6, 7), ("b", 2, 6), ("c", 0, 3)],
        [("b", 6, 7), ("c", 3, 6)],
    ]


def test_no_more_turns_run_than_the_budget_has_tokens() -> None:
    stage = Stage(20, 0, batch_tokens_max=2, turns_max=8)
    for name in "abc":
        stage.ask(name, 1, 4)
    stage.next()
    stage.next()
    assert stage.slices() == [("a", 1, 2), ("b", 1, 2)]
    assert [turn.conversation_id for turn in stage.scheduler.queued] == ["c"]


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    stage = Stage(10, 0)
    running = stage.ask("a", 12, 8)
    stage.next()
    stage.ask("large", 24, 1)
    stage.ask("small", 1, 1)
    stage.next()
    assert stage.slices() == [("a", 12, 13)]
    stage.until_ended(running)
    stage.next()
    stage.next()
    assert [name for name, _, _ in stage.slices()][:1] == ["large"]
    stage.run_until_idle()


# -- holes --


def repaired(budget: int = 16) -> tuple[Stage, Turn]:
    """a = 12 tokens of KV whose first chunk is lost, and a turn that needs them."""
    stage = Stage(16, 0, batch_tokens_max=budget)
    stage.say("a", 12)
    stage.wait(1.0)
    stage.say("filler", 55)
    stage.delete("filler")
    assert stage.where("a") == "-xx"
    return stage, stage.ask("a", 3, 2)


def test_a_hole_in_front_is_repaired_in_the_iteration_of_what_follows() -> None:
    stage, turn = repaired()
    stage.next()
    assert stage.slices() == [("a", 0, 4), ("a", 12, 16)]
    assert stage.scheduler.counters.repaired_ranges_max == 2
    assert (turn.usage.recomputed_tokens, turn.usage.device_tokens) == (4, 8)
    assert stage.scheduler.counters.recomputed_tokens == 4


def test_holes_in_front_are_computed_no_later_than_what_follows() -> None:
    stage, _ = repaired(budget=3)
    seen = []
    for _ in range(3):
        stage.next()
        seen.append(stage.slices())
    assert seen == [[("a", 0, 3)], [("a", 3, 4), ("a", 12, 14)], [("a", 14, 16)]]


def test_three_disconnected_ranges_are_computed_in_one_iteration() -> None:
    """Holes at chunks 0 and 3 of five, and what is new."""
    stage = Stage(20, 0, batch_tokens_max=64)
    stage.say("a", 20)
    for chunk in (stage.chunks("a")[0], stage.chunks("a")[3]):
        stage.cache.tiers.count_reclaimable(chunk, -1)
        stage.cache.tiers.free_device(chunk)
    turn = stage.ask("a", 1)
    stage.next()
    assert stage.slices() == [("a", 0, 4), ("a", 12, 16), ("a", 20, 22)]
    assert stage.latest is not None
    assert [piece.needs_token for piece in stage.latest.slices] == [False, False, True]
    assert (turn.usage.recomputed_tokens, turn.usage.device_tokens) == (8, 12)


def shared_hole(**shape: object) -> Stage:
    """a and b share 8 tokens of KV whose first chunk is lost."""
    stage = Stage(16, 0, **shape)
    stage.say("a", 8)
    stage.fork_at("a", 8, "b")
    stage.wait(1.0)
    stage.say("filler", 58, 2)
    stage.delete("filler")
    assert (stage.where("a"), stage.where("b")) == ("-x", "-x")
    return stage


def test_two_conversations_that_miss_the_same_chunk_compute_it_once() -> None:
    stage = shared_hole()
    stage.ask("a", 3)
    stage.ask("b", 4)
    stage.next()
    assert stage.slices() == [("a", 0, 4), ("a", 8, 12), ("b", 8, 12)]
    stage.run_until_idle()


def test_two_turns_share_the_repair_of_a_chunk_when_the_budget_cuts_it() -> None:
    stage = shared_hole(batch_tokens_max=6)
    a = stage.ask("a", 3)
    stage.next()
    assert stage.slices() == [("a", 0, 4), ("a", 8, 10)]
    stage.cancel_at(a, a.history_tokens)  # what it repaired stays
    b = stage.ask("b", 4)
    stage.next()
    assert stage.slices() == [("b", 8, 12)]
    assert (b.usage.device_tokens, b.usage.recomputed_tokens) == (7, 0)


# -- admission --


def test_admission_keeps_the_reserve_except_when_nothing_runs() -> None:
    """20 pages, of which 2 are the reserve."""
    stage = Stage(20, 0, batch_tokens_max=100)
    running = stage.ask("a", 8, 4)
    stage.next()
    assert stage.cache.available == 18
    large = stage.ask("b", 61)  # 16 pages, and a's decode takes one of the 18
    stage.next()
    assert large.state is TurnState.QUEUED
    stage.until_ended(running)
    stage.until_ended(large)

    stage = Stage(20, 0, batch_tokens_max=100)
    stage.ask("a", 8, 4)
    stage.next()
    fits = stage.ask("b", 60)  # 15 pages
    stage.next()
    assert fits.state is not TurnState.QUEUED

    alone = Stage(20, 0, batch_tokens_max=100)
    alone.ask("c", 75)
    alone.next()
    assert alone.slices() == [("c", 0, 75)]


def test_all_pages_of_a_context_are_reserved_at_once() -> None:
    stage = Stage(12, 0, batch_tokens_max=4)
    stage.ask("a", 30)
    stage.next()
    assert stage.slices() == [("a", 0, 4)]
    assert stage.cache.device.num_empty == 12 - 8


# -- suspension --


def crowded(host_pages: int) -> tuple[Stage, Turn, Turn, Turn]:
    """6 pages for two turns that want 5 each, and a third that waits for 4."""
    stage = Stage(6, host_pages, prompt_max=1)
    a, b = stage.ask("a", 4, 15), stage.ask("b", 4, 15)
    stage.next()
    return stage, a, b, stage.ask("c", 13, 1)


def test_the_latest_turn_is_suspended_and_resumes_ahead_of_the_queue() -> None:
    stage, a, b, c = crowded(host_pages=20)
    ended: list[Turn] = []
    while len(ended) < 3:
        stage.next()
        ended += [turn for turn in (a, b, c) if turn.finish and turn not in ended]
        if c.state is TurnState.RUNNING:
            assert b.state is TurnState.FINISHED
    assert ended == [a, b, c]
    assert (a.usage.suspensions, c.usage.suspensions) == (0, 0)
    assert b.usage.suspensions == stage.scheduler.counters.suspensions == 1
    assert stage.scheduler.counters.resumptions == 1


def test_nothing_that_is_still_held_is_computed_twice() -> None:
    """With a host that holds everything, each position of a, b and c is computed once."""
    stage, a, b, c = crowded(host_pages=20)
    stage.run_until_idle()
    assert b.usage.suspensions == 1
    assert stage.cache.counters.swapped_in >= 1
    positions = sum(len(turn.tokens) - 1 for turn in (a, b, c))
    assert stage.scheduler.counters.tokens == positions == 18 + 18 + 13
    assert stage.scheduler.counters.recomputed_tokens == 0


def test_what_a_suspended_turn_lost_is_recomputed_and_its_reply_is_the_same() -> None:
    stage, a, b, c = crowded(host_pages=0)
    stage.run_until_idle()
    assert b.usage.suspensions >= 1
    again = stage.scheduler.counters.recomputed_tokens
    positions = sum(len(turn.tokens) - 1 for turn in (a, b, c))
    assert again > 0
    assert stage.scheduler.counters.tokens == positions + again


def test_a_suspended_turn_that_is_cancelled_leaves_its_first_tokens() -> None:
    stage, _, b, _ = crowded(host_pages=20)
    while b.state is not TurnState.SUSPENDED:
        stage.next()
    stage.cancel_at(b, 6)
    assert b.finish is FinishReason.CANCELLED
    assert stage.cache.conversations["b"].num_tokens == 6
    stage.run_until_idle()


def test_a_waiting_turn_is_not_suspended_for_pages_that_are_on_their_way() -> None:
    stage = Stage(6, 20)
    stage.say("old", 8)  # dirty, so it is copied out when it is needed
    a = stage.ask("a", 4, 16)
    stage.run_until_idle()
    assert a.usage.suspensions == 0
    assert stage.where("old") in ("hc", "ch")  # whichever copy finished first


# -- the end of a turn --


def test_cancelling_in_the_queue_keeps_what_the_log_keeps() -> None:
    stage = Stage(8, 0)
    stage.say("a", 4)
    turn = stage.ask("a", 4)
    stage.cancel_at(turn, 5)
    assert turn.state is TurnState.FINISHED
    assert stage.where("a") == "d"
    stage.cancel_at(stage.ask("a", 4), 0)
    assert stage.where("a") == ""
    assert stage.scheduler.num_turns == 0


def test_cancelling_keeps_as_many_tokens_as_the_reader_has_seen() -> None:
    stage = Stage(8, 0)
    turn = stage.ask("a", 4, 10)
    for _ in range(4):
        stage.next()
    assert len(turn.tokens) == 8
    stage.cancel_at(turn, 6)
    assert stage.logs["a"] == list(turn.tokens[:6])
    assert stage.cache.conversations["a"].num_tokens == 6
    again = stage.ask("a", 1)
    stage.next()
    assert stage.slices() == [("a", 6, 7)]
    assert (again.usage.device_tokens, again.usage.new_tokens) == (5, 2)


def test_a_turn_in_flight_ends_for_its_reader_at_once_and_keeps_its_pages_until_the_commit() -> (
    None
):
    stage = Stage(8, 0, overlap=True)
    turn = stage.ask("a", 4, 10)
    stage.step()
    stage.cancel_at(turn, 0)
    assert turn.finish is FinishReason.CANCELLED
    assert stage.cache.device.num_empty == 7
    stage.run_until_idle()
    assert stage.cache.device.num_empty == 8
    assert stage.scheduler.counters.idle_tokens == 1


def test_a_conversation_is_deleted_although_its_turn_is_in_flight() -> None:
    stage = Stage(8, 0, overlap=True)
    stage.say("a", 4)
    stage.ask("a", 4, 10)
    stage.step()
    stage.delete("a")
    stage.run_until_idle()
    assert stage.cache.conversations == {}
    assert stage.cache.device.num_empty == 8


# -- rows that are not numbers --


def test_a_failed_turn_ends_alone_and_its_pages_are_not_kept() -> None:
    stage = Stage(8, 8, swap_out_below=1.0)
    stage.say("a", 8)
    stage.run_until_idle()
    bad, good = stage.ask("a", 4, 3), stage.ask("b", 4, 3)
    stage.executor.failing_turns = {bad.turn_id}
    stage.next()
    assert bad.finish is FinishReason.FAILED
    assert good.finish is None
    assert "a" not in stage.cache.conversations
    assert stage.cache.counters.discarded == 4
    stage.until_ended(good)
    stage.executor.failing_turns = set()
    again = stage.say("a", 4)
    assert (again.usage.recomputed_tokens, again.usage.new_tokens) == (8, 5)


def test_a_chunk_that_a_failed_turn_repaired_is_repaired_again_for_its_other_holders() -> None:
    stage = shared_hole(batch_tokens_max=10)
    a, b = stage.ask("a", 3, 9), stage.ask("b", 1, 9)
    scheduler = stage.scheduler
    for failing in (False, False, True):
        iteration = scheduler.plan(stage.now)
        assert iteration is not None
        sampled = [piece.turn_id for piece in iteration.slices if piece.needs_token]
        samples = [
            SampledToken(turn_id, 1) for turn_id in sampled if not failing or turn_id != a.turn_id
        ]
        failures = (TurnFailure(a.turn_id, "NAN_LOGITS", "a row was NaN"),) if failing else ()
        scheduler.commit(iteration, Outcome(tuple(samples), (), failures), stage.now)
    assert (a.finish, b.finish) == (FinishReason.FAILED, None)
    assert [chunk.filled for chunk in stage.chunks("b")] == [0, 4, 3]
    iteration = scheduler.plan(stage.now)
    assert iteration is not None
    assert [(piece.start, piece.stop) for piece in iteration.slices] == [(0, 4), (11, 12)]


def test_a_turn_at_the_end_of_a_page_survives_the_failure_of_another() -> None:
    """b has just filled its last page when the chunk that a repaired for both is discarded."""
    stage = shared_hole(batch_tokens_max=16)
    a, b = stage.ask("a", 3, 9), stage.ask("b", 4, 9)
    scheduler = stage.scheduler
    iteration = scheduler.plan(stage.now)
    assert iteration is not None
    assert len(b.tokens) == 4 * len(b.chunks) == 12
    outcome = Outcome(
        (SampledToken(b.turn_id, 1),), (), (TurnFailure(a.turn_id, "NAN_LOGITS", ""),)
    )
    scheduler.commit(iteration, outcome, stage.now)
    scheduler.check(stage.now)
    repair = scheduler.plan(stage.now)
    assert repair is not None
    assert [(piece.start, piece.stop) for piece in repair.slices] == [(0, 4), (12, 13)]


def test_a_failed_turn_discards_what_it_wrote_and_no_longer_holds() -> None:
    """b forks inside the chunk that a's turn writes; a is suspended, resumes on a copy and fails."""
    stage = Stage(16, 0)
    stage.say("a", 1)
    a = stage.ask("a", 1, 20)
    stage.next()
    stage.fork_at("a", 1, "b")
    stage.scheduler._suspend(a, stage.now)
    stage.next()
    assert stage.chunks("a")[0] is not stage.chunks("b")[0]
    stage.executor.failing_turns = {a.turn_id}
    stage.next()
    assert a.finish is FinishReason.FAILED
    assert stage.cache.available == 16
    stage.say("b", 1)


def test_a_copy_of_what_a_failed_turn_wrote_is_not_trusted() -> None:
    """a repairs the chunk inside which b ends, b copies it on write, and then a fails."""
    stage = Stage(16, 0, policy="value")
    stage.say("a", 12)
    stage.fork_at("a", 6, "b")
    stage.wait(5000.0)
    stage.say("a", 1)
    stage.wait(50.0)
    stage.say("filler", 46, 9)
    stage.cache.evict("filler", stage.now)
    assert (stage.where("a"), stage.where("b")) == ("--xx", "--")
    a = stage.ask("a", 3, 30)
    stage.next()
    stage.say("b", 3)
    assert stage.cache.counters.copied_on_write == 1
    stage.executor.failing_turns = {a.turn_id}
    stage.until_ended(a)
    stage.executor.failing_turns = set()
    stage.say("b", 1)


# -- warms --


def test_a_warm_brings_a_conversation_to_the_device_and_says_nothing() -> None:
    stage = Stage(12, 20)
    stage.say("a", 8)
    stage.say("filler", 43)
    stage.run_until_idle()
    stage.delete("filler")
    assert stage.where("a") == "hc"
    warm = stage.warm("a")
    stage.run_until_idle()
    assert warm.finish is FinishReason.WARMED
    assert warm.usage.output_tokens == 0
    assert stage.where("a") == "ccd"
    turn = stage.say("a", 2)
    assert (turn.usage.device_tokens, turn.usage.host_tokens) == (8, 0)


def test_a_warm_uses_only_pages_above_the_mark_and_ends_when_there_are_none() -> None:
    stage = Stage(12, 0, batch_tokens_max=32)
    stage.say("a", 8)
    running = stage.ask("b", 24, 9)
    stage.next()
    assert stage.cache.available == 4
    warm = stage.warm(
        "a"
    )  # b's next token takes a page; a third for a would leave 2, the mark is 3
    stage.next()
    assert warm.finish is FinishReason.WARMED
    assert stage.where("a") == "dd"
    stage.until_ended(running)


def test_a_warm_is_the_first_to_give_way() -> None:
    stage = Stage(16, 0, batch_tokens_max=2, swap_out_below=0.1)
    stage.say("w", 20, 1)
    stage.cache.evict("w", stage.now)
    warm = stage.warm("w")  # 6 pages, filled 2 tokens at a time
    stage.next()
    assert warm.state is TurnState.RUNNING
    running = stage.ask("a", 1, 50)
    stage.until_ended(running)
    assert warm.finish is FinishReason.WARMED
    assert running.usage.suspensions == 0


# -- values --


def test_tokens_are_packed_into_four_bytes() -> None:
    assert tokens_of([1, 2, 3]).itemsize == 4


@pytest.mark.parametrize("wrong", [{"batch_tokens_max": 0}, {"turns_max": 0}])
def test_an_impossible_scheduler_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        SchedulerConfig(**wrong)


def test_a_state_cannot_be_skipped() -> None:
    turn = Turn(1, "a", tokens_of([1]), 0, 1, 2)
    with pytest.raises(AssertionError):
        turn.move_to(TurnState.SUSPENDED)
    turn.move_to(TurnState.RUNNING)
    turn.move_to(TurnState.FINISHED)
    with pytest.raises(AssertionError):
        turn.move_to(TurnState.RUNNING)


def test_policies_have_names() -> None:
    cost = CostProfile.measured_at({32: 1.0, 64: 2.0}, 1.0)
    assert isinstance(policy_named("lru", cost, 32), LruPolicy)
    assert isinstance(policy_named("value", cost, 32), ValuePolicy)
    with pytest.raises(ValueError, match="no retention policy is named 'fifo'"):
        policy_named("fifo", cost, 32)


def test_nothing_to_do_is_none() -> None:
    assert World(0, Shape()).scheduler.plan(0.0) is None


def test_a_turn_cancelled_in_the_queue_leaves_no_kv_of_a_turn_that_is_in_no_log() -> None:
    """The store could not keep the first turn; the second's prompt joins the log uncomputed."""
    stage = Stage(12, 10)
    stage.say("a", 6)
    stage.logs["a"], stage.commits["a"] = [], [0]
    stage.cancel_at(stage.ask("a", 9), 9)
    assert stage.where("a") == ""
    stage.say("a", 3)


def test_so_does_one_whose_predecessor_is_still_leaving() -> None:
    stage = Stage(12, 10, overlap=True)
    lost = stage.ask("a", 6)
    stage.step()
    stage.cancel_at(lost, 6)
    stage.logs["a"], stage.commits["a"] = [], [0]
    stage.cancel_at(stage.ask("a", 9), 9)
    last = stage.ask("a", 3)
    stage.until_ended(last)
    assert last.usage.recomputed_tokens == 8
