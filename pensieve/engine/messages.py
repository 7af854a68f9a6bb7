"""The values that cross between an engine and the rest of the world: messages go in, events come out.

All are plain and frozen (ids, bytes, numbers), so they may as well cross a pipe to another process.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pensieve.core.iteration import Logprob
from pensieve.core.sampling import Sampling
from pensieve.core.turn import FinishReason, Usage


@dataclass(frozen=True, slots=True)
class SubmitTurn:
    turn_id: int  # unique for the life of the engine
    conversation_id: str
    tokens: bytes  # the whole log and the new prompt, packed uint32 in native order
    history_tokens: int  # how many of them are the log
    sampling: Sampling = field(default_factory=Sampling)
    warm: bool = False  # only bring the conversation's KV to the device
    away_seconds: float = 0.0  # how long the conversation is expected to be idle after it
    priority: int = 0
    prefix_of: str = ""  # a conversation whose KV of the first prefix_tokens is this one's, too
    prefix_tokens: int = 0


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
class TurnDelta:
    """One sampled token, and the text that it releases (perhaps none yet)."""

    turn_id: int
    conversation_id: str
    token_id: int
    text: str
    logprob: float | None = None
    top_logprobs: tuple[Logprob, ...] = ()


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


Event = TurnDelta | TurnEnded | Answer
