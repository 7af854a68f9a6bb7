"""Settings of the service process: its limits and timeouts. The engine has separate settings.

launch/daemon.py makes the `DaemonConfig` of `pensieve serve`. Only the values of its first group
come from flags or from keys of the settings file.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pensieve.conversations.followers import (
    GRACE_SECONDS,
    STALL_SECONDS,
    UNDELIVERED_TOKENS_MAX,
)
from pensieve.guard.limits import Limits

DAY_SECONDS = 86_400.0
KEEP_WARM_SECONDS = 30.0
SCRUB_SECONDS = 7 * DAY_SECONDS
REQUEST_KEEP_SECONDS = 7 * DAY_SECONDS
CHAIN_KEEP_SECONDS = 30 * DAY_SECONDS


@dataclass(frozen=True)
class Sources:
    """Nondeterministic inputs: the wall clock (for times that are stored or exported), and random numbers."""

    wall_clock: Callable[[], float] = time.time
    random_bits: Callable[[int], int] = secrets.randbits


@dataclass(frozen=True)
class BackupConfig:
    folder: Path
    keep_seconds: float = 7 * DAY_SECONDS  # 0: for ever


@dataclass(frozen=True)
class DaemonConfig:
    # from the user's settings
    ttft_seconds: float = 0.0  # objective for the time to the first token of a reply; 0: none
    limits: Mapping[str, Limits] = field(default_factory=dict)  # by tenant
    backup: BackupConfig | None = None
    conversation_keep_seconds: float = 0.0  # a conversation idle for longer is erased; 0: never
    store_default: bool = True  # whether an HTTP request without `store` is stored
    replica: str = ""  # the daemon's name among several; "": it has none
    history: str = ""  # the history's address without secrets; "": in the data folder
    # `pensieve serve` sets these to the constants at the top of this file; other programs leave them at 0
    scrub_seconds: float = 0.0  # time to read the whole history once; 0: never
    request_keep_seconds: float = 0.0  # how long a request_id is kept after its turn; 0: for ever
    chain_keep_seconds: float = 0.0  # how long digests of histories are kept; 0: for ever
    # constants that only tests change
    live_turns_max: int = 1024  # turns in flight, queued turns included
    grace_seconds: float = GRACE_SECONDS  # how long a turn lives without a follower
    stall_seconds: float = STALL_SECONDS  # how long a client may take nothing from its stream
    undelivered_tokens_max: int = UNDELIVERED_TOKENS_MAX
    answer_seconds: float = 30.0  # timeout of a query to the engine
    heartbeat_seconds: float = 30.0  # an engine that is silent for longer is killed
    iteration_seconds_max: float = 300.0  # 0: no limit
    text_threads: int = 2
    short_characters: int = 4_096  # text up to this length is tokenized in the store thread
    keep_warm_seconds: float = KEEP_WARM_SECONDS  # between warms of a kept prefix; 0: no warms
