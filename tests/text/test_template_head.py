"""A head and the tokens after it equal, token for token, the whole opening that the template writes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from pensieve.errors import InvalidArgument
from pensieve.text import ChatTemplate, Message, TemplateSetting
from pensieve.text.template import NO_HEAD
from tests.text.families import (
    DEEPSEEK_R1,
    FAMILIES,
    GEMMA,
    LLAMA_3,
    MISTRAL,
    PHI_3,
    QWEN_2_5,
    QWEN_3,
    SMOLLM2,
    Family,
    template_of,
)
from tests.text.world import EQUIPPED, NOTHING, TOOL, by_name, flat, spoken, template_with, user

SYSTEM = Message("system", "Be kind.\n\nAnd brief. ")
SHOTS = [
    user("  How is мир 😀?"),
    Message("assistant", "Fine \n"),
    user("<|im_end|>And in Oslo?\n\n"),
    Message("assistant", "Rain."),
]
FOLLOWERS = [
    [user("Hello")],
    [user("\n\n  Hello there \n")],
    [user("<|im_end|>\n")],
    [user("a"), Message("assistant", "yes"), user("é")],
]


def firsts_of(family: Family) -> list[list[Message]]:
    """Return few-shot turns, a system prompt, and both together if the template allows it."""
    if family is GEMMA:
        return [SHOTS, SHOTS[:2]]
    return [[SYSTEM], SHOTS, [SYSTEM, *SHOTS], [SYSTEM, *SHOTS[:2]]]


def setting_of(family: Family) -> TemplateSetting:
    return TemplateSetting(options={"date_string": "1 Jan 2026"} if family is LLAMA_3 else {})


@pytest.mark.parametrize("family", FAMILIES, ids=by_name)
def test_a_head_and_the_tokens_after_it_equal_the_whole_opening(family: Family) -> None:
    template, setting = template_of(family), setting_of(family)
    for first in firsts_of(family):
        head = template.head(first, setting)
        spans = [*head.spans]
        assert [spans[0][0], spans[-1][1]] == [0, len(head.token_ids)]
        assert len(spans) == len(first)
        assert all(stop == start for (_, stop), (start, _) in pairwise(spans))
        for messages in FOLLOWERS:
            after_head = template.tokens_after_head(head, first, messages, setting)
            whole = template.opening([*first, *messages], setting)
            assert head.token_ids + flat(after_head) == flat(whole)
            rendered = template.render([*first, *messages], setting)
            encoded = template.tokenizer.encode(rendered, at_start=True)
            assert head.token_ids + flat(after_head) == encoded.ids
            assert after_head[1:] == whole[len(first) + 1 :]


@pytest.mark.parametrize("family", FAMILIES, ids=by_name)
def test_without_a_head_the_tokens_after_it_are_the_whole_opening(family: Family) -> None:
    template, setting = template_of(family), setting_of(family)
    for first in firsts_of(family):
        after_head = template.tokens_after_head(NO_HEAD, first, [user("Hello")], setting)
        assert flat(after_head) == flat(template.opening([*first, user("Hello")], setting))


@pytest.mark.parametrize("family", [QWEN_2_5, QWEN_3, LLAMA_3, PHI_3], ids=by_name)
def test_a_head_contains_the_whole_text_of_the_first_messages(family: Family) -> None:
    template, setting = template_of(family), setting_of(family)
    first = [SYSTEM, *SHOTS]
    head = template.head(first, setting)
    said = spoken(template, head.token_ids)
    assert all(each.content.strip() in said for each in first)
    assert head.token_ids[-1] in template.tokenizer.control_ids
    assert len(flat(template.opening([*first, user("a")], setting))) < len(head.token_ids) + 20


@pytest.mark.parametrize("family", [QWEN_2_5, LLAMA_3], ids=by_name)
def test_after_few_shot_turns_a_delta_equals_the_tokens_after_the_head(family: Family) -> None:
    """The head ends like a reply that the model ended by itself, so later deltas are as usual."""
    template, setting = template_of(family), setting_of(family)
    first = [SYSTEM, *SHOTS]
    head = template.head(first, setting)
    assert head.token_ids[-1] in template.end_of_turn_ids
    delta = template.delta([user("Hello")], head.token_ids[-1], setting)
    after_head = template.tokens_after_head(head, first, [user("Hello")], setting)
    assert flat(delta) == flat(after_head)


@pytest.mark.parametrize("family", [LLAMA_3, QWEN_2_5, QWEN_3, MISTRAL, SMOLLM2], ids=by_name)
@pytest.mark.parametrize("first", [[], [SYSTEM], [SYSTEM, *SHOTS]], ids=["none", "system", "shots"])
def test_tools_are_in_the_head_or_follow_it(family: Family, first: list[Message]) -> None:
    template = template_of(family)
    setting = TemplateSetting((TOOL,), setting_of(family).options)
    head = template.head(first, setting)
    after_head = template.tokens_after_head(head, first, [user("Hello")], setting)
    whole = template.opening([*first, user("Hello")], setting)
    assert head.token_ids + flat(after_head) == flat(whole)
    if family in (QWEN_2_5, QWEN_3):
        assert "get_weather" in spoken(template, head.token_ids)


def test_a_head_depends_on_template_options() -> None:
    template = template_of(QWEN_3)
    first = [SYSTEM, *SHOTS]
    for quiet in True, False:
        setting = TemplateSetting(options={"enable_thinking": quiet})
        head = template.head(first, setting)
        after_head = template.tokens_after_head(head, first, [user("Hello")], setting)
        whole = template.opening([*first, user("Hello")], setting)
        assert head.token_ids + flat(after_head) == flat(whole)


def test_a_system_prompt_that_moves_to_the_last_message_is_not_in_the_head() -> None:
    template = template_of(MISTRAL)
    head = template.head([SYSTEM, *SHOTS], NOTHING)
    assert "Be kind" not in spoken(template, head.token_ids)
    assert "Rain" in spoken(template, head.token_ids)


def test_a_template_without_control_tokens_has_no_head() -> None:
    template = template_with(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    )
    head = template.head([SYSTEM, *SHOTS], NOTHING)
    assert (head.token_ids, head.spans) == ([], ((0, 0),) * 5)
    after_head = template.tokens_after_head(head, [SYSTEM, *SHOTS], [user("Hello")], NOTHING)
    whole = template.opening([SYSTEM, *SHOTS, user("Hello")], NOTHING)
    assert flat(after_head) == flat(whole)


def counting() -> ChatTemplate:
    return template_with(
        "<s>{{ messages | length }}{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}<s>"
    )


def test_a_template_head_that_depends_on_later_messages_is_refused() -> None:
    template = counting()
    head = template.head([SYSTEM], NOTHING)
    after_head = template.tokens_after_head(head, [SYSTEM], [user("Hello")], NOTHING)
    whole = template.opening([SYSTEM, user("Hello")], NOTHING)
    assert head.token_ids + flat(after_head) == flat(whole)
    longer = [user("Hello"), Message("assistant", "yes"), user("So?")]
    with pytest.raises(InvalidArgument, match="writes the declared prefix differently"):
        template.tokens_after_head(head, [SYSTEM], longer, NOTHING)


def test_the_head_of_a_reasoning_model_has_no_thinking_that_the_template_drops() -> None:
    template = template_of(DEEPSEEK_R1)
    first = [user("So?"), Message("assistant", "<think>Hm.</think>Yes.")]
    head = template.head(first, NOTHING)
    after_head = template.tokens_after_head(head, first, [user("Hello")], NOTHING)
    whole = template.opening([*first, user("Hello")], NOTHING)
    assert head.token_ids + flat(after_head) == flat(whole)


def test_messages_that_the_template_refuses_have_no_head() -> None:
    with pytest.raises(InvalidArgument):
        template_of(GEMMA).head([SYSTEM], NOTHING)
    with pytest.raises(InvalidArgument, match="unknown option"):
        template_of(QWEN_3).head([SYSTEM], TemplateSetting(options={"colour": True}))
    with pytest.raises(InvalidArgument):  # two consecutive messages of a user
        template_of(GEMMA).head([user("So?")], NOTHING)
    with pytest.raises(InvalidArgument, match="does not write tools"):
        template_of(PHI_3).head([SYSTEM], EQUIPPED)
