"""Every kind of fault and its highest rate. Each world draws its own rates and its own shape."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from pensieve.core.policies.registry import POLICIES
from tests.faults.disk import STORE_FAULTS
from tests.faults.kept import KEPT
from tests.faults.machine import EngineShape

BY_CALL = {  # the highest probability of each fault, at each call where it can happen
    "copies are late": 0.95,
    "copies finish out of order": 1.0,
    "a row is not a number": 0.08,
    "an allocation fails": 0.03,
    "a launch fails half way": 0.03,
    "collecting fails": 0.03,
    "the engine does not start": 0.3,
    "the mailbox is full": 0.1,
    "events overtake the store's thread": 0.05,
}
BY_MOVE = {  # the highest weight among all moves; the weight of ordinary moves is 100
    "the engine is killed": 1.5,
    "the engine is stopped": 0.2,
    "the engine's main thread hangs": 0.2,
    "the service is killed": 1.0,
    "the service is stopped and started": 0.7,
    **{fault.kind: 0.7 if fault.code is None else 2.5 for fault in STORE_FAULTS},
    "time stands still": 1.0,
    "time jumps ahead": 1.0,
    "the wall clock goes back": 1.0,
    "events come late": 1.0,
    "a turn is cancelled": 8.0,
    "a conversation is forked": 4.0,
    "a conversation is rewound": 4.0,
    "a conversation is deleted": 2.0,
    "KV is evicted": 3.0,
    "KV is warmed": 3.0,
    "a reader leaves": 4.0,
    "a reader stops reading": 2.0,
    "a message is said again": 8.0,
    "an id comes again with other words": 2.0,
    "a second message during a turn": 3.0,
    "a turn is left": 6.0,
}
BY_ITSELF = (  # events that follow from the shape and from other faults
    "the engine's queue is full",
    "the daemon's limit is reached",
    "a turn is interrupted by a restart",
    "a turn is attached to again",
    "an answer is replayed",
    "a turn begins again",
    "a name is used again",
    "the context is full",
    "a turn is streamed",
    "calls share a commit",
    "a shared commit meets a fault",
)
KINDS = (*BY_CALL, *BY_MOVE, *BY_ITSELF)
ORDINARY = {"engine": 26, "pipe": 22, "store": 24, "client": 22, "time": 6}

Rates = dict[str, float]
NO_FAULTS: Rates = dict.fromkeys(BY_CALL | BY_MOVE, 0.0)


@dataclass(frozen=True)
class Shape:
    engine: EngineShape = field(default_factory=EngineShape)
    conversations_max: int = 5
    prompt_words_max: int = 5
    reply_max: int = 8
    turns_max: int = 1000  # limit of the daemon
    grace_seconds: float = 5.0
    heartbeat_seconds: float = 30.0
    iteration_seconds_max: float = 30.0
    short_characters: int = 4096  # longer texts are tokenised beside the loop
    num_moves: int = 120
    store_threads: int = 1  # store threads that run at once


def draw_shape(choose: random.Random, seed: int) -> Shape:
    chunk_tokens = choose.choice((1, 2, 4, 4, 8))
    scale = max(1, 4 // chunk_tokens)
    # Separate random streams, so that older seeds still give the same worlds.
    places, streams = random.Random(seed), random.Random(~seed)
    threads = random.Random(f"threads of {seed}")
    engine = EngineShape(
        policy=choose.choice(tuple(POLICIES)),
        device_pages=choose.randint(7, 14) * scale,
        host_pages=choose.choice(
            (0, choose.randint(1, 8), choose.randint(8, 30), choose.randint(8, 30))
        )
        * scale,
        chunk_tokens=chunk_tokens,
        batch_tokens_max=choose.choice((5, 16, 24)),
        turns_max=choose.choice((2, 8)),
        time_share=places.choice((0, 0, 3)),
        turns_queued_max=choose.choice((2, 64, 64)),
        depth=choose.choice((1, 2)),
        swap_outs_max=choose.choice((1, 64, 64)),
        staging_pages=streams.choice((0, 3, 12)) * scale if seed not in KEPT else 0,
        stream=streams.choice(("on", "on", "auto")),
        checks_every=1 if seed % 8 == 0 else 7,
    )
    return Shape(
        engine,
        conversations_max=choose.choice((2, 5, 9)),
        prompt_words_max=choose.choice((2, 5)),
        reply_max=choose.choice((4, 16)),
        turns_max=choose.choice((3, 1000, 1000)),
        grace_seconds=choose.choice((0.2, 5.0)),
        heartbeat_seconds=choose.choice((2.0, 2.0, 30.0)),
        iteration_seconds_max=choose.choice((2.0, 2.0, 30.0)),
        short_characters=choose.choice((0, 4096)),
        num_moves=choose.choice((60, 150, 400)),
        store_threads=threads.choice((1, 3, 16)) if seed not in KEPT else 1,
    )


def draw_rates(choose: random.Random) -> Rates:
    return {
        kind: choose.choice((0.0, 0.2, 0.6, 1.0)) * most
        for kind, most in (BY_CALL | BY_MOVE).items()
    }
