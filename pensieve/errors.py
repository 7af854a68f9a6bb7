"""All errors, as one tree of classes, each with a gRPC status and an exit code.

    PensieveError
    ├── InvalidArgument           a field of a request is invalid; `field` names the field
    ├── NotFound                  no such conversation, message or revision
    ├── AlreadyExists             the id is taken
    │   └── PrefixTaken           the prefix_id is in use with another system prompt or other tools
    ├── TurnRunning               a turn of this conversation is running; `turn_id` names the turn
    ├── StaleRevision             expected_revision is not the current revision
    ├── WrongJobState             the job's state does not allow the operation; for example, the job has ended
    ├── ContextFull               the turn does not fit the context; `tokens_max` is the limit
    ├── QueueFull                 a bounded queue is full, or a tenant's `limit` is reached; retry later
    ├── StorageFull               the tenant's `storage_bytes` or `prefixes_max` is reached; delete some data
    ├── DeadlineExceeded          the timeout has passed; the message says what the history keeps
    ├── Unauthenticated           the token is missing or unknown
    ├── PermissionDenied          the token does not allow the call
    ├── Unavailable               the daemon is draining or unreachable, or cannot write to its disk
    │   ├── Loading               the model is being loaded, also after a restart; the request had no effect
    │   ├── OwnedElsewhere        another daemon owns the conversation; `address` is the owner's address
    │   └── StoreUnavailable      the history could not be written (I/O error, locked)
    │       ├── DiskFull          the disk of the history is full; reading and deleting still work
    │       └── ErasurePending    deleted text is gone from the history, but not yet erased from its files
    ├── TurnInterrupted           the turn was stopped: conversation deleted, or no client read the reply
    ├── TurnFailed                the engine could not finish this turn (`reason`, e.g. NAN_LOGITS)
    ├── ConfigError               a flag, variable or file has an invalid value
    ├── AddressInUse              the address to listen on is taken
    ├── ModelError                the model cannot be loaded, or cannot be served exactly
    │   └── UnsupportedModel      the model loads, but cannot be served exactly; the message says why
    ├── StoreError                the history on disk cannot be used
    │   ├── StoreTooNew           written by a newer version
    │   ├── StoreCorrupt          a database page or a record fails its check
    │   │   └── BackupDamaged     a file of a backup fails its check; the message names the file
    │   └── StoreLocked           another process uses the data folder; the message names the process
    ├── DeviceError               the device failed, or has too little memory
    └── ServerFault               an unexpected error; the message and the server's log have its incident id

Any other exception is a bug. Clients receive a ServerFault, with the status INTERNAL.
"""

from __future__ import annotations

ONE_LINE_CHARACTERS_MAX = 300
CLIENT_CHARACTERS_MAX = 400


def one_line(error: BaseException) -> str:
    """Return the start of an error's message as one line.

    Use this function for errors of libraries whose messages have several paragraphs.
    """
    text = _unbroken(error)
    if len(text) <= ONE_LINE_CHARACTERS_MAX:
        return text
    return text[: ONE_LINE_CHARACTERS_MAX - 3] + "..."


def whole_line(error: BaseException) -> str:
    """Return the whole message of an error in one line, after the class unless it is a PensieveError."""
    text = _unbroken(error)
    return text if isinstance(error, PensieveError) else f"{type(error).__name__}: {text}"


def shortened(text: str) -> str:
    """Return a text for a client: one line of at most CLIENT_CHARACTERS_MAX characters."""
    text = " ".join(text.split()).encode("utf-8", "replace").decode()
    most = CLIENT_CHARACTERS_MAX
    return text if len(text) <= most else text[: most - 1] + "…"


def _unbroken(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class PensieveError(Exception):
    """The base class. Only subclasses are raised.

    Attributes:
        grpc_status: the gRPC status that carries the error.
        exit_code: the exit code of a command that ends with the error.
        reason: an identifier for programs, the same in every version.
        retry_after_seconds: seconds after which a retry may succeed; None if the server has not said.
    """

    grpc_status = "INTERNAL"
    exit_code = 1
    reason = "INTERNAL"
    retry_after_seconds: float | None = None


class InvalidArgument(PensieveError):
    """A value in a request or on the command line is wrong: `field` names it, `problem` says why."""

    grpc_status = "INVALID_ARGUMENT"
    exit_code = 2
    reason = "INVALID_ARGUMENT"
    is_too_long = False  # True: the text has so many characters that no context can hold it

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class NotFound(PensieveError):
    """There is no such conversation, message or revision."""

    grpc_status = "NOT_FOUND"
    reason = "NOT_FOUND"


class AlreadyExists(PensieveError):
    """The id is taken."""

    grpc_status = "ALREADY_EXISTS"
    reason = "ALREADY_EXISTS"


class PrefixTaken(AlreadyExists):
    """The prefix_id is in use with another system prompt or other tools."""

    grpc_status = "FAILED_PRECONDITION"
    reason = "PREFIX_TAKEN"


class TurnRunning(PensieveError):
    """The conversation is running the turn `turn_id`: wait for it, or cancel it."""

    grpc_status = "ABORTED"
    reason = "TURN_RUNNING"

    def __init__(self, conversation_id: str, turn_id: str) -> None:
        super().__init__(f"conversation {conversation_id!r} already runs turn {turn_id}")
        self.conversation_id = conversation_id
        self.turn_id = turn_id


class StaleRevision(PensieveError):
    """The conversation is at revision `actual`, not at the expected revision: read the conversation again."""

    grpc_status = "FAILED_PRECONDITION"
    reason = "STALE_REVISION"

    def __init__(self, expected: int, actual: int, sentence: str = "") -> None:
        """`sentence`: the message, if something other than the revision has changed."""
        super().__init__(
            sentence or f"expected revision {expected}, but the conversation is at {actual}"
        )
        self.expected = expected
        self.actual = actual


class WrongJobState(PensieveError):
    """The state of the job does not allow the operation. The message names the state."""

    grpc_status = "FAILED_PRECONDITION"
    reason = "JOB_STATE"


class ContextFull(PensieveError):
    """The turn needs `tokens` tokens, more than the limit `tokens_max`; nothing was changed."""

    grpc_status = "OUT_OF_RANGE"
    reason = "CONTEXT_FULL"

    def __init__(self, tokens: int, tokens_max: int) -> None:
        super().__init__(
            f"this turn needs a context of {tokens} tokens and the limit is {tokens_max}; "
            "the conversation is unchanged"
        )
        self.tokens = tokens
        self.tokens_max = tokens_max


class QueueFull(PensieveError):
    """A bounded queue is full, or a tenant's `limit` is reached: retry later."""

    grpc_status = "RESOURCE_EXHAUSTED"
    reason = "QUEUE_FULL"
    limit = ""  # name of the tenant's limit in the token file; empty: a limit of the daemon


class StorageFull(PensieveError):
    """The tenant's `storage_bytes` or `prefixes_max` is reached: delete conversations, jobs or prefixes."""

    grpc_status = "RESOURCE_EXHAUSTED"
    reason = "STORAGE_FULL"


class DeadlineExceeded(PensieveError):
    """The timeout has passed. For a turn, the message says what the history keeps."""

    grpc_status = "DEADLINE_EXCEEDED"
    reason = "DEADLINE_EXCEEDED"


class Unauthenticated(PensieveError):
    """The daemon needs a token, and the token is missing or unknown."""

    grpc_status = "UNAUTHENTICATED"
    reason = "UNAUTHENTICATED"


class PermissionDenied(PensieveError):
    """The token does not allow the call."""

    grpc_status = "PERMISSION_DENIED"
    reason = "PERMISSION_DENIED"


class Unavailable(PensieveError):
    """The daemon is draining or unreachable. The SDK raises this only after the retries of its `Retry`."""

    grpc_status = "UNAVAILABLE"
    reason = "UNAVAILABLE"
    may_have_arrived = True  # False: the request has certainly not reached a daemon


class Loading(Unavailable):
    """The server is loading its model; clients wait and retry (see `pensieve.client.Retry`)."""

    reason = "LOADING"


class OwnedElsewhere(Unavailable):
    """Another daemon owns the conversation: `replica` at `address`. Only the owner may write to it.

    For a batch job, `kind` is "job" and `conversation_id` is the id of the job.
    """

    reason = "OWNED_ELSEWHERE"

    def __init__(
        self, conversation_id: str, replica: str, address: str, kind: str = "conversation"
    ) -> None:
        super().__init__(f"{kind} {conversation_id!r} is served by {replica} at {address}")
        self.conversation_id = conversation_id
        self.replica = replica
        self.address = address


class StoreUnavailable(Unavailable):
    """The history cannot be written at the moment: the disk is full or fails, or the history is locked."""

    reason = "STORE_UNAVAILABLE"


class DiskFull(StoreUnavailable):
    """The disk of the history is full. Conversations can still be read and deleted."""

    reason = "DISK_FULL"


class ErasurePending(StoreUnavailable):
    """Deleted text is gone from the history, but not yet erased from its files."""

    reason = "ERASURE_PENDING"


class TurnInterrupted(PensieveError):
    """The turn was stopped: the conversation was deleted, or no client read the reply."""

    grpc_status = "ABORTED"
    reason = "TURN_INTERRUPTED"


class TurnFailed(PensieveError):
    """The engine could not finish the turn. `reason` is an identifier such as NAN_LOGITS."""

    grpc_status = "INTERNAL"

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ConfigError(PensieveError):
    """A flag, a variable or a file has an invalid value."""

    grpc_status = "FAILED_PRECONDITION"
    exit_code = 3
    reason = "CONFIG"


class AddressInUse(PensieveError):
    """Another program listens on the address."""

    grpc_status = "FAILED_PRECONDITION"
    exit_code = 5
    reason = "ADDRESS_IN_USE"


class ModelError(PensieveError):
    """The model cannot be loaded, or cannot be served exactly."""

    grpc_status = "FAILED_PRECONDITION"
    exit_code = 4
    reason = "MODEL"


class UnsupportedModel(ModelError):
    """The model loads, but cannot be served exactly. The message says why."""

    reason = "MODEL_UNSUPPORTED"


class StoreError(PensieveError):
    """The history on disk cannot be used."""

    grpc_status = "FAILED_PRECONDITION"
    exit_code = 3
    reason = "STORE"


class StoreTooNew(StoreError):
    """A newer version wrote the history."""

    reason = "STORE_TOO_NEW"


class StoreCorrupt(StoreError):
    """A database page or a record of the history fails its check."""

    reason = "STORE_CORRUPT"


class BackupDamaged(StoreCorrupt):
    """A file of a backup fails its check. The message names the file."""

    reason = "BACKUP_DAMAGED"


class StoreLocked(StoreError):
    """Another process uses the data folder. The message names the process."""

    reason = "STORE_LOCKED"


class DeviceError(PensieveError):
    """The device failed, or has too little memory."""

    grpc_status = "UNAVAILABLE"
    exit_code = 6
    reason = "DEVICE"


class ServerFault(PensieveError):
    """An unexpected error in the server. The server's log has the details."""
