"""A turn whose logits are not finite fails alone, and the KV that it wrote is not used any more."""

from __future__ import annotations

from pensieve.core.iteration import Outcome, SampledToken, TurnFailure
from pensieve.core.turn import FinishReason
from tests.core.test_holes import shared_hole
from tests.core.world import Stage


def test_a_failed_turn_ends_alone_and_its_pages_are_not_kept() -> None:
    stage = Stage(8, 8, swap_out_below=1.0)
    stage.say("a", 8)
    stage.run_until_idle()
    bad, good = stage.ask("a", 4, 3), stage.ask("b", 4, 3)
    stage.executor.failing_turns = {bad.attempt_id}
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
        sampled = [piece.attempt_id for piece in iteration.slices if piece.needs_token]
        samples = [
            SampledToken(attempt_id, 1)
            for attempt_id in sampled
            if not failing or attempt_id != a.attempt_id
        ]
        failures = (TurnFailure(a.attempt_id, "NAN_LOGITS", "a row was NaN"),) if failing else ()
        scheduler.commit(iteration, Outcome(tuple(samples), (), failures), stage.now)
    assert (a.finish, b.finish) == (FinishReason.FAILED, None)
    assert [chunk.filled for chunk in stage.chunks("b")] == [0, 4, 3]
    iteration = scheduler.plan(stage.now)
    assert iteration is not None
    assert [(piece.start, piece.stop) for piece in iteration.slices] == [(0, 4), (11, 12)]


def test_a_turn_at_the_end_of_a_page_survives_the_failure_of_another() -> None:
    """`b` has just filled its last page. Then a chunk that `a` repaired for both turns is discarded."""
    stage = shared_hole(batch_tokens_max=16)
    a, b = stage.ask("a", 3, 9), stage.ask("b", 4, 9)
    scheduler = stage.scheduler
    iteration = scheduler.plan(stage.now)
    assert iteration is not None
    assert len(b.tokens) == 4 * len(b.chunks) == 12
    outcome = Outcome(
        (SampledToken(b.attempt_id, 1),), (), (TurnFailure(a.attempt_id, "NAN_LOGITS", ""),)
    )
    scheduler.commit(iteration, outcome, stage.now)
    scheduler.check(stage.now)
    repair = scheduler.plan(stage.now)
    assert repair is not None
    assert [(piece.start, piece.stop) for piece in repair.slices] == [(0, 4), (12, 13)]


def test_a_failed_turn_discards_even_written_chunks_that_it_no_longer_holds() -> None:
    """`b` forks inside a chunk of `a`. `a` is suspended, resumes on a copy of the chunk, and fails."""
    stage = Stage(16, 0)
    stage.say("a", 1)
    a = stage.ask("a", 1, 20)
    stage.next()
    stage.fork_at("a", 1, "b")
    stage.scheduler._suspend(a, stage.now)
    stage.next()
    assert stage.chunks("a")[0] is not stage.chunks("b")[0]
    stage.executor.failing_turns = {a.attempt_id}
    stage.next()
    assert a.finish is FinishReason.FAILED
    assert stage.cache.available == 16
    stage.say("b", 1)


def test_a_copy_of_a_failed_turns_chunk_is_not_trusted() -> None:
    """`a` repairs the chunk in which `b` ends. `b` copies this chunk on write. Then `a` fails."""
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
    stage.executor.failing_turns = {a.attempt_id}
    stage.until_ended(a)
    stage.executor.failing_turns = set()
    stage.say("b", 1)
