"""Find out how a chat template changes earlier turns, by rendering dialogues in two ways.

Pensieve only appends to a log. A template that renders the whole conversation again may change earlier
turns: drop the thinking of replies, or move the system prompt to the last message. `probe` converts each
dialogue to tokens in two ways: by appending deltas, and by one rendering. It reports where the results
differ. A difference is not an error. It is logged when a model is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, chain

from pensieve.errors import InvalidArgument
from pensieve.text.message import Message, TemplateSetting, ToolCall
from pensieve.text.template import ChatTemplate, common_prefix
from pensieve.text.template_text import TemplateText, written

SYSTEM, THOUGHT, TOOL, REPLY = "Be brief.", "I should say yes.", "get_weather", "Yes."
PARTS = {
    "the system prompt": SYSTEM,
    "the tools": TOOL,
    "the thinking of earlier replies": THOUGHT,
    "the think tags of earlier replies": "think>",
}
CALL_ID = "call00000"  # Mistral's templates require nine letters and digits


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """The findings of `probe`."""

    append_only: bool  # each dialogue has the same text in both ways
    same_tokens: bool  # dialogues with the same text also have the same token ids
    differences: tuple[str, ...]  # sentences for the log
    refusals: tuple[str, ...]  # dialogues that the template cannot render, and why
    lost_controls: tuple[str, ...]  # dialogues in which control tokens became text


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A short conversation to render."""

    name: str
    turns: tuple[tuple[tuple[Message, ...], Message], ...]  # (new messages, the reply to them)
    end: Message
    setting: TemplateSetting = field(default_factory=TemplateSetting)


def probe(template: ChatTemplate) -> TemplateReport:
    """Render each dialogue in both ways and compare the results."""
    differences: list[str] = []
    refusals: list[str] = []
    lost_controls: list[str] = []
    same_tokens = True
    for dialogue in _dialogues(template):
        try:
            appended, whole, same, lost = _render_both(template, dialogue)
        except InvalidArgument as error:
            refusals.append(f"{dialogue.name}: {error.problem}")
            continue
        if lost:
            lost_controls.append(dialogue.name)
        if appended != whole:
            differences += _name_differences(dialogue, appended, whole)
        else:
            same_tokens &= same
    unique = tuple(dict.fromkeys(differences))
    return TemplateReport(not unique, same_tokens, unique, tuple(refusals), tuple(lost_controls))


def _dialogues(template: ChatTemplate) -> list[Dialogue]:
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
    with_tools = TemplateSetting(tools=tools if template.knows_tools else ())
    turns = (((hello,), yes), ((more,), yes))
    dialogues = [
        Dialogue("conversations", turns, bye),
        Dialogue("a system prompt", (((Message("system", SYSTEM), hello), yes), turns[1]), bye),
        Dialogue("thinking", (((hello,), thoughtful), ((more,), thoughtful)), bye),
        Dialogue("tools", turns, bye, TemplateSetting(tools=tools)),
        Dialogue("tool calls", (((hello,), call), ((answer,), yes)), more, with_tools),
    ]
    if "enable_thinking" in template.options:
        without_thinking = TemplateSetting(options={"enable_thinking": False})
        dialogues.append(Dialogue("thinking switched off", turns, bye, without_thinking))
    return dialogues


def _render_both(template: ChatTemplate, dialogue: Dialogue) -> tuple[str, str, bool, bool]:
    """Return the text from deltas, the text of one rendering, and two flags.

    The flags: whether the token ids of both are equal, and whether a control token became text. The messages
    contain no control tokens, so all control tokens in the rendering are the template's.
    """
    encode = template.tokenizer.encode
    messages: list[Message] = []
    log = ""
    ids: list[int] = []
    for new, reply in (*dialogue.turns, ((dialogue.end,), None)):
        if messages:
            text = template.continuation(new, dialogue.setting)
            ids += chain.from_iterable(template.delta(new, None, dialogue.setting))
        else:
            text = template.render(new, dialogue.setting)
            ids += chain.from_iterable(template.opening(new, dialogue.setting))
        messages += new
        log += text
        if reply is not None:
            sampled = _as_sampled(template, messages, reply, dialogue.setting)
            ids += encode(sampled).ids
            log += sampled
            messages.append(reply)
    whole = template.render(messages, dialogue.setting)
    whole_ids = encode(whole, at_start=True).ids
    lost = whole_ids != encode(written(str.__str__(whole)), at_start=True).ids
    return log, whole, ids == whole_ids, lost


def _as_sampled(
    template: ChatTemplate, messages: list[Message], reply: Message, setting: TemplateSetting
) -> TemplateText:
    """Return the reply as a model would sample it according to its template, without end-of-turn token."""
    prompt = template.render(messages, setting)
    answered = template.render([*messages, reply], setting, reply_follows=False)
    answered = answered[: len(answered) - len(template.closing)]
    kept = common_prefix(prompt, answered)
    if reply.tool_calls:
        return answered[kept:]
    if kept == len(prompt) and (reply.thinking or answered[kept:].strip() == reply.content):
        return answered[kept:]
    thinking = f"{reply.thinking}\n</think>\n\n" if reply.thinking else ""
    return written(thinking + reply.content)


def _name_differences(dialogue: Dialogue, appended: str, whole: str) -> list[str]:
    sentences = []
    for part, text in PARTS.items():
        if _occurrences(appended, text) != _occurrences(whole, text):
            more = whole.count(text) - appended.count(text)
            verb = "drops" if more < 0 else "adds" if more > 0 else "moves"
            sentences.append(f"the template {verb} {part}; the log keeps the original")
    if sentences:
        return sentences
    position = next(
        (i for i, (a, b) in enumerate(zip(appended, whole, strict=False)) if a != b),
        min(len(appended), len(whole)),
    )
    kept, anew = appended[max(position - 12, 0) :][:40], whole[max(position - 12, 0) :][:40]
    return [f"in {dialogue.name} the template writes {anew!r} where the log keeps {kept!r}"]


def _occurrences(text: str, part: str) -> list[int]:
    """Return the number of replies before each occurrence of `part`."""
    texts_before = text.split(part)[:-1]
    return list(accumulate(before.count(REPLY) for before in texts_before))
