"""Build and check the requests that the SDK sends.

Invalid arguments raise InvalidArgument before anything is sent. Examples: an unknown option, text that is not
valid Unicode, or a malformed id.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import indent
from typing import Any, Protocol, TypedDict, TypeVar

from google.protobuf import json_format, struct_pb2

from pensieve.client.values import ROLE_NUMBERS
from pensieve.errors import ConfigError, InvalidArgument
from pensieve.sampling import SAMPLING_HELP, SamplingOptions
from pensieve.v1 import conversation_pb2 as pb
from pensieve.v1 import jobs_pb2

F = TypeVar("F")
SAMPLING_LINE = "            (and the sampling parameters)\n"
JobSource = str | Path | bytes | Iterable[bytes]
MessageInput = str | Sequence[Mapping[str, Any]]
ID_PATTERN = re.compile(r"[A-Za-z0-9._~-]{1,128}")
PIECE_MESSAGES = 127  # maximum messages in one piece of an imported history
# Maximum bytes of a piece with several messages. A piece may consist of tool calls, and the server accepts at
# most this many bytes of tool calls in a request.
PIECE_BYTES = 256 << 10
CHUNK_BYTES = 256 << 10  # per piece of a job's file
MESSAGE_KEYS = ("role", "content", "tool_call_id", "tool_calls", "reasoning_content", "name")
PRIORITY_MAX = 8


class PagedRequest(Protocol):
    """A request for one page of a list."""

    page_size: int
    page_token: str


class PagedResponse(Protocol):
    """One page of a list. The token is empty on the last page."""

    next_page_token: str


class ConstraintInput(TypedDict, total=False):
    """The required form of a reply. Set exactly one of these fields."""

    json_schema: str | Mapping[str, Any]  # the reply is JSON that this schema accepts
    json_object: bool  # True: the reply is a JSON object
    regex: str  # the whole reply matches this expression
    choice: Sequence[str]  # the reply is one of these strings
    grammar: str  # the reply follows this grammar


class SendOptions(SamplingOptions, total=False):
    """The options of `Conversation.send`, explained there and in `SamplingOptions`."""

    request_id: str | None
    expected_revision: int | None
    create_if_missing: bool
    expected_return_seconds: float
    last_turn: bool
    priority: int
    metadata: Mapping[str, Any] | None
    constraint: ConstraintInput | None
    cache_salt: str
    timeout: float | None
    keep_partial: bool


NOT_SAMPLING = SendOptions.__annotations__.keys() - SamplingOptions.__annotations__.keys()


def explains_sampling(method: F) -> F:
    """Replace SAMPLING_LINE in a method's docstring by the list of sampling parameters."""
    if method.__doc__ is not None:  # it is None with python -OO
        method.__doc__ = method.__doc__.replace(SAMPLING_LINE, indent(SAMPLING_HELP, " " * 12))
    return method


def send_request(
    conversation_id: str, message: MessageInput, options: SendOptions
) -> pb.SendMessageRequest:
    """Build the request that begins a turn. The request_id makes it safe to send the request again."""
    priority = options.get("priority", 0)
    if not isinstance(priority, int) or abs(priority) > PRIORITY_MAX:
        raise InvalidArgument(
            "priority", f"must be a whole number in -{PRIORITY_MAX}..{PRIORITY_MAX}"
        )
    request = pb.SendMessageRequest(
        conversation_id=check_id(conversation_id),
        request_id=check_text("request_id", options.get("request_id") or new_id()),
        create_if_missing=options.get("create_if_missing", True),
        sampling=sampling_of({k: v for k, v in options.items() if k not in NOT_SAMPLING}),
        hints=pb.Hints(
            expected_return_seconds=options.get("expected_return_seconds", 0.0),
            last_turn=options.get("last_turn", False),
        ),
        priority=priority,
        metadata=struct("metadata", options.get("metadata") or {}),
        cache_salt=check_text("cache_salt", options.get("cache_salt", "")),
    )
    if (constraint := options.get("constraint")) is not None:
        request.constraint.CopyFrom(constraint_of(constraint))
    expected_revision = options.get("expected_revision")
    if expected_revision is not None:
        request.expected_revision = expected_revision
    if isinstance(message, bytes | Mapping) or not isinstance(message, Sequence):
        raise InvalidArgument("messages", "must be a string or a list of messages")
    for each in [{"content": message}] if isinstance(message, str) else message:
        _add_message(request, each)
    return request


def _add_message(
    request: pb.SendMessageRequest | pb.CreatePrefixRequest | pb.CreateConversationRequest,
    message: Mapping[str, Any],
) -> None:
    """Add a message in the form of OpenAI's API. None values count as missing."""
    if not isinstance(message, Mapping) or not {"content", "tool_calls"} & message.keys():
        raise InvalidArgument("messages", "each must be a mapping with `content` or `tool_calls`")
    for key in message:
        if key not in MESSAGE_KEYS:
            raise InvalidArgument(
                "messages", f"unknown key {key!r}; known keys: {', '.join(MESSAGE_KEYS)}"
            )
    role = message.get("role", "user")
    if role not in ROLE_NUMBERS:
        raise InvalidArgument("role", f"must be one of {', '.join(ROLE_NUMBERS)}, not {role!r}")
    texts = {name: message.get(name) for name in MESSAGE_KEYS if name not in ("role", "tool_calls")}
    checked = {name: check_text(name, text) for name, text in texts.items() if text is not None}
    if "reasoning_content" in checked:
        checked["thinking"] = checked.pop("reasoning_content")
    calls = [_tool_call(each) for each in message.get("tool_calls") or ()]
    request.messages.add(role=ROLE_NUMBERS[role], tool_calls=calls, **checked)


def _tool_call(given: Mapping[str, Any]) -> pb.ToolCall:
    """Convert {"id", "type": "function", "function": {"name", "arguments"}}; the arguments are JSON text."""
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or "name" not in function:
        raise InvalidArgument(
            "tool_calls", "each needs an id, and a function with name and arguments"
        )
    return pb.ToolCall(
        id=check_text("tool_calls.id", given.get("id") or ""),
        name=check_text("tool_calls.function.name", function["name"]),
        arguments=check_text("tool_calls.function.arguments", function.get("arguments") or ""),
    )


def sampling_of(given: Mapping[str, Any]) -> pb.Sampling:
    """Build a protobuf Sampling from fields by name. None values count as missing."""
    sampling = pb.Sampling()
    known = {field.name for field in pb.Sampling.DESCRIPTOR.fields}
    for name, value in given.items():
        if name not in known:
            raise InvalidArgument(name, "is not a sampling parameter")
        if value is None:
            continue
        try:
            if name in ("stop", "stop_token_ids"):
                getattr(sampling, name).extend([value] if isinstance(value, str) else value)
            elif name == "logit_bias":
                sampling.logit_bias.update(value)
            else:
                setattr(sampling, name, value)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(name, str(error)) from None
    return sampling


def constraint_of(given: Mapping[str, Any]) -> pb.Constraint:
    """Build a protobuf Constraint. A schema may be JSON text or a dict."""
    kinds = [field.name for field in pb.Constraint.DESCRIPTOR.fields]
    if not isinstance(given, Mapping) or len(given) != 1 or not given.keys() <= set(kinds):
        raise InvalidArgument(
            "constraint", f"must be a mapping with exactly one of {', '.join(kinds)}"
        )
    ((name, value),) = given.items()
    field, constraint = f"constraint.{name}", pb.Constraint()
    try:
        if name == "choice":
            if isinstance(value, str):
                raise TypeError("must be a list of strings")
            constraint.choice.choices.extend(check_text(field, each) for each in value)
        elif name == "json_object":
            constraint.json_object = value
        elif name == "json_schema" and not isinstance(value, str):
            constraint.json_schema = json.dumps(value)
        else:
            setattr(constraint, name, check_text(field, value))
    except (TypeError, ValueError) as error:
        raise InvalidArgument(field, str(error)) from None
    return constraint


def create_request(
    conversation_id: str,
    system_prompt: str,
    tools: Sequence[Mapping[str, Any]],
    template_options: Mapping[str, Any] | None,
    metadata: Mapping[str, Any] | None,
    prefix_id: str,
    messages: Sequence[Mapping[str, Any]],
) -> pb.CreateConversationRequest:
    """Build the request that creates a conversation with its own settings."""
    request = pb.CreateConversationRequest(
        conversation_id=conversation_id,
        metadata=struct("metadata", metadata or {}),
        prefix_id=check_text("prefix_id", prefix_id),
    )
    _set_beginning(request, system_prompt, tools, template_options, messages)
    return request


def _set_beginning(
    request: pb.CreateConversationRequest | pb.CreatePrefixRequest,
    system_prompt: str,
    tools: Sequence[Mapping[str, Any]],
    template_options: Mapping[str, Any] | None,
    messages: Sequence[Mapping[str, Any]],
) -> None:
    request.system_prompt = check_text("system_prompt", system_prompt)
    request.tools.extend(struct("tools", tool) for tool in tools)
    request.template_options.CopyFrom(struct("template_options", template_options or {}))
    for each in messages:
        _add_message(request, each)


def import_requests(
    request: pb.CreateConversationRequest,
) -> Callable[[], Iterator[pb.ImportConversationRequest]] | None:
    """Return a function that yields the requests of an import; None if one request is enough."""
    pieces = list(_pieces(request.messages))
    if len(pieces) <= 1:
        return None

    def requests() -> Iterator[pb.ImportConversationRequest]:
        without_messages = pb.CreateConversationRequest()
        without_messages.CopyFrom(request)
        del without_messages.messages[:]
        yield pb.ImportConversationRequest(conversation=without_messages)
        for piece in pieces:
            yield pb.ImportConversationRequest(messages=piece)
        yield pb.ImportConversationRequest(complete=True)

    return requests


def _pieces(messages: Iterable[pb.NewMessage]) -> Iterator[list[pb.NewMessage]]:
    """Yield groups of messages that each fit into one request."""
    piece: list[pb.NewMessage] = []
    num_bytes = 0
    for each in messages:
        size = each.ByteSize()
        if piece and (len(piece) == PIECE_MESSAGES or num_bytes + size > PIECE_BYTES):
            yield piece
            piece, num_bytes = [], 0
        piece.append(each)
        num_bytes += size
    if piece:
        yield piece


def prefix_request(
    prefix_id: str,
    system_prompt: str,
    tools: Sequence[Mapping[str, Any]],
    template_options: Mapping[str, Any] | None,
    messages: Sequence[Mapping[str, Any]],
    keep_warm: bool,
) -> pb.CreatePrefixRequest:
    """Build the request that declares a prefix."""
    request = pb.CreatePrefixRequest(prefix_id=prefix_id, keep_warm=keep_warm)
    _set_beginning(request, system_prompt, tools, template_options, messages)
    return request


def fork_request(
    conversation_id: str,
    at_revision: int | None,
    new_conversation_id: str | None,
    metadata: Mapping[str, Any] | None,
) -> pb.ForkConversationRequest:
    """Build the request that forks a conversation."""
    request = pb.ForkConversationRequest(
        conversation_id=conversation_id,
        new_conversation_id=new_id()
        if new_conversation_id is None
        else check_id(new_conversation_id),
        metadata=struct("metadata", metadata or {}),
    )
    if at_revision is not None:
        request.at_revision = at_revision
    return request


class JobUpload:
    """The messages of a CreateJob call that uploads a file. Call `messages` for each try.

    A file or bytes can be sent again; the pieces of an iterable cannot. If reading the source fails, the
    last message is not sent, so that the daemon stores nothing. The exception is kept in `error`.
    """

    def __init__(
        self,
        source: JobSource,
        job_id: str | None,
        name: str,
        endpoint: str,
        check_only: bool,
    ) -> None:
        self.error: Exception | None = None  # raised by the source
        self.can_repeat = isinstance(source, str | Path | bytes)
        self._source = source
        self.header = jobs_pb2.JobHeader(
            job_id=new_id() if job_id is None else check_id(job_id, "job_id"),
            name=check_text("name", name),
            endpoint=check_text("endpoint", endpoint),
            check_only=check_only,
        )
        if self.can_repeat:
            digest = hashlib.sha256()
            for chunk in self._chunks():
                digest.update(chunk)
                self.header.num_bytes += len(chunk)
            self.header.sha256 = digest.hexdigest()

    def messages(self) -> Iterator[jobs_pb2.CreateJobRequest]:
        """Yield the messages in order."""
        yield jobs_pb2.CreateJobRequest(header=self.header)
        try:
            for chunk in self._chunks():
                yield jobs_pb2.CreateJobRequest(chunk=chunk)
        except Exception as error:
            self.error = error
            return
        yield jobs_pb2.CreateJobRequest(complete=True)

    def _chunks(self) -> Iterator[bytes]:
        source = self._source
        if isinstance(source, str | Path):
            try:
                with Path(source).open("rb") as file:
                    while chunk := file.read(CHUNK_BYTES):
                        yield chunk
            except OSError as error:
                raise ConfigError(f"cannot read {source}: {error.strerror}") from error
            return
        for each in [source] if isinstance(source, bytes) else source:
            for first in range(0, len(each), CHUNK_BYTES):
                yield each[first : first + CHUNK_BYTES]


def struct(name: str, value: Mapping[str, Any]) -> struct_pb2.Struct:
    """Convert a mapping to a protobuf Struct. An error names the argument `name`."""
    given = struct_pb2.Struct()
    try:
        json_format.ParseDict(dict(value), given)
    except (json_format.ParseError, ValueError, TypeError) as error:
        raise InvalidArgument(name, f"is not JSON: {error}") from None
    return given


def check_text(name: str, text: str) -> str:
    """Return the text. Raises InvalidArgument if it cannot be encoded as UTF-8. NUL is allowed."""
    if not isinstance(text, str):
        raise InvalidArgument(name, f"must be a string, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(name, "the text has an unpaired surrogate") from None
    return text


def check_id(given: str, name: str = "conversation_id") -> str:
    """Return the id of a conversation, prefix, request or job. Raises InvalidArgument if it is malformed."""
    if not isinstance(given, str) or not ID_PATTERN.fullmatch(given):
        raise InvalidArgument(name, "must be 1 to 128 characters of A-Z a-z 0-9 . _ ~ -")
    return given


def new_id() -> str:
    """Return a random id for a conversation, a request or a job."""
    return uuid.uuid4().hex
