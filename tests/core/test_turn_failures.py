"""A turn whose logits are not finite fails alone, and the KV that it wrote is not used any more."""

from __future__ import annotations

from pensieve.core.iteration import Outcome, SampledToken, TurnFailure
from pensieve.core.turn import FinishReason
from tests.core.test_holes import shared_hole
from tests.core.world import ScriptedWorld


def test_a_failed_turn_ends_alone_and_its_pages_are_not_kept() -> None:
    world = ScriptedWorld(8, 8, swap_out_below=1.0)
    world.say("a", 8)
    world.run_until_idle()
    bad, good = world.ask("a", 4, 3), world.ask("b", 4, 3)
    world.executor.failing_turns = {bad.attempt_id}
    world.next()
    assert bad.finish is FinishReason.FAILED
    assert good.finish is None
    assert "a" not in world.cache.conversations
    assert world.cache.counters.discarded == 4
    world.until_ended(good)
    world.executor.failing_turns = set()
    again = world.say("a", 4)
    assert (again.usage.recomputed_tokens, again.usage.new_tokens) == (8, 5)


def test_a_chunk_that_a_failed_turn_repaired_is_repaired_again_for_its_other_holders() -> None:
    world = shared_hole(batch_tokens_max=10)
    a, b = world.ask("a", 3, 9), world.ask("b", 1, 9)
    scheduler = world.scheduler
    for failing in (False, False, True):
        iteration = scheduler.plan(world.now)
        assert iteration is not None
        sampled = [piece.attempt_id for piece in iteration.slices if piece.needs_token]
        samples = [
            SampledToken(attempt_id, 1)
            for attempt_id in sampled
            if not failing or attempt_id != a.attempt_id
        ]
        failures = (TurnFailure(a.attempt_id, "NAN_LOGITS", "a row was NaN"),) if failing else ()
        scheduler.commit(iteration, Outcome(tuple(samples), (), failures), world.now)
    assert (a.finish, b.finish) == (FinishReason.FAILED, None)
    assert [chunk.filled for chunk in world.chunks("b")] == [0, 4, 3]
    iteration = scheduler.plan(world.now)
    assert iteration is not None
    assert [(piece.start, piece.stop) for piece in iteration.slices] == [(0, 4), (11, 12)]


def test_a_turn_at_the_end_of_a_page_survives_the_failure_of_another() -> None:
    """`b` has just filled its last page. Then a chunk that `a` repaired for both turns is discarded."""
    world = shared_hole(batch_tokens_max=16)
    a, b = world.ask("a", 3, 9), world.ask("b", 4, 9)
    scheduler = world.scheduler
    iteration = scheduler.plan(world.now)
    assert iteration is not None
    assert len(b.tokens) == 4 * len(b.chunks) == 12
    outcome = Outcome(
        (SampledToken(b.attempt_id, 1),), (), (TurnFailure(a.attempt_id, "NAN_LOGITS", ""),)
    )
    scheduler.commit(iteration, outcome, world.now)
    scheduler.check(world.now)
    repair = scheduler.plan(world.now)
    assert repair is not None
    assert [(piece.start, piece.stop) for piece in repair.slices] == [(0, 4), (12, 13)]


def test_a_failed_turn_discards_even_written_chunks_that_it_no_longer_holds() -> None:
    """`b` forks inside a chunk of `a`. `a` is suspended, resumes on a copy of the chunk, and fails."""
    world = ScriptedWorld(16, 0)
    world.say("a", 1)
    a = world.ask("a", 1, 20)
    world.next()
    world.fork_at("a", 1, "b")
    world.scheduler._suspend(a, world.now)
    world.next()
    assert world.chunks("a")[0] is not world.chunks("b")[0]
    world.executor.failing_turns = {a.attempt_id}
    world.next()
    assert a.finish is FinishReason.FAILED
    assert world.cache.available == 16
    world.say("b", 1)


def test_a_copy_of_a_failed_turns_chunk_is_not_trusted() -> None:
    """`a` repairs the chunk in which `b` ends. `b` copies this chunk on write. Then `a` fails."""
    world = ScriptedWorld(16, 0, policy="value")
    world.say("a", 12)
    world.fork_at("a", 6, "b")
    world.wait(5000.0)
    world.say("a", 1)
    world.wait(50.0)
    world.say("filler", 46, 9)
    world.cache.evict("filler", world.now)
    assert (world.where("a"), world.where("b")) == ("--xx", "--")
    a = world.ask("a", 3, 30)
    world.next()
    world.say("b", 3)
    assert world.cache.counters.copied_on_write == 1
    world.executor.failing_turns = {a.attempt_id}
    world.until_ended(a)
    world.executor.failing_turns = set()
    world.say("b", 1)


def test_a_copy_of_a_chunk_that_a_failed_turn_has_only_read_is_not_trusted() -> None:
    """`b` copies the chunk on write while `a` finds out that the chunk is wrong."""
    world = ScriptedWorld(16, 0, batch_tokens_max=4)
    world.say("a", 12)
    world.fork_at("a", 10, "b")
    a = world.ask("a", 1, 9)
    world.next()
    source = world.chunks("a")[2]
    assert source not in a.discard_if_failed
    assert source.device_page is not None
    world.executor.spoil(world.executor.device, source.device_page, 0)
    b = world.ask("b", 9)
    world.next()
    assert world.cache.counters.copied_on_write == 1
    assert a.finish is FinishReason.FAILED
    assert world.chunks("b")[2].filled == 0
    world.until_ended(b)
