"""Ghosts of the cache: what another order would have lost, and when it is worth following."""

from __future__ import annotations

from pensieve.core.policies.shadow_cache import Ghost, Trial


def likely(order: int, idle_seconds: float) -> float:
    return order - idle_seconds / 1000


def test_a_ghost_gives_up_the_leading_tokens_of_the_least_valuable() -> None:
    ghost = Ghost(likely)
    ghost.tokens_max = 100
    ghost.rest("a", 1, 60, 0.0)
    ghost.rest("b", 0, 30, 1.0)
    ghost.rest("c", 0, 30, 2.0)
    assert ghost.num_tokens == 100
    assert ghost.take("b") == 20, "the older one of the lower order"
    assert ghost.take("c") == 0
    assert ghost.take("a") == 0
    assert ghost.take("a") is None
    assert ghost.num_tokens == 0


def test_a_ghost_forgets_whom_it_gave_up_whole() -> None:
    ghost = Ghost(likely)
    ghost.tokens_max = 50
    for number in range(100):
        ghost.rest(f"{number}", number % 3, 20, float(number))
        assert ghost.num_tokens <= 50
    assert len(ghost._order_of) == 3
    assert sum(map(len, ghost._orders.values())) == 3
    ghost.rest("large", 9, 80, 100.0)
    assert ghost.num_tokens == 50
    assert ghost.take("large") == 30


def test_a_conversation_that_rests_again_is_held_once() -> None:
    ghost = Ghost(likely)
    ghost.tokens_max = 100
    ghost.rest("a", 0, 40, 0.0)
    ghost.rest("a", 1, 50, 1.0)
    assert ghost.num_tokens == 50


def play(trial: Trial, now: float, rounds: int, good: int, after: int) -> float:
    """Conversations of 40 tokens, of order 0 and 1 in turn; those of order `good` return later."""
    for number in range(rounds):
        trial.rested(f"{now}", number % 2, 40, now)
        if number >= after and (number - after) % 2 == good:
            trial.returned(f"{now - after}", 40, now)
        now += 1.0
    return now


def test_what_was_learned_is_trusted_when_it_pays_and_only_then() -> None:
    """Room for four: those of order 1 that return after six turns are there only if it is believed
    that the others do not; those of order 0 that return after two only if it is not."""
    trial = Trial(likely, float)
    trial.holds(160)
    assert not trial.trusted
    now = play(trial, 0.0, 100, good=1, after=6)
    assert trial.trusted
    now = play(trial, now, 400, good=0, after=2)
    assert not trial.trusted
    play(trial, now, 400, good=1, after=6)
    assert trial.trusted


def test_nothing_is_trusted_where_nothing_is_lost() -> None:
    trial = Trial(likely, float)
    trial.holds(10_000)
    play(trial, 0.0, 100, good=1, after=6)
    assert not trial.trusted
