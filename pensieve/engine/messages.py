"""The values that cross between an engine and the rest of the world: messages go in, events come out.

All are plain and frozen (ids, bytes, numbers), so they may as well cross a pipe to another process.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pensieve.core.iteration import SampledToken
from pensieve.core.turn import FinishReason, TurnOptions, Usage


@dataclass(frozen=True, slots=True)
class SubmitTurn:
    """Run a turn: its conversation's log and, behind it, the tokens of the new messages.

    `tokens` are those of the positions from `first_position` on.  What lies before, the engine knows as long
    as it holds KV of the conversation, or asks for with `LogNeeded`.
    """

    turn_id: int  # unique for the life of the engine
    conversation_id: str
    tokens: bytes  # packed uint32 in native order
    history_tokens: int  # length of the log: positions before it belong to earlier turns
    options: TurnOptions = field(default_factory=TurnOptions)
    warm: bool = False  # only bring the conversation's KV to the device
    first_position: int = 0
    prefix_of: str = ""  # a conversation whose KV of the first prefix_tokens is this one's, too
    prefix_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ProvideLog:
    """The answer to `LogNeeded`."""

    turn_id: int
    tokens: bytes  # of the positions before the turn's `first_position`


@dataclass(frozen=True, slots=True)
class CancelTurn:
    turn_id: int
    keep_tokens: int  # the log's length after the cancel; KV behind it is forgotten


@dataclass(frozen=True, slots=True)
class ForkConversation:
    source_id: str
    num_tokens: int
    target_id: str


@dataclass(frozen=True, slots=True)
class RewindConversation:
    conversation_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class DeleteConversation:
    conversation_id: str


@dataclass(frozen=True, slots=True)
class EvictConversation:
    conversation_id: str
    to_host: bool = False  # else its KV is dropped
    query_id: int = 0  # 0: nobody waits for the answer


@dataclass(frozen=True, slots=True)
class ListCached:
    query_id: int
    limit: int
    least_valuable: bool = False  # else the largest first


@dataclass(frozen=True, slots=True)
class Explain:
    query_id: int
    conversation_id: str


@dataclass(frozen=True, slots=True)
class GetStats:
    query_id: int


@dataclass(frozen=True, slots=True)
class CheckIntegrity:
    query_id: int


Message = (
    SubmitTurn
    | ProvideLog
    | CancelTurn
    | ForkConversation
    | RewindConversation
    | DeleteConversation
    | EvictConversation
    | ListCached
    | Explain
    | GetStats
    | CheckIntegrity
)


@dataclass(frozen=True, slots=True)
class LogNeeded:
    """The engine knows too little of a conversation's log to run a turn: `ProvideLog` continues it."""

    turn_id: int
    conversation_id: str
    num_tokens: int  # the first so many are wanted


@dataclass(frozen=True, slots=True)
class TurnEnded:
    turn_id: int
    conversation_id: str
    finish: FinishReason
    usage: Usage
    failure: str | None = None  # why, when finish is FAILED


@dataclass(frozen=True, slots=True)
class Answer:
    """To a query: figures by name, the problems found (none: all is well), or rows of values."""

    query_id: int
    figures: dict[str, float] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    rows: tuple[tuple[str | float, ...], ...] = ()


Event = SampledToken | LogNeeded | TurnEnded | Answer
