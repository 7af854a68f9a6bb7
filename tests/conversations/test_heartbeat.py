"""When an engine counts as hanging, and when it does not."""

from __future__ import annotations

from pensieve.conversations.engine_client import Heartbeat, Patience

PATIENCE = Patience(30.0, 300.0)


def ticks_until_it_hangs(heartbeat: Heartbeat, num_rounds: int | None = None) -> int:
    """Return the tick at which the engine counts as hanging. It reports `num_rounds` after each tick."""
    for number in range(1, 10_000):
        if heartbeat.tick() is not None:
            return number
        if num_rounds is not None:
            heartbeat.alive(num_rounds)
    raise AssertionError("it is never held to hang")


def test_silence_is_a_hang_after_enough_seconds_of_the_running_service() -> None:
    heartbeat = Heartbeat(PATIENCE)
    assert ticks_until_it_hangs(heartbeat) == 31
    for noise in (heartbeat.published, lambda: heartbeat.alive(1)):
        noise()
        assert ticks_until_it_hangs(heartbeat) == 31


def test_a_main_thread_that_stays_in_one_round_hangs_though_others_are_alive() -> None:
    heartbeat = Heartbeat(PATIENCE)
    heartbeat.alive(7)
    assert ticks_until_it_hangs(heartbeat, 7) == 301
    heartbeat.alive(8)
    assert ticks_until_it_hangs(heartbeat, 8) == 301


def test_a_round_may_take_for_ever_where_the_operator_says_so() -> None:
    heartbeat = Heartbeat(Patience(30.0, 0.0))
    for _ in range(10_000):
        assert heartbeat.tick() is None
        heartbeat.alive(7)


def test_an_engine_that_goes_round_or_publishes_does_not_hang() -> None:
    heartbeat = Heartbeat(PATIENCE)
    for number in range(1000):
        heartbeat.alive(number)
        assert heartbeat.tick() is None
    for _ in range(1000):
        heartbeat.published()
        assert heartbeat.tick() is None


def test_a_short_patience_ticks_faster() -> None:
    assert PATIENCE.tick_seconds == 1.0
    assert Patience(2.0, 0.0).tick_seconds == 0.5
