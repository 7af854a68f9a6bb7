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
    raise AssertionError("the engine never counts as hanging")


def test_a_silent_engine_counts_as_hanging_after_the_heartbeat_limit() -> None:
    heartbeat = Heartbeat(PATIENCE)
    assert ticks_until_it_hangs(heartbeat) == 31
    for noise in (heartbeat.published, lambda: heartbeat.alive(1)):
        noise()
        assert ticks_until_it_hangs(heartbeat) == 31


def test_a_main_thread_stuck_in_one_round_counts_as_hanging_despite_heartbeats() -> None:
    heartbeat = Heartbeat(PATIENCE)
    heartbeat.alive(7)
    assert ticks_until_it_hangs(heartbeat, 7) == 301
    heartbeat.alive(8)
    assert ticks_until_it_hangs(heartbeat, 8) == 301


def test_a_limit_of_zero_allows_rounds_of_any_length() -> None:
    heartbeat = Heartbeat(Patience(30.0, 0.0))
    for _ in range(10_000):
        assert heartbeat.tick() is None
        heartbeat.alive(7)


def test_an_engine_with_new_rounds_or_events_does_not_count_as_hanging() -> None:
    heartbeat = Heartbeat(PATIENCE)
    for number in range(1000):
        heartbeat.alive(number)
        assert heartbeat.tick() is None
    for _ in range(1000):
        heartbeat.published()
        assert heartbeat.tick() is None


def test_a_short_limit_has_shorter_ticks() -> None:
    assert PATIENCE.tick_seconds == 1.0
    assert Patience(2.0, 0.0).tick_seconds == 0.5
