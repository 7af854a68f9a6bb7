"""Which running turns give their places to one that waits: by priority in a share, by need between shares.

At an iteration's edge, before it is planned, the turn that is next may find that there is no place for it:
as many run as may, or what running turns hold leaves too few pages.  Others then give up theirs, if it is
*entitled* to them:

* **Of its own share**, it is of a higher level than they.  A turn's level is its priority, and one more
  each time that it was taken the place of in this way.  So nobody is preempted without end, and who was is
  back before new turns of the level it was preempted by.
* **Of its own share and level**, where time is shared (`time_share` tokens), they have had so much of their
  replies since they were admitted.  They go to the end of the queue, as if they had come now: with more
  turns than fit, each has its first token after a round and not after the replies of those before it.
* **Of another share**, if that one has used no less (fair_queue.py), and would still hold no less, of pages
  over its weight, than the share that gets them: whoever has filled the memory while nobody else wanted it
  gives a part back when somebody does, until all have theirs.  It cannot take it back the same way, so
  places do not go to and fro.

First goes who is of another share, which holds most; then the lowest level, and of it the latest.  Nobody
gives way if that would not be enough for it.  What is kept in reserve for turns that generate is kept where
it can be.

**What a preempted turn loses is its place**, and nothing that it has computed.  It is suspended, as if a
page had been missing (scheduler.py): its chunks stay where they are until somebody takes their pages, leave
for the host by the policy, and what is still held when it resumes is not computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from pensieve.core.cache import KVCache
from pensieve.core.turn import Turn


def who_gives_way(
    waiting: Turn,
    running: Collection[Turn],
    num_over: int,
    cache: KVCache,
    used: Callable[[Turn], float],
    time_share: int,
) -> list[Turn]:
    """For the turn that is next, before which `num_over` have to go, or more for their pages.

    `used` is what a turn's share has; after `time_share` tokens of its reply a turn may have to give way to
    its like.
    """

    def is_due(turn: Turn) -> bool:
        return 0 < time_share <= turn.num_output_tokens - turn.outputs_before

    if not any(
        turn.share != waiting.share or turn.level < waiting.level or is_due(turn)
        for turn in running
    ):
        return []
    num_pages, pages_left = cache.pages_for(waiting, running)
    reserve = cache.config.reserve_pages
    pages_over = num_pages + reserve - pages_left
    held = _held(running)
    would_hold = held.get(waiting.share, 0.0) + num_pages / waiting.weight

    def is_entitled(turn: Turn) -> bool:
        if turn.share == waiting.share:
            return waiting.level > turn.level or (waiting.level == turn.level and is_due(turn))
        return used(waiting) <= used(turn) and would_hold < held[turn.share]

    def order(turn: Turn) -> tuple[float, tuple[int, int]]:
        return (held[turn.share] if turn.share != waiting.share else -1.0), turn.queue_order

    chosen: list[Turn] = []
    while num_over > 0 or pages_over > 0:
        entitled = [turn for turn in running if turn not in chosen and is_entitled(turn)]
        if not entitled:
            return chosen if num_over <= 0 and pages_over <= reserve else []
        victim = max(entitled, key=order)
        chosen.append(victim)
        held[victim.share] -= len(victim.chunks) / victim.weight
        num_over -= 1
        pages_over -= cache.pages_alone(victim)
    return chosen


def who_is_suspended(running: Collection[Turn]) -> Turn:
    """When a page is missing: a warm; else, of the lowest level, the latest of the share that holds most."""
    held = _held(running)
    return max(running, key=lambda turn: (turn.warm, -turn.level, held[turn.share], turn.arrival))


def _held(running: Collection[Turn]) -> dict[str, float]:
    """By each share: pages of its running turns, over its weight."""
    held: dict[str, float] = {}
    for turn in running:
        held[turn.share] = held.get(turn.share, 0.0) + len(turn.chunks) / turn.weight
    return held
