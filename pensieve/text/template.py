"""Convert messages to the tokens that follow a log. The log is never rendered or tokenised again.

**Delta.** A chat template renders a whole conversation, but Pensieve needs only the text that follows the
log. The log contains sampled tokens, so it cannot be rendered again. So the template renders a short exchange
in place of all earlier turns, followed by the new messages:

    user: "."    assistant: REPLY

The *delta* is everything that the template writes after REPLY: the end of that reply, the new messages, and
the generation prompt. REPLY is half of a surrogate pair, which no client's text can contain. Some templates
change earlier turns: they drop the thinking, or move the system prompt or the tools to the last message. Such
changes never reach the log. `template_probe` finds these templates and names the differences. The system
prompt and the tools are written once, in the opening.

The delta begins with the end-of-turn token that the template writes after REPLY. If the model has already
sampled an end-of-turn token, the delta begins after it.

**Spans.** Each token of the log belongs to one message. To find where message k ends, the conversation is
rendered with and without the later messages. The message ends where the two texts first differ. So the end of
the last reply belongs to the first new message, and the generation prompt belongs to the last message. The
rendering is tokenised as a whole. A token that crosses a border belongs to the later message. Each border
costs a rendering. So with more than BORDERS_MAX messages (a history that a client sends) the last message
gets all tokens.

**Heads.** Conversations that begin with the same messages begin with the same tokens. These tokens are the
*head* of the messages. A head ends with a control token, because a tokenizer joins nothing across a control
token. So the tokens of the head and the tokens of the rest are exactly the tokens of the whole opening.

**Trust.** Templates come from the operator and are trusted. All constants of a template are `TemplateText`;
all data is plain text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import jinja2

from pensieve.errors import InvalidArgument, ModelError
from pensieve.text.message import (
    MESSAGES_MAX,
    ROLES,
    Arguments,
    Message,
    TemplateSetting,
    ToolCall,
    plain,
    plain_text,
)
from pensieve.text.parts import THINKING_MARKS
from pensieve.text.sandbox import Sandbox
from pensieve.text.template_text import TemplateText, written
from pensieve.text.tokenizer import Encoded, Tokenizer

# Two different user messages. The head lies within the common prefix of the opening with "a" and the opening
# with "b".
FOLLOWING = ("a", "b")
BORDERS_MAX = 128  # with more messages, their ends are not computed; each end costs one rendering
REPLY = "\udfff"  # placeholder for the reply before the messages of a delta
# A template may join a role to a control token ("<|" + role + "|>"), so roles count as the template's text.
ROLE = {role: written(role) for role in ROLES}
MARK = "\udffe"  # placeholder for content when a template is tested
GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "strftime_now"}
FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)


@dataclass(frozen=True, slots=True)
class CommonOpening:
    """A head: the tokens that all openings with these first messages share, and the messages' spans."""

    token_ids: list[int]
    spans: tuple[tuple[int, int], ...]
    text: TemplateText  # without the last token, which is a control token


NO_HEAD = CommonOpening([], (), written(""))


class ChatTemplate:
    """A model's chat templates with its tokenizer. Immutable; several threads may use it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not tokenizer.templates:
            raise ModelError(
                "the model has no chat template (chat_template.jinja). Give one with --chat-template FILE"
            )
        self.tokenizer = tokenizer
        sandbox = Sandbox()
        self._templates: dict[str, jinja2.Template] = {}
        names: set[str] = set()
        for name, source in tokenizer.templates.items():
            try:
                # fails if the template contains REPLY or MARK, which UTF-8 cannot encode
                source.encode()
                self._templates[name] = sandbox.from_string(source)
                names |= sandbox.options(source)
            except Exception as error:  # jinja2's compiler raises Python's own errors too
                problem = " ".join(str(error).split()) or type(error).__name__
                raise ModelError(f"the chat template {name!r} is not valid: {problem}") from error
        self._strings = {name: written(text) for name, text in tokenizer.special_strings.items()}
        self.options = {name for name in names - GIVEN if not name.endswith("_token")}
        self._refused_first = self._refusals([])
        self._refused_later = self._refusals(_skeleton(None))
        for role in ("user", "assistant"):
            reason = self._refused_first.get(role) or self._refused_later.get(role)
            if reason is not None and self._takes_parts():
                raise ModelError(
                    "the chat template expects content as a list of parts, as for images. Give a "
                    "template for text with --chat-template FILE"
                )
            if reason is not None:
                raise ModelError(
                    f"the chat template cannot write a message of the {role}: {reason}"
                )
        self.knows_tools, self._repeats_tools = self._probe_tools()
        self.closing = self._find_closing()
        ids = tokenizer.encode(self.closing).ids
        self.end_id = next((each for each in ids if each in tokenizer.control_ids), None)
        self.end_of_turn_ids: frozenset[int] = tokenizer.eos_token_ids
        if self.end_id is not None:
            self.end_of_turn_ids |= {self.end_id}

    @property
    def knows_developer(self) -> bool:
        """Whether the template writes messages of the role `developer`, which few do."""
        return "developer" not in self._refused_first

    def opening(self, messages: Sequence[Message], setting: TemplateSetting) -> list[list[int]]:
        """Return the first tokens of a log, by message, with BOS if the template writes one."""
        new = self._checked(messages, setting, self._refused_first)
        text = self._render(new, setting, reply_follows=True)
        encoded = self.tokenizer.encode(text, at_start=True)
        borders = self._borders(text, [], new, setting)
        return _split_by_message(encoded, borders)

    def head(self, messages: Sequence[Message], setting: TemplateSetting) -> CommonOpening:
        """Return the tokens that all openings share if a user message follows these messages.

        The head may have no tokens.
        """
        first = self._checked(messages, setting, self._refused_first, None) if messages else []
        texts = [
            self._render(
                [*first, {"role": ROLE["user"], "content": each}], setting, reply_follows=True
            )
            for each in FOLLOWING
        ]
        text, end = texts[0], common_prefix(*texts)
        borders = self._borders(text, [], [*first, {}], setting)[:-1]
        # 0: the border is unknown, for example because the template rejects a conversation that ends there
        if borders and borders[-1]:
            end = min(end, borders[-1])
        encoded = self.tokenizer.encode(text, at_start=True)
        count = bisect_left(encoded.starts, end)
        while count and not self._ends_with_control(encoded, count, end):
            count -= 1
        if not count:
            return CommonOpening([], ((0, 0),) * len(first), written(""))
        edges = [min(edge, count) for edge in _edges(encoded, [*borders, len(text)])[:-1]]
        edges[-1] = count
        return CommonOpening(
            encoded.ids[:count],
            tuple(pairwise(edges)),
            text[: encoded.starts[count - 1]],
        )

    def tokens_after_head(
        self,
        head: CommonOpening,
        first: Sequence[Message],
        messages: Sequence[Message],
        setting: TemplateSetting,
    ) -> list[list[int]]:
        """Return the tokens that follow `head`, by message, in a log of `first` and then `messages`.

        `head` is the head of the `first` messages.
        """
        before = self._checked(first, setting, self._refused_first, None) if first else []
        is_later = any(each.role == "assistant" for each in first)
        new = self._checked(
            messages, setting, self._refused_later if is_later else self._refused_first
        )
        text = self._render(before + new, setting, reply_follows=True)
        written_before = len(head.text)
        rest, skipped = text[written_before:], min(len(head.token_ids), 1)
        encoded = self.tokenizer.encode(rest, at_start=not written_before)
        if (
            text[:written_before] != head.text
            or text[:written_before].written != head.text.written
            or encoded.ids[:skipped] != head.token_ids[-1:]
        ):
            raise InvalidArgument(
                "messages",
                "the chat template writes the declared prefix differently when these messages follow, so the "
                "prefix cannot be used",
            )
        borders = self._borders(text, [], before + new, setting, len(before))
        return _split_by_message(
            encoded, [max(each - written_before, 0) for each in borders], skipped
        )

    def delta(
        self, messages: Sequence[Message], last_token_id: int | None, setting: TemplateSetting
    ) -> list[list[int]]:
        """Return the tokens of each message after a log that ends with a reply.

        `last_token_id` is the last token of the reply.
        """
        new = self._checked(messages, setting, self._refused_later)
        past = _skeleton(None)
        try:
            text = self._after_reply(past, new, setting)
        except InvalidArgument:
            if new[0]["role"] != "tool":
                raise
            # some templates require the tool call that the message answers
            past = _skeleton(new[0])
            text = self._after_reply(past, new, setting)
        encoded = self.tokenizer.encode(text)
        borders = self._borders(text, past, new, setting)
        return _split_by_message(
            encoded, borders, self._num_closing_sampled(encoded.ids, last_token_id)
        )

    def render(
        self, messages: Sequence[Message], setting: TemplateSetting, *, reply_follows: bool = True
    ) -> TemplateText:
        """Return a whole conversation as the template would write it. Only for comparison."""
        new = self._checked(messages, setting, self._refused_first, None)
        return self._render(new, setting, reply_follows=reply_follows)

    def continuation(self, messages: Sequence[Message], setting: TemplateSetting) -> TemplateText:
        """Return the text of a delta after a reply without an end-of-turn token."""
        new = self._checked(messages, setting, self._refused_later)
        return self._after_reply(_skeleton(None), new, setting)

    # -- checks of the input --

    def _checked(
        self,
        messages: Sequence[Message],
        setting: TemplateSetting,
        refusals: Mapping[str, str],
        messages_max: int | None = MESSAGES_MAX,
    ) -> list[dict[str, Any]]:
        """Return the messages as the template sees them.

        `messages_max`: the most messages that are allowed. None: any number, as for the messages of a head.
        """
        if not messages or (messages_max is not None and len(messages) > messages_max):
            raise InvalidArgument("messages", f"a turn has 1 to {MESSAGES_MAX} messages")
        for name in setting.options:
            if name not in self.options:
                known = ", ".join(sorted(self.options)) or "none"
                raise InvalidArgument(
                    "template_options", f"unknown option {name!r}; known: {known}"
                )
        if setting.tools and not self.knows_tools:
            raise InvalidArgument("tools", "this model's chat template does not write tools")
        checked = []
        for message in messages:
            if message.role not in ROLES:
                raise InvalidArgument("role", f"{message.role!r} is not one of {', '.join(ROLES)}")
            if message.role in refusals:
                raise InvalidArgument("role", refusals[message.role])
            checked.append(_as_template_sees(message))
        return checked

    # -- rendering --

    def _render(
        self, messages: list[dict[str, Any]], setting: TemplateSetting, *, reply_follows: bool
    ) -> TemplateText:
        template = self._templates.get("tool_use") if setting.tools else None
        if template is None:
            template = self._templates.get("default") or next(iter(self._templates.values()))
        try:
            text = template.render(
                self._strings
                | plain(setting.options, "template_options")
                | {
                    "messages": messages,
                    "tools": plain(setting.tools, "tools") or None,
                    "documents": None,
                    "add_generation_prompt": reply_follows,
                    "strftime_now": setting.now.strftime,
                }
            )
        except FAILURES as error:
            reason = " ".join(str(error).split())[:300]
            raise InvalidArgument("messages", f"the chat template refuses: {reason}") from error
        assert isinstance(text, TemplateText)
        if reply_follows and setting.reply_begins:
            if text.rstrip().endswith(THINKING_MARKS[0]):
                raise InvalidArgument(
                    "messages",
                    "the chat template starts each reply with thinking, so the reply cannot "
                    "start with the given text: switch thinking off",
                )
            text += setting.reply_begins
        self.tokenizer.check_text(text, "content")
        return text

    def _after_reply(
        self,
        past: list[dict[str, Any]],
        new: list[dict[str, Any]],
        setting: TemplateSetting,
        *,
        reply_follows: bool = True,
    ) -> TemplateText:
        if self._repeats_tools:
            setting = replace(setting, tools=())
        text = self._render(past + new, setting, reply_follows=reply_follows)
        position = text.rfind(REPLY)
        if position < 0:
            raise InvalidArgument(
                "messages", "the chat template leaves out the reply before these messages"
            )
        after_reply = text[position + 1 :]
        if new and "tool_calls" in past[-1]:  # remove the call: the log has it, as sampled
            call = self._after_reply(past, [], setting, reply_follows=False)
            after_reply = after_reply[
                common_prefix(after_reply, call[: len(call) - len(self.closing)]) :
            ]
        return after_reply

    def _borders(
        self,
        text: TemplateText,
        past: list[dict[str, Any]],
        new: list[dict[str, Any]],
        setting: TemplateSetting,
        num_known: int = 0,
    ) -> list[int]:
        """Return the position in `text` where each new message ends, except the first `num_known` messages.

        With more than BORDERS_MAX messages, the whole text belongs to the last message.
        """
        borders = []
        if len(new) - num_known > BORDERS_MAX:
            return [0] * (len(new) - num_known - 1) + [len(text)]
        for count in range(num_known + 1, len(new)):
            try:
                if past:
                    alone = self._after_reply(past, new[:count], setting, reply_follows=False)
                else:
                    alone = self._render(new[:count], setting, reply_follows=False)
                border = _end_of_last(new[count - 1], alone, text)
            except InvalidArgument:  # the template rejects a conversation that ends here
                border = 0
            borders.append(border)
        return [*borders, len(text)]

    def _ends_with_control(self, encoded: Encoded, count: int, end: int) -> bool:
        """Whether the last of the first `count` tokens is a control token that ends before `end`."""
        ends_at = encoded.starts[count] if count < len(encoded.starts) else end + 1
        return ends_at <= end and encoded.ids[count - 1] in self.tokenizer.control_ids

    def _num_closing_sampled(self, ids: list[int], last_token_id: int | None) -> int:
        """Return the number of tokens at the start of a delta to skip.

        The model has already sampled these tokens, as the end of its turn.
        """
        if last_token_id not in self.end_of_turn_ids:
            return 0
        for index, token_id in enumerate(ids):
            if token_id in (last_token_id, self.end_id):
                return index + 1
            if token_id in self.tokenizer.control_ids:
                break
        return 0

    # -- abilities of the template, tested when it is loaded --

    def _refusals(self, past: list[dict[str, Any]]) -> dict[str, str]:
        """Return the reason for each role whose messages the template cannot write after `past`."""
        refusals = {}
        user = {"role": ROLE["user"], "content": "."}
        for role in ROLES:
            tested = {"role": ROLE[role], "content": MARK}
            messages = [*past, tested, user]
            if role == "user":
                messages = [*past, tested]
            elif role == "assistant":
                messages = [*past, user, tested, user]
            elif role == "tool":
                tested |= {"tool_call_id": "call00000", "name": "f"}
                messages = [*_skeleton(tested), tested]
            try:
                text = self._render(messages, TemplateSetting(), reply_follows=True)
            except InvalidArgument as error:
                refusals[role] = error.problem
                continue
            if MARK not in text[text.rfind(REPLY) + 1 :]:
                where = " after a reply" if past else ""
                refusals[role] = f"the chat template writes no message of the role {role!r}{where}"
        return refusals

    def _takes_parts(self) -> bool:
        """Return whether the template writes content that is a list of parts."""
        parts = [{"type": "text", "text": MARK}]
        try:
            text = self._render(
                [{"role": ROLE["user"], "content": parts}], TemplateSetting(), reply_follows=True
            )
        except InvalidArgument:
            return False
        return MARK in text

    def _probe_tools(self) -> tuple[bool, bool]:
        """Return whether the template writes tools, and whether it writes the tools again in each delta."""
        self._repeats_tools = False
        function = {
            "name": "f",
            "description": "m",
            "parameters": {"type": "object", "properties": {}},
        }
        setting = TemplateSetting(tools=({"type": "function", "function": function},))
        user = {"role": ROLE["user"], "content": "."}
        differences = []
        for past in [], _skeleton(None):
            try:
                without = self._render([*past, user], TemplateSetting(), reply_follows=True)
                given = self._render([*past, user], setting, reply_follows=True)
            except InvalidArgument:
                return False, False
            differences.append(given[given.find(REPLY) + 1 :] != without[without.find(REPLY) + 1 :])
        return differences[0], differences[1]

    def _find_closing(self) -> TemplateText:
        """Return what the template writes after a reply that is the last message."""
        try:
            return self._after_reply(_skeleton(None), [], TemplateSetting(), reply_follows=False)
        except InvalidArgument:  # the template needs a user message at the end
            return written("")


def _split_by_message(encoded: Encoded, borders: list[int], skipped: int = 0) -> list[list[int]]:
    """Return the tokens after the first `skipped` as one list per message. `borders`: where messages end."""
    edges, ids = _edges(encoded, borders, skipped), encoded.ids[skipped:]
    return [ids[start:stop] for start, stop in pairwise(edges)]


def _edges(encoded: Encoded, borders: list[int], skipped: int = 0) -> list[int]:
    """Return 0, and for each message the number of tokens up to its end, without the skipped tokens."""
    edges = [0]
    for border in borders[:-1]:
        edge = bisect_left(encoded.starts, border)
        if border < borders[-1] and encoded.starts[edge : edge + 1] != [border]:
            edge -= 1  # the previous token crosses the border
        edges.append(max(edge - skipped, edges[-1]))  # a template may reorder messages
    return [*edges, len(encoded.ids) - skipped]


def _end_of_last(message: Mapping[str, Any], alone: str, text: str) -> int:
    """Return the position in `text` where `message` ends.

    `alone` ends with this message; `text` continues with more messages. Usually, the position is the first
    difference of the two. Some templates write the last message differently (with its thinking). Then the
    position is the first difference after the message's content.
    """
    first_difference = common_prefix(alone, text)
    content = (message["content"] or "").strip()
    if first_difference == len(alone) or not content:
        return first_difference
    in_alone, in_text = alone.rfind(content), text.find(content, first_difference)
    if in_alone < first_difference or in_text < 0:
        return first_difference
    end_in_alone, end_in_text = in_alone + len(content), in_text + len(content)
    return end_in_text + common_prefix(alone[end_in_alone:], text[end_in_text:])


def common_prefix(a: str, b: str) -> int:
    """Return the length of the common prefix. Uses binary search, because comparing slices is fast."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if str.startswith(a, b[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low


def _skeleton(answer: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the exchange that replaces all earlier turns.

    If `answer` is a tool's message, the reply in the exchange calls that tool.
    """
    reply: dict[str, Any] = {"role": ROLE["assistant"], "content": REPLY}
    if answer is not None:
        call = ToolCall(answer.get("name", "f"), {}, answer.get("tool_call_id"))
        reply["tool_calls"] = [_call_as_template_sees(call)]
    return [{"role": ROLE["user"], "content": "."}, reply]


def _as_template_sees(message: Message) -> dict[str, Any]:
    """Return the message as plain values. Only its role is marked as the template's text."""
    seen: dict[str, Any] = {
        "role": ROLE[message.role],
        "content": plain_text(message.content, "content"),
    }
    if message.tool_calls:
        seen["tool_calls"] = [_call_as_template_sees(call) for call in message.tool_calls]
        seen["content"] = seen["content"] or None
    if message.thinking is not None:
        thinking = plain_text(message.thinking, "thinking")
        seen |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), thinking)
    if message.tool_call_id is not None:
        seen["tool_call_id"] = plain_text(message.tool_call_id, "tool_call_id")
    if message.name is not None:
        seen["name"] = plain_text(message.name, "name")
    return seen


def _call_as_template_sees(call: ToolCall) -> dict[str, Any]:
    function = {
        "name": plain_text(call.name, "tool_calls"),
        "arguments": Arguments(plain(call.arguments, "tool_calls")),
    }
    seen: dict[str, Any] = {"type": "function", "function": function}
    if call.id is not None:
        seen["id"] = plain_text(call.id, "tool_calls")
    return seen
