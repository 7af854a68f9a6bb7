"""The messages that an engine receives and the events that it publishes, as frozen values.

They contain only ids, bytes and numbers, so they can cross a pipe to another process.

An `attempt_id` identifies one attempt at a turn (`LiveTurn.attempt_id`). The store and clients use another
id, the `turn_id`, which all attempts at a turn share. The engine does not know the `turn_id`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pensieve.core.iteration import SampledToken
from pensieve.core.turn import FinishReason, TurnOptions, Usage

TOKEN_BYTES = 4  # of a packed token id


@dataclass(frozen=True, slots=True)
class SubmitTurn:
    """Run a turn. Its context is the conversation's log followed by the tokens of the new messages.

    `tokens` are the tokens from position `first_position` on. If the engine has KV of the conversation, it
    also has the earlier tokens. Otherwise it asks for them with `LogNeeded`.
    """

    attempt_id: int  # the attempt's number; unique for the life of the engine
    conversation_id: str
    tokens: bytes  # packed uint32 in native order
    history_tokens: int  # length of the log: positions before it belong to earlier turns
    options: TurnOptions = field(default_factory=TurnOptions)
    warm: bool = False  # only bring the conversation's KV to the device
    first_position: int = 0
    share: str = ""  # the owner in fair queueing, usually a tenant; see core/fair_queue.py
    weight: float = 1.0  # weight of that share
    # The root of its chunks' identities (core/identities.py); "": its chunks are not found by content.
    root: str = ""
    # True: no further turn continues its conversation; other turns may find its chunks by content.
    is_temporary: bool = False


@dataclass(frozen=True, slots=True)
class ProvideLog:
    """The answer to `LogNeeded`."""

    attempt_id: int
    tokens: bytes  # of the positions before the turn's `first_position`


@dataclass(frozen=True, slots=True)
class CancelTurn:
    attempt_id: int
    log_tokens: int  # the log's length after the cancel; KV after it is dropped


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
    to_host: bool = False  # False: its KV is dropped
    query_id: int = 0  # 0: no answer


@dataclass(frozen=True, slots=True)
class ListCached:
    query_id: int
    limit: int
    least_valuable: bool = False  # True: the least valuable first; False: the largest first


@dataclass(frozen=True, slots=True)
class Explain:
    query_id: int
    conversation_id: str


@dataclass(frozen=True, slots=True)
class Picture:
    """Return the locations of the chunks of recently used conversations; see cache_views.py."""

    query_id: int
    limit: int
    prefix: str = ""  # of the ids to include


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
    num_tokens: int  # of the log; KV after these tokens is not wanted
    before_chunk: int  # the part ends before this chunk; 0: it ends where the KV ends
    num_bytes_max: int  # of the part; one chunk may be longer


@dataclass(frozen=True, slots=True)
class OpenImport:
    """Accept imports of KV for a conversation, until a message uses or changes the conversation."""

    conversation_id: str


@dataclass(frozen=True, slots=True)
class ImportKv:
    """Adopt chunks whose KV another engine has exported.

    `body` is the KV of the chunks. In the first part, the conversation's log comes before it.
    """

    query_id: int
    conversation_id: str
    first_chunk: int
    slots: tuple[int, ...]  # for each chunk: how many leading slots have KV
    crcs: tuple[int, ...]  # of the bytes of each chunk
    num_log_tokens: int
    body: bytes
    damaged: tuple[int, ...] = ()  # indexes into `slots` of chunks with a wrong CRC
    is_verified: bool = False  # whether `damaged` is set


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
Freeing = CancelTurn | DeleteConversation  # messages that only free memory are never refused


@dataclass(frozen=True, slots=True)
class LogNeeded:
    """A turn needs a conversation's log, which the engine does not have. The turn waits for `ProvideLog`."""

    attempt_id: int
    conversation_id: str
    num_tokens: int  # how many tokens from the log's beginning are needed


@dataclass(frozen=True, slots=True)
class TurnAdmitted:
    """A turn has its pages and is part of the next iterations."""

    attempt_id: int
    missing_tokens: int = 0  # of its context, to compute before its first token is sampled


@dataclass(frozen=True, slots=True)
class TurnEnded:
    attempt_id: int
    conversation_id: str
    finish: FinishReason
    usage: Usage
    failure: str | None = None  # the reason, if finish is FAILED


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a query: figures by name, problems found, or rows of values."""

    query_id: int
    figures: dict[str, float] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    rows: tuple[tuple[str | float, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class KvExported:
    """The answer to `ExportKv`: consecutive chunks, or nothing if no chunks are left."""

    query_id: int
    refusal: str = ""  # why nothing is exported
    first_chunk: int = 0
    slots: tuple[int, ...] = ()
    crcs: tuple[int, ...] = ()
    num_tokens: int = 0  # of the log, up to the last token with KV in this part
    digest: str = ""  # of these tokens
    next_before: int = 0  # `before_chunk` of the next part; 0: no further part
    body: bytes = b""


QueryReply = Answer | KvExported
EngineTurnEvent = SampledToken | LogNeeded | TurnAdmitted | TurnEnded
EngineEvent = SampledToken | LogNeeded | TurnAdmitted | TurnEnded | Answer | KvExported
