"""Which tokens of the log belong to which message."""

import pytest

from pensieve.text import Message
from pensieve.text import template as template_module
from tests.text.families import (
    FAMILIES,
    MISTRAL,
    PHI_3,
    QWEN_2_5,
    Family,
    template_of,
)
from tests.text.test_template_language import LOOP
from tests.text.world import NOTHING, by_name, flat, spoken, template_with, user


@pytest.mark.parametrize("family", FAMILIES, ids=by_name)
def test_messages_tile_the_log(family: Family) -> None:
    template = template_of(family)
    messages = [user("Hello"), Message("assistant", "Yes"), user("Hi")]
    for delta in (template.opening(messages, NOTHING), template.delta(messages, None, NOTHING)):
        pieces = [spoken(template, each) for each in delta]
        for message, piece in zip(messages, pieces, strict=True):
            assert message.content in piece


def test_the_span_of_each_message() -> None:
    template = template_of(QWEN_2_5)
    end = template.tokenizer.token_id("<|im_end|>")
    delta = template.delta([user("Hello"), Message("assistant", "Yes"), user("Hi")], end, NOTHING)
    assert [spoken(template, each) for each in delta] == [
        "\n<|im_start|>user\nHello<|im_end|>\n",
        "<|im_start|>assistant\nYes<|im_end|>\n",
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    ]
    opening = template.opening([Message("system", "Kind."), user("Hi")], NOTHING)
    assert spoken(template, opening[0]) == ("<|im_start|>system\nKind.<|im_end|>\n")


def test_spans_are_joined_if_the_template_requires_a_final_user_message() -> None:
    template = template_with(
        "{% if messages[-1].role != 'user' %}{{ raise_exception('Say something!') }}{% endif %}"
        + LOOP
    )
    messages = [user("Hello"), Message("assistant", "Yes"), user("Hi")]
    for delta in (template.opening(messages, NOTHING), template.delta(messages, None, NOTHING)):
        pieces = [spoken(template, each) for each in delta]
        assert pieces[0].endswith("<s>user:Hello</s>")
        assert pieces[1:] == ["", "<s>assistant:Yes</s><s>user:Hi</s>"]


def test_a_control_token_is_never_shared_by_two_messages() -> None:
    """Phi-3 ends the last message with <|endoftext|>, whose first characters are those of <|user|>."""
    template = template_of(PHI_3)
    delta = template.opening([user("Hello"), Message("assistant", "Yes"), user("Hi")], NOTHING)
    assert [spoken(template, each) for each in delta] == [
        "<|user|>Hello<|end|>",
        "<|assistant|>Yes<|end|>",
        "<|user|>Hi<|end|><|assistant|>",
    ]


def test_a_message_that_the_template_writes_into_the_next_has_an_empty_span() -> None:
    template = template_of(MISTRAL)
    opening = template.opening([Message("system", "Kind."), user("Hi")], NOTHING)
    assert len(opening[0]) <= 1  # only BOS, or nothing
    assert "Kind." in spoken(template, opening[1])


@pytest.mark.parametrize("family", FAMILIES, ids=by_name)
def test_with_very_many_messages_the_last_message_gets_all_tokens(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The messages are rendered only once. The tokens are the same."""
    template = template_of(family)
    history = [user("Hello"), Message("assistant", "Yes")] * 3
    messages = [*history, user("Hi")]
    openings = template.opening(messages, NOTHING), template.delta(messages, None, NOTHING)
    first = [user("Hello"), Message("assistant", "Yes")]
    head = template.head(first, NOTHING)
    after_head = template.tokens_after_head(head, first, messages[2:], NOTHING)
    renderings = []
    render = template._render
    monkeypatch.setattr(template_module, "BORDERS_MAX", 4)
    monkeypatch.setattr(
        type(template),
        "_render",
        lambda *arguments, **named: renderings.append(1) or render(*arguments[1:], **named),
    )
    coarse = template.opening(messages, NOTHING), template.delta(messages, None, NOTHING)
    coarse_after_head = template.tokens_after_head(head, first, messages[2:], NOTHING)
    assert len(renderings) == 3
    for one, fine in zip((*coarse, coarse_after_head), (*openings, after_head), strict=True):
        assert flat(one) == flat(fine)
        assert len(one) == len(fine)
        assert not any(one[:-1])
