"""What a chat template does to earlier turns, found out by letting it tell stories.

Pensieve's log keeps what was said.  A template that renders a conversation anew may disagree: it may drop
the thinking of earlier replies, or move the system prompt to the last message.  `probe` plays short stories
both ways, once by appending deltas and once by rendering the whole, and says where they differ.  Such a
difference is no error; it is logged when a model is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

from pensieve.errors import InvalidArgument
from pensieve.text.message import Message, Setting, ToolCall
from pensieve.text.template import ChatTemplate, common_prefix
from pensieve.text.traced import Traced, written

SYSTEM, THOUGHT, TOOL, REPLY = "Be brief.", "I should say yes.", "get_weather", "Yes."
PARTS = {
    "the system prompt": SYSTEM,
    "the tools": TOOL,
    "the thinking of earlier replies": THOUGHT,
    "the think tags of earlier replies": "think>",
}
CALL_ID = "call00000"  # nine letters and digits, which Mistral's templates insist on


@dataclass(frozen=True, slots=True)
class TemplateReport:
    append_only: bool  # every story reads the same both ways
    same_tokens: bool  # ... and where it does, it has the same token ids
    differences: tuple[str, ...]  # sentences for the log
    refusals: tuple[str, ...]  # stories that the template does not tell, and why
    lost_controls: tuple[str, ...]  # stories in which control tokens came out as text


@dataclass(frozen=True, slots=True)
class Story:
    name: str
    turns: tuple[tuple[tuple[Message, ...], Message], ...]  # (new messages, the reply to them)
    end: Message
    setting: Setting = field(default_factory=Setting)


def probe(template: ChatTemplate) -> TemplateReport:
    differences: list[str] = []
    refusals: list[str] = []
    lost_controls: list[str] = []
    same_tokens = True
    for story in _stories(template):
        try:
            appended, whole, same, lost = _tell(template, story)
        except InvalidArgument as error:
            refusals.append(f"{story.name}: {error.problem}")
            continue
        if lost:
            lost_controls.append(story.name)
        if appended != whole:
            differences += _name_differences(story, appended, whole)
        else:
            same_tokens &= same
    unique = tuple(dict.fromkeys(differences))
    return TemplateReport(not unique, same_tokens, unique, tuple(refusals), tuple(lost_controls))


def _stories(template: ChatTemplate) -> list[Story]:
    hello, more, bye = (Message("user", text) for text in ("Hello there.", "And now?", "Good bye."))
    yes = Message("assistant", REPLY)
    thoughtful = Message("assistant", REPLY, thinking=THOUGHT)
    call = Message("assistant", tool_calls=(ToolCall(TOOL, {"city": "Oslo"}, CALL_ID),))
    answer = Message("tool", '{"rain": false}', tool_call_id=CALL_ID, name=TOOL)
    function = {
        "name": TOOL,
        "description": "Says what the weather is.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
    tools = ({"type": "function", "function": function},)
    equipped = Setting(tools=tools if template.knows_tools else ())
    turns = (((hello,), yes), ((more,), yes))
    stories = [
        Story("conversations", turns, bye),
        Story("a system prompt", (((Message("system", SYSTEM), hello), yes), turns[1]), bye),
        Story("thinking", (((hello,), thoughtful), ((more,), thoughtful)), bye),
        Story("tools", turns, bye, Setting(tools=tools)),
        Story("tool calls", (((hello,), call), ((answer,), yes)), more, equipped),
    ]
    if "enable_thinking" in template.options:
        quiet = Setting(options={"enable_thinking": False})
        stories.append(Story("thinking switched off", turns, bye, quiet))
    return stories


def _tell(template: ChatTemplate, story: Story) -> tuple[str, str, bool, bool]:
    """The story as a log that was appended to, as one rendering, whether the ids are equal, and
    whether a control token was lost: nobody in a story spells one, so every one that can be read in
    the rendering was the template's."""
    encode = template.tokenizer.encode
    said: list[Message] = []
    log, ids = "", []
    for new, reply in (*story.turns, ((story.end,), None)):
        if said:
            text = template.continuation(new, story.setting)
            ids += template.delta(new, None, story.setting).token_ids
        else:
            text = template.render(new, story.setting)
            ids += template.opening(new, story.setting).token_ids
        said += new
        log += text
        if reply is not None:
            sampled = _as_sampled(template, said, reply, story.setting)
            ids += encode(sampled).ids
            log += sampled
            said.append(reply)
    whole = template.render(said, story.setting)
    whole_ids = encode(whole, at_start=True).ids
    lost = whole_ids != encode(written(str.__str__(whole)), at_start=True).ids
    return log, whole, ids == whole_ids, lost


def _as_sampled(
    template: ChatTemplate, said: list[Message], reply: Message, setting: Setting
) -> Traced:
    """The reply as a model that follows its template would have said it, its end left open."""
    invited = template.render(said, setting)
    answered = template.render([*said, reply], setting, reply_follows=False)
    answered = answered[: len(answered) - len(template.closing)]
    kept = common_prefix(invited, answered)
    if reply.tool_calls:
        return answered[kept:]
    if kept == len(invited) and (reply.thinking or answered[kept:].strip() == reply.content):
        return answered[kept:]
    thinking = f"{reply.thinking}\n</think>\n\n" if reply.thinking else ""
    return written(thinking + reply.content)


def _name_differences(story: Story, appended: str, whole: str) -> list[str]:
    named = []
    for part, text in PARTS.items():
        if _places(appended, text) != _places(whole, text):
            more = whole.count(text) - appended.count(text)
            verb = "drops" if more < 0 else "adds" if more > 0 else "moves"
            named.append(f"the template {verb} {part}; the log keeps what was said")
    if named:
        return named
    at = next(
        (i for i, (a, b) in enumerate(zip(appended, whole, strict=False)) if a != b),
        min(len(appended), len(whole)),
    )
    kept, anew = appended[max(at - 12, 0) :][:40], whole[max(at - 12, 0) :][:40]
    return [f"in {story.name} the template writes {anew!r} where the log keeps {kept!r}"]


def _places(text: str, part: str) -> list[int]:
    """For each occurrence, how many replies stand before it."""
    befores = text.split(part)[:-1]
    return list(accumulate(before.count(REPLY) for before in befores))
