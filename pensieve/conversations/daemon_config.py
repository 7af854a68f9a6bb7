"""Settings of the service: how much it takes, and how long it waits; the engine has its own."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pensieve.guard.limits import Limits

DAY_SECONDS = 86_400.0
KEEP_WARM_SECONDS = 30.0
SCRUB_SECONDS = 7 * DAY_SECONDS
REQUEST_KEEP_SECONDS = 7 * DAY_SECONDS
CHAIN_KEEP_SECONDS = 30 * DAY_SECONDS


@dataclass(frozen=True)
class Sources:
    """What comes from outside: the time of day, for records only, and random numbers."""

    wall_clock: Callable[[], float] = time.time
    random_bits: Callable[[int], int] = secrets.randbits


@dataclass(frozen=True)
class BackupConfig:
    folder: Path
    keep_seconds: float = 7 * DAY_SECONDS  # 0: for ever


@dataclass(frozen=True)
class DaemonConfig:
    turns_max: int = 1024  # begun and not ended, queued ones included
    grace_seconds: float = 5.0  # that a turn lives after its client disconnected
    stall_seconds: float = 40.0
    undelivered_tokens_max: int = 16_384
    answer_seconds: float = 30.0
    ttft_seconds: float = 0.0  # objective for the time to the first token of a reply; 0: none
    heartbeat_seconds: float = 30.0  # an engine that is silent for so long is killed
    iteration_seconds_max: float = 300.0  # 0: without end
    text_threads: int = 2
    short_characters: int = 4_096  # tokenized where the turn begins: a hop takes longer
    limits: Mapping[str, Limits] = field(default_factory=dict)  # by tenant
    backup: BackupConfig | None = None
    scrub_seconds: float = 0.0  # for a look at the whole history; 0: never
    keep_warm_seconds: float = (
        KEEP_WARM_SECONDS  # between two looks at prefixes that are kept warm; 0: none
    )
    request_keep_seconds: float = 0.0  # that a request_id is known after its turn; 0: for ever
    chain_keep_seconds: float = 0.0  # that a history is found by what its client sends; 0: for ever
    conversation_keep_seconds: float = 0.0  # an idle conversation is erased after so long; 0: never
    store_default: bool = True  # whether requests of the HTTP APIs are stored that do not say
    replica: str = ""  # the daemon's name among several; "": it has none
    history: str = ""  # where the history is, in words that may be shown; "": in the data folder
