"""Check the sizes of a request's fields in the serialized request, before it is parsed.

Parsing a few megabytes of empty messages, deep JSON or maps would block the event loop for seconds. So fields
with many elements must be small:

* `check` looks at the fields of a request (at most FIELDS_MAX), and at the fields of each message that LIMITS
  lists (at most INNER_FIELDS_MAX). It does not look into other messages.
* All fields that may be large after this check are texts. The time to parse a text grows
  only with its length.
* JSON values are counted while they are converted (json_values.py).

Every stored message can be read again. The largest message fits into the 4 MiB that gRPC clients accept by
default. With its tokens, it fits into 8 MiB, which our SDK accepts. A page of a list ends before the store's
PAGE_BYTES_MAX, unless a single item is larger.

The proto's comments repeat these limits, and docs/security.md has the most important ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pensieve.errors import InvalidArgument

REQUEST_BYTES_MAX = 4 << 20  # limit for any method
SMALL_REQUEST_BYTES_MAX = 64 << 10  # for methods that are not named below
RESPONSE_BYTES_MAX = 8 << 20

MESSAGES_MAX = 128  # per turn
TEXT_BYTES_MAX = 3 << 20  # text of all messages of a request
SYSTEM_PROMPT_BYTES_MAX = 1 << 20
FEW_SHOT_BYTES_MAX = 1 << 20  # all messages of a prefix
TOOLS_MAX = 256
TOOLS_BYTES_MAX = 256 << 10  # all tools of a request
CHUNK_BYTES_MAX = 1 << 20  # piece of a job's file, or of a forwarded HTTP body
HTTP_HEAD_BYTES_MAX = 256 << 10  # of a forwarded request; more than our HTTP server accepts
HTTP_HEADERS_MAX = 256
METADATA_BYTES_MAX = 16 << 10
TEMPLATE_OPTIONS_BYTES_MAX = 16 << 10
SAMPLING_BYTES_MAX = 64 << 10
CONSTRAINT_BYTES_MAX = 80 << 10  # JSON text, including its escapes
FIELD_BYTES_MAX = 4 << 10  # for fields that are not named below
NAME_BYTES_MAX = 512  # names of tools, calls and authors
TOOL_CALLS_MAX = 64  # per message
TOOL_CALLS_BYTES_MAX = 256 << 10  # arguments of all tool calls of a request
FIELDS_MAX = 512  # per request; each list element counts as one
# Per message in a request; each tool call counts as one field. A nested request may have FIELDS_MAX.
INNER_FIELDS_MAX = 72

VARINT, FIXED64, BYTES, GROUP, GROUP_END, FIXED32 = range(6)  # wire types


class Limit(NamedTuple):
    bytes_max: int  # of all elements
    num_max: int | None = None


METADATA = Limit(METADATA_BYTES_MAX)
LIMITS: Mapping[str, tuple[int, Mapping[str, Limit]]] = {
    "SendMessageRequest": (
        REQUEST_BYTES_MAX,
        {
            "messages": Limit(TEXT_BYTES_MAX, MESSAGES_MAX),
            "sampling": Limit(SAMPLING_BYTES_MAX),
            "metadata": METADATA,
            "constraint": Limit(CONSTRAINT_BYTES_MAX),
        },
    ),
    "CreateConversationRequest": (
        REQUEST_BYTES_MAX,
        {
            "messages": Limit(TEXT_BYTES_MAX, MESSAGES_MAX - 1),
            "system_prompt": Limit(SYSTEM_PROMPT_BYTES_MAX),
            "tools": Limit(TOOLS_BYTES_MAX, TOOLS_MAX),
            "template_options": Limit(TEMPLATE_OPTIONS_BYTES_MAX),
            "metadata": METADATA,
        },
    ),
    "ImportConversationRequest": (
        REQUEST_BYTES_MAX,
        {
            "conversation": Limit(REQUEST_BYTES_MAX),
            "messages": Limit(TEXT_BYTES_MAX, MESSAGES_MAX - 1),
        },
    ),
    "CreateJobRequest": (2 << 20, {"chunk": Limit(CHUNK_BYTES_MAX)}),
    "CreatePrefixRequest": (
        3 << 20,
        {
            "system_prompt": Limit(SYSTEM_PROMPT_BYTES_MAX),
            "tools": Limit(TOOLS_BYTES_MAX, TOOLS_MAX),
            "template_options": Limit(TEMPLATE_OPTIONS_BYTES_MAX),
            "messages": Limit(FEW_SHOT_BYTES_MAX, MESSAGES_MAX - 1),
        },
    ),
    "ForkConversationRequest": (SMALL_REQUEST_BYTES_MAX, {"metadata": METADATA}),
    "ForwardHttpRequest": (
        CHUNK_BYTES_MAX + FIELD_BYTES_MAX,
        {"head": Limit(HTTP_HEAD_BYTES_MAX), "body": Limit(CHUNK_BYTES_MAX)},
    ),
    "HttpRequest": (
        HTTP_HEAD_BYTES_MAX,
        {
            "path": Limit(HTTP_HEAD_BYTES_MAX),
            "query": Limit(HTTP_HEAD_BYTES_MAX),
            "headers": Limit(HTTP_HEAD_BYTES_MAX, HTTP_HEADERS_MAX),
        },
    ),
    "NewMessage": (
        TEXT_BYTES_MAX,
        {
            "content": Limit(TEXT_BYTES_MAX),
            "tool_call_id": Limit(NAME_BYTES_MAX),
            "tool_calls": Limit(TOOL_CALLS_BYTES_MAX, TOOL_CALLS_MAX),
            "thinking": Limit(TEXT_BYTES_MAX),
            "name": Limit(NAME_BYTES_MAX),
        },
    ),
    "ToolCall": (
        TOOL_CALLS_BYTES_MAX,
        {
            "id": Limit(NAME_BYTES_MAX),
            "name": Limit(NAME_BYTES_MAX),
            "arguments": Limit(TOOL_CALLS_BYTES_MAX),
        },
    ),
}
OTHER = Limit(FIELD_BYTES_MAX)
UNNAMED: tuple[int, Mapping[str, Limit]] = (SMALL_REQUEST_BYTES_MAX, {})


def check(kind: Any, raw: bytes) -> None:
    """Raise InvalidArgument if a field of this request is too large.

    Malformed bytes are left to the parser.
    """
    descriptor = kind.DESCRIPTOR
    bytes_max, _ = LIMITS.get(descriptor.name, UNNAMED)
    _check_fields(descriptor, raw, 0, len(raw), FIELDS_MAX, "")
    if len(raw) > bytes_max:
        raise InvalidArgument("request", f"is larger than {bytes_max:,} bytes")


def _check_fields(
    descriptor: Any, raw: bytes, place: int, end: int, fields_max: int, path: str
) -> None:
    """Check the fields of the message in bytes [place, end); `path` is its name in errors."""
    _, limits = LIMITS.get(descriptor.name, UNNAMED)
    num_bytes: dict[int, int] = {}
    counts: dict[int, int] = {}
    num_fields = 0
    while place < end:
        tag, place = _varint(raw, place)
        wire_type = tag & 7
        size = 0
        if wire_type == BYTES:
            size, place = _varint(raw, place)
        elif wire_type == VARINT:
            _, place = _varint(raw, place)
        elif wire_type in (FIXED64, FIXED32):
            size = 8 if wire_type == FIXED64 else 4
        elif wire_type not in (GROUP, GROUP_END):
            return  # malformed
        start, place = place, place + size
        if place > end:
            return  # malformed
        number = tag >> 3
        num_fields += 1
        num_bytes[number] = num_bytes.get(number, 0) + size
        counts[number] = counts.get(number, 0) + 1
        field = descriptor.fields_by_number.get(number)
        if field is not None:
            limit = limits.get(field.name, OTHER)
            if limit.num_max is not None and counts[number] > limit.num_max:
                raise InvalidArgument(path + field.name, f"has more than {limit.num_max} elements")
            if num_bytes[number] > limit.bytes_max:
                raise InvalidArgument(
                    path + field.name, f"is larger than {limit.bytes_max:,} bytes"
                )
            if wire_type == BYTES and field.message_type and field.message_type.name in LIMITS:
                is_request = field.message_type.name.endswith("Request")
                index = "" if is_request else f"[{counts[number] - 1}]"
                inner_max = FIELDS_MAX if is_request else INNER_FIELDS_MAX
                inner = f"{path}{field.name}{index}."
                _check_fields(field.message_type, raw, start, place, inner_max, inner)
        if num_fields > fields_max:
            raise InvalidArgument(path[:-1] or "request", f"has more than {fields_max} fields")


def _varint(raw: bytes, place: int) -> tuple[int, int]:
    """Return the varint at `place`, and the position after it: past the end if the varint is cut off."""
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(raw):
            break
        byte = raw[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    return 0, len(raw) + 1
