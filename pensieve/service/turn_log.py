"""A line of the log for each turn that has ended: its ids, where its tokens came from, how long it took.

It holds ids, counts and times, and nothing that anybody said.  Its logger has a name of its own, so that it
can be silenced alone (`--log-turns off`).
"""

from __future__ import annotations

import logging

from pensieve.service.live_turn import LiveTurn
from pensieve.service.readers import ids_of

log = logging.getLogger("pensieve.turns")
TOKENS = ("new_tokens", "device_tokens", "host_tokens", "recomputed_tokens", "output_tokens")
SECONDS = ("queue_seconds", "first_token_seconds", "total_seconds")


def turn_ended(live: LiveTurn, now: float) -> None:
    """Of one that the engine has not ended, what is known: the tokens of its reply, and its time."""
    if not log.isEnabledFor(logging.INFO):
        return
    known = live.figures or {
        "output_tokens": live.num_tokens,
        "total_seconds": now - live.arrived_at,
    }
    figures: dict[str, str | float] = {"finish": live.finish.value if live.finish else ""}
    if live.failure is not None:
        figures["reason"] = live.failure.reason
    figures |= {name: known[name] for name in TOKENS if name in known}
    figures |= {name: round(known[name], 4) for name in SECONDS if name in known}
    log.info("turn ended", extra={**ids_of(live), "figures": figures})
