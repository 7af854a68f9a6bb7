"""Messages, and the template settings of a conversation. template.py validates both when it renders them.

So every string of a client, at any depth, reaches the template as a plain `str` that can be encoded as UTF-8.
All other values are plain JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from pensieve.errors import InvalidArgument

ROLES = ("system", "developer", "user", "assistant", "tool")
MESSAGES_MAX = 4096  # limit for the messages of one turn
DEPTH_MAX = 64  # limit for the nesting of tools, arguments and options


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call in an assistant message that a client sends. Calls that the model samples stay tokens."""

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """A message as a chat template sees it."""

    role: str
    content: str = ""
    thinking: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None  # in a tool's answer: the name of the tool
    # length of all texts; limits the work of rendering and tokenizing
    num_characters: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        texts = [self.content, self.thinking or "", self.name or ""]  # not yet checked to be text
        for call in self.tool_calls:
            texts += [call.name, str(call.arguments)]
        num_characters = sum(len(str(each)) for each in texts)
        object.__setattr__(self, "num_characters", num_characters)


@dataclass(frozen=True, slots=True)
class TemplateSetting:
    """Tools, template options and date, which are fixed when a conversation begins.

    `reply_begins` belongs to one turn. It is the start of the reply, written by the client (prefill).
    """

    tools: Sequence[Mapping[str, Any]] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    now: datetime = datetime(1970, 1, 1, tzinfo=UTC)
    reply_begins: str = ""


class Arguments(dict[str, Any]):
    """The arguments of a tool call: a mapping that becomes JSON if a template concatenates it with text.

    This supports both kinds of templates: some write `arguments | tojson`, others `'…' + arguments`.
    """

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __radd__(self, other: str) -> str:
        return other + str(self)

    def __add__(self, other: str) -> str:
        return str(self) + other


def plain(value: Any, where: str, depth: int = 0) -> Any:
    """Return the value as plain JSON types. `where` names the field in the error."""
    if depth > DEPTH_MAX:
        raise InvalidArgument(where, f"is nested deeper than {DEPTH_MAX}")
    if isinstance(value, str):
        return plain_text(value, where)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {
            plain_text(key, where): plain(item, where, depth + 1) for key, item in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [plain(item, where, depth + 1) for item in value]
    raise InvalidArgument(where, f"holds a {type(value).__name__}, which is not JSON")


def plain_text(text: str, where: str) -> str:
    """Return the text as a plain `str`, never as a subclass.

    A client's string of the subclass `TemplateText` would be taken for text that the template wrote.
    Raises InvalidArgument if the text cannot be encoded as UTF-8.
    """
    if not isinstance(text, str):
        raise InvalidArgument(where, f"must be text, not {type(text).__name__}")
    try:
        return text.encode().decode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            where,
            f"character {error.start} is half of a surrogate pair, which UTF-8 cannot express",
        ) from None
