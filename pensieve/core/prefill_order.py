"""Which prefill gets the tokens of an iteration first, of those of one share.

By level, then **the shortest remaining one first**: somebody whose message takes one iteration does not
wait for the hundred iterations of somebody else's document, who waits one longer for it.  That is best for
the mean time to the first token, and alone it would starve the long ones.  So the one that has come first
is **held a part back for**: the others leave it HELD_BACK of what prompts may take in an iteration, and
TOKENS_MIN at least (iteration_draft.py).  It takes at most 1 / HELD_BACK times as long for those that pass
it, and where there is room for one tile only, it has the tile.

A turn that waits is admitted beside prefills of its share if it goes before all of them; else it would take
pages and no tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from pensieve.core.fair_queue import FairQueue, num_new_tokens
from pensieve.core.turn import Turn, TurnState

Order = tuple[int, int, int]


def prefill_order(turn: Turn) -> Order:
    """The least goes first."""
    return -turn.level, num_missing(turn), turn.arrival


def resume_order(turn: Turn) -> Order:
    """Of turns of one share that were suspended, the least comes back first."""
    return -turn.level, int(turn.moved_back), turn.arrival


def num_missing(turn: Turn) -> int:
    """At most so many positions of its context are computed before its next token.

    Before its admission nobody knows what of its history is held: its prompt alone counts, and nothing of one
    that was suspended.
    """
    if turn.state is TurnState.RUNNING:
        return len(turn.tokens) + turn.pending_tokens - turn.frontier
    if turn.state is TurnState.QUEUED:
        return num_new_tokens(turn)
    return 0


def may_join(turn: Turn, started: Iterable[Turn]) -> bool:
    """Whether it goes before all prefills of its share that have begun."""
    own = prefill_order(turn)
    return all(own < prefill_order(each) for each in started if each.share == turn.share)


def next_waiting(
    suspended: Iterable[Turn],
    queued: FairQueue,
    may_come: Callable[[Turn], bool],
    but: Collection[Turn] = (),
) -> Turn | None:
    """Of the turns that may come: of the share that has used least, the highest level.

    Those that were suspended are in `resume_order`.  One of them comes before new ones of its level, unless
    its share of time was over.
    """
    first: dict[
        str, Turn
    ] = {}  # of each share: if it may not come, no other that was suspended may
    for turn in suspended:
        first.setdefault(turn.share, turn)
    waiting = [*filter(may_come, first.values()), *queued.heads(may_come, but)]
    return min(
        waiting,
        key=lambda turn: (
            queued.used(turn),
            -turn.level,
            turn.state is TurnState.QUEUED or turn.moved_back,
            turn.arrival,
        ),
        default=None,
    )


def earlier(turn: Turn, started: Collection[Turn]) -> Turn | None:
    """The prefill of its share, of no lower level, that came first, if it came before this one."""
    own = [
        each
        for each in started
        if each.share == turn.share and each.arrival < turn.arrival and each.level >= turn.level
    ]
    return min(own, key=lambda each: each.arrival, default=None)
