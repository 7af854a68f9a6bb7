"""The messages that an engine receives and the events that it publishes, as frozen values.

They hold ids, bytes and numbers only, so they can cross a pipe to another process.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pensieve.core.iteration import SampledToken
from pensieve.core.turn import FinishReason, TurnOptions, Usage

TOKEN_BYTES = 4  # of a token id, where they are packed


@dataclass(frozen=True, slots=True)
class SubmitTurn:
    """Run a turn, whose context is the conversation's log followed by the tokens of the new messages.

    `tokens` are those of the positions from `first_position` on.  The engine knows the tokens before them as
    long as it holds KV of the conversation; otherwise it asks for them with `LogNeeded`.
    """

    # Unique for the life of the engine, in all messages, in core and in journals: the `LiveTurn.number` of
    # an attempt, not the `turn_id` that the store and clients know a turn by.
    turn_id: int
    conversation_id: str
    tokens: bytes  # packed uint32 in native order
    history_tokens: int  # length of the log: positions before it belong to earlier turns
    options: TurnOptions = field(default_factory=TurnOptions)
    warm: bool = False  # only bring the conversation's KV to the device
    first_position: int = 0
    prefix_of: str = (
        ""  # a conversation with the same first prefix_tokens, whose KV this one may share
    )
    prefix_tokens: int = 0
    share: str = ""  # whose it is, where several share the machine; see core/fair_queue.py
    weight: float = 1.0  # of that share


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
    query_id: int = 0  # 0: no answer is wanted


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
class Picture:
    """Where the chunks of the conversations lie that were used last; see cache_views.py."""

    query_id: int
    limit: int
    prefix: str = ""  # of the ids that are shown


@dataclass(frozen=True, slots=True)
class GetStats:
    query_id: int


@dataclass(frozen=True, slots=True)
class CheckIntegrity:
    query_id: int


@dataclass(frozen=True, slots=True)
class ExportKv:
    """Read a part of a conversation's KV, for another engine; see hand_over.py."""

    query_id: int
    conversation_id: str
    num_tokens: int  # KV behind them is not wanted
    before_chunk: int  # the part ends before this chunk, or where KV does; 0: at the end
    num_bytes_max: int  # of the part, if it is more than one chunk


@dataclass(frozen=True, slots=True)
class OpenImport:
    """KV of this conversation may come: from now on each message that uses or changes it ends that."""

    conversation_id: str


@dataclass(frozen=True, slots=True)
class ImportKv:
    """Adopt chunks whose KV another engine has exported.

    `body` is the conversation's log, if it is the first part, and then KV of the chunks.
    """

    query_id: int
    conversation_id: str
    first_chunk: int
    slots: tuple[int, ...]  # of each chunk: how many leading ones have KV
    crcs: tuple[int, ...]  # of the bytes of each chunk
    num_log_tokens: int
    body: bytes
    damaged: tuple[int, ...] = ()  # places in `slots` of chunks whose bytes are not what was sent
    is_verified: bool = False  # `damaged` is known


EngineMessage = (
    SubmitTurn
    | ProvideLog
    | CancelTurn
    | ForkConversation
    | RewindConversation
    | DeleteConversation
    | EvictConversation
    | ListCached
    | Explain
    | Picture
    | GetStats
    | CheckIntegrity
    | ExportKv
    | OpenImport
    | ImportKv
)


Freeing = CancelTurn | DeleteConversation  # they only free things, and are never refused


@dataclass(frozen=True, slots=True)
class LogNeeded:
    """The engine lacks tokens of a conversation's log that a turn needs, and waits for `ProvideLog`."""

    turn_id: int
    conversation_id: str
    num_tokens: int  # how many of its first tokens are needed


@dataclass(frozen=True, slots=True)
class TurnAdmitted:
    """The turn waits no longer: it has its pages, and is part of the next iterations."""

    turn_id: int
    missing_tokens: int = 0  # of its context, that are computed before its first token is sampled


@dataclass(frozen=True, slots=True)
class TurnEnded:
    turn_id: int
    conversation_id: str
    finish: FinishReason
    usage: Usage
    failure: str | None = None  # why, when finish is FAILED


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a query: figures by name, problems that were found (if any), or rows of values."""

    query_id: int
    figures: dict[str, float] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    rows: tuple[tuple[str | float, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class KvExported:
    """The answer to `ExportKv`: chunks that follow each other, without any if there are none left."""

    query_id: int
    refusal: str = ""  # why there is nothing
    first_chunk: int = 0
    slots: tuple[int, ...] = ()
    crcs: tuple[int, ...] = ()
    num_tokens: int = 0  # of the log, up to the last one with KV in this part
    digest: str = ""  # of these tokens
    next_before: int = 0  # where to go on; 0: nowhere
    body: bytes = b""


QueryReply = Answer | KvExported  # to a query
EngineTurnEvent = SampledToken | LogNeeded | TurnAdmitted | TurnEnded
EngineEvent = SampledToken | LogNeeded | TurnAdmitted | TurnEnded | Answer | KvExported
