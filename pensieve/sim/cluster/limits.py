"""How many replicas one history service carries, and what another region costs a turn.  Arithmetic.

A later turn of a conversation makes `CALLS_FIRST` calls of the store before it runs (what the conversation
is, whether this request came before, the end of its log, the row of the turn) and one when it has ended.  A
daemon waits for each, so with a store that is a round trip away a first token is late by so many round
trips, and `completed` by one more.  A turn that moved reads the whole log, too: one more call, and 4 bytes of
every token of it.
"""

from __future__ import annotations

import math
from typing import Any

CALLS_FIRST = 2  # look_up, begin_turn
CALLS_END = 1  # finish_turn
CALLS_MOVED = 1  # log
TOKEN_BYTES = 4

Row = dict[str, Any]


def history_rows(
    turns_per_second: float, peak: float, replicas: int, rates: list[float]
) -> list[Row]:
    """For each rate of turns that a store was measured to carry: how far one of it goes.

    `turns_per_second` and `peak` are those of so many replicas.
    """
    each = turns_per_second / replicas
    return [
        {
            "store_turns_per_second": rate,
            "replicas": math.floor(rate / each) if each else None,
            "shards": math.ceil(turns_per_second / rate),
            "shards_at_peak": math.ceil(peak / rate),
        }
        for rate in rates
    ]


def region_row(round_trip_seconds: float) -> Row:
    """What a store that far away adds."""
    return {
        "round_trip_seconds": round_trip_seconds,
        "first_token_seconds": CALLS_FIRST * round_trip_seconds,
        "first_token_moved_seconds": (CALLS_FIRST + CALLS_MOVED) * round_trip_seconds,
        "completed_seconds": CALLS_END * round_trip_seconds,
    }
