"""How a replica learns that Ray wants to end it.

Ray waits for the calls of a replica to end and tells it only then (`__del__`); when its patience
(graceful_shutdown_timeout_s) is over it kills it, told or not.  So a replica with one long call would never
drain.  What Ray sets at once is a flag of the actor, which is no part of Ray's public interface: with a Ray
that has none, `is_wanted_to_end` stays False, and a replica drains when its calls have ended.
"""

from __future__ import annotations

from typing import Any

FLAG = "_shutting_down"


def is_wanted_to_end() -> bool:
    from ray._private import worker

    return any(_is_ending(each) for each in worker.global_worker.actors.values())


def _is_ending(actor: Any) -> bool:
    return bool(getattr(getattr(actor, "_replica_impl", None), FLAG, False))
