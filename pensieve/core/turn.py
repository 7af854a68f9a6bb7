"""A turn (new messages and their reply) in the scheduler, from the queue to its last token.

    QUEUED ──admit──> RUNNING ──finish──> FINISHED
                       │   ^
                       v   │
                   SUSPENDED   (holds no page; its progress is kept)

A turn's progress is one number, `frontier`: every position below it has KV on the device (for a streamed
turn: on the host) or is computed by a launched iteration. `tokens` is the conversation's whole log, followed
by the new prompt and the sampled tokens. `tokens` is kept until the turn ends.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from operator import attrgetter
from typing import NamedTuple

from pensieve.core.constraint import Constraint
from pensieve.core.identities import Identities
from pensieve.core.prefix_tree import Chunk
from pensieve.sampling import Sampling

PRIORITY_MIN, PRIORITY_MAX = -8, 8
BACKGROUND_LEVEL = PRIORITY_MIN - 2  # below all interactive turns and warms
QUEUE_ORDER = attrgetter("queue_order")  # sort key for turns of one share


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-turn token, a stop token or a stop string
    LENGTH = "length"  # the limit of max_tokens or of the context
    REPETITION = "repetition"  # the reply only repeated itself
    CANCELLED = "cancelled"  # a client stopped the turn, or it was given up
    FAILED = "failed"
    WARMED = "warmed"  # a warm turn has its whole context on the device


HAS_REPLY = frozenset({FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION})


class TurnState(Enum):
    QUEUED = "queued"
    RUNNING = "running"
    SUSPENDED = "suspended"
    FINISHED = "finished"


LEGAL_TRANSITIONS: dict[TurnState, frozenset[TurnState]] = {
    TurnState.QUEUED: frozenset({TurnState.RUNNING, TurnState.FINISHED}),
    TurnState.RUNNING: frozenset({TurnState.SUSPENDED, TurnState.FINISHED}),
    TurnState.SUSPENDED: frozenset({TurnState.RUNNING, TurnState.FINISHED}),
    TurnState.FINISHED: frozenset(),
}


@dataclass(slots=True)
class Usage:
    """The sources of the tokens of a turn's context, and the turn's times (seconds of the engine's clock).

    prompt_tokens = new_tokens + device_tokens + host_tokens + recomputed_tokens. shared_tokens are the device
    and host tokens that another conversation has computed.
    """

    new_tokens: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    recomputed_tokens: int = 0
    output_tokens: int = 0
    suspensions: int = 0
    submitted_at: float = 0.0
    admitted_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    shared_tokens: int = 0
    shared_from: str = ""  # a conversation that had these tokens

    @property
    def prompt_tokens(self) -> int:
        return self.new_tokens + self.device_tokens + self.host_tokens + self.recomputed_tokens


@dataclass(frozen=True, slots=True)
class TurnOptions:
    """A client's options for a turn; passed as one value from the wire to the `Turn`."""

    sampling: Sampling = field(default_factory=Sampling)
    priority: int = 0  # PRIORITY_MIN..PRIORITY_MAX
    away_seconds: float = 0.0  # how long the client expects to be away after the turn
    background: bool = False  # a turn of a batch job: runs if interactive turns leave capacity
    constraint: Constraint | None = None  # the required form of the reply
    continues_text: bool = False  # the prompt ends within a text: prefill, text completions


class Ended(NamedTuple):
    """The end of a turn."""

    turn: Turn
    finish: FinishReason
    failure: str | None = None  # the reason, if it failed


@dataclass(slots=True, eq=False)
class Turn:
    attempt_id: int
    conversation_id: str
    tokens: array[int]  # 'I': history + prompt + sampled
    history_tokens: int  # length of the log before this turn's prompt
    prompt_end: int  # len(tokens) at submission; outputs begin here
    length_max: int  # the turn ends with LENGTH when len(tokens) reaches this
    options: TurnOptions = field(default_factory=TurnOptions)
    warm: bool = False  # compute missing KV, sample nothing
    share: str = ""  # its owner in fair queueing, usually a tenant; see fair_queue.py
    weight: float = 1.0  # the share's weight
    found_tokens: int = 0  # leading tokens that were found by content; see `ContentIndex`
    has_twins: bool = False  # chunks that it has computed were registered by other turns
    own_tokens: int = 0  # leading tokens whose chunks its conversation held before
    identities: Identities | None = (
        None  # identities of its chunks; None: it shares no chunks by content
    )
    is_temporary: bool = False  # no further turn will continue its conversation
    # -- set by the scheduler --
    state: TurnState = TurnState.QUEUED
    arrival: int = 0  # its number in the order of arrival
    streamed: bool = False  # its KV is on the host while it runs; see streamed_pages.py
    moved_back: bool = False  # suspended because its `time_share` was used up
    num_passed: int = 0  # turns that were admitted before it while it lacked pages
    outputs_before: int = 0  # number of output tokens when it was last admitted
    num_new_tokens: int = 0  # tokens of its prompt that were not found when it was submitted
    level: int = 0  # its priority, plus one for each time that it was preempted by a higher level
    queue_order: tuple[int, int] = (0, 0)  # within a share: by level, then by arrival
    frontier: int = 0
    chunks: list[Chunk] = field(default_factory=list)  # chunks of its whole context, while RUNNING
    page_table: array[int] = field(default_factory=lambda: array("i"))  # host pages if `streamed`
    # Chunks that it has computed in part, and copies that other turns made of its chunks while it ran.
    discard_if_failed: dict[Chunk, None] = field(default_factory=dict)
    # Chunks that collected iterations have completed, with their generations; see `ContentIndex`.
    completed: list[tuple[Chunk, int]] = field(default_factory=list)
    num_uncommitted: int = 0  # launched iterations with a slice of this turn
    pending_tokens: int = 0  # number of tokens that uncommitted iterations sample
    computed_to: int = 0  # positions below this were computed before, by this or an earlier turn
    finish: FinishReason | None = None
    log_tokens: int | None = None  # after a cancel: the log's length
    usage: Usage = field(default_factory=Usage)

    def has_chunk(self, chunk: Chunk) -> bool:
        """Whether the chunk is in the turn's context. Only running turns have chunks."""
        return chunk.index < len(self.chunks) and self.chunks[chunk.index] is chunk

    @property
    def is_background(self) -> bool:
        return self.options.background

    @property
    def history_kv(self) -> int:
        """Return how many leading positions can have KV when the turn begins.

        These are the history without its last position, or the found tokens, whichever are more.
        """
        return max(self.history_tokens - 1, self.found_tokens, 0)

    @property
    def num_missing(self) -> int:
        """The maximum number of positions that must be computed before its next token.

        While the turn is not running, it is unknown which part of its context has KV. Then only the prompt
        of a queued turn counts, and nothing of a suspended turn.
        """
        if self.state is TurnState.RUNNING:
            return len(self.tokens) + self.pending_tokens - self.frontier
        if self.state is TurnState.QUEUED:
            return self.num_new_tokens
        return 0

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_end

    def set_usage(self, device_tokens: int, host_tokens: int, now: float) -> None:
        """Set the usage at the first admission.

        `device_tokens`, `host_tokens`: tokens of the history found in the tiers. The rest is recomputed.
        """
        history_kv = self.computed_to = self.history_kv
        self.usage.admitted_at = now
        self.usage.device_tokens, self.usage.host_tokens = device_tokens, host_tokens
        shared_tokens = max(self.found_tokens - self.own_tokens, 0)
        self.usage.shared_tokens = min(shared_tokens, device_tokens + host_tokens)
        self.usage.recomputed_tokens = history_kv - device_tokens - host_tokens
        self.usage.new_tokens = self.prompt_end - history_kv

    @property
    def is_prefill(self) -> bool:
        """Whether more than its next token must be computed."""
        return self.warm or self.frontier < len(self.tokens) + self.pending_tokens - 1

    @property
    def outputs_since(self) -> int:
        """Tokens of its reply since it was last admitted."""
        return self.num_output_tokens - self.outputs_before

    def ends_at(self, num_tokens: int) -> bool:
        """Whether the reply has its maximal length when the log has `num_tokens` tokens."""
        return num_tokens >= self.length_max

    def enqueue(self, arrival: int) -> None:
        """Set level, order and size of a new turn, the `arrival`-th turn."""
        self.arrival = arrival
        self.num_new_tokens = self.prompt_end - max(self.history_tokens, self.found_tokens)
        self.level = BACKGROUND_LEVEL if self.is_background else self.options.priority
        self.queue_order = (-self.level, arrival)

    def give_way(self, other: Turn, arrival: int) -> None:
        """Let another turn take this turn's place.

        If the other turn has the same share and a higher level, this turn rises by one level, so this happens
        only a few times. If it has the same share and level, the time of this turn is used up. Then this turn
        is queued again with the number `arrival`.
        """
        if other.share == self.share and self.level < other.level:
            self.level += 1
        elif other.share == self.share:
            self.arrival, self.moved_back = arrival, True
        self.queue_order = (-self.level, self.arrival)

    def move_to(self, state: TurnState) -> None:
        assert state in LEGAL_TRANSITIONS[self.state], (self.attempt_id, self.state, state)
        self.state = state
