"""A message that a template cannot write is refused, and the error names the field."""

from typing import Any, cast

import pytest
from tokenizers import Tokenizer as Library
from tokenizers.models import WordLevel

from pensieve.errors import InvalidArgument, ModelError
from pensieve.text import ChatTemplate, Message, TemplateSetting, Tokenizer, ToolCall
from pensieve.text.message import MESSAGES_MAX
from tests.text.families import (
    DEEPSEEK_R1,
    GEMMA,
    LLAMA_3,
    MISTRAL,
    PHI_3,
    QWEN_3,
    Family,
    template_of,
)
from tests.text.tiny_tokenizers import byte_level_library, sentencepiece_library
from tests.text.world import EQUIPPED, NOTHING, flat, spoken, template_with, user


def test_the_number_of_messages_is_bounded() -> None:
    with pytest.raises(InvalidArgument, match="1 to 4096"):
        template_of(QWEN_3).opening([user("x")] * (MESSAGES_MAX + 1), NOTHING)


def test_a_conversation_begins_with_any_number_of_messages() -> None:
    template, first = template_of(QWEN_3), [user("x"), Message("assistant", "y")] * MESSAGES_MAX
    head = template.head(first, NOTHING)
    assert len(head.spans) == len(first)
    after_head = template.tokens_after_head(head, first, [user("z")], NOTHING)
    whole = template.tokenizer.encode(template.render([*first, user("z")], NOTHING), at_start=True)
    assert head.token_ids + flat(after_head) == whole.ids


@pytest.mark.parametrize(
    ("family", "messages", "field", "problem"),
    [
        (GEMMA, [Message("system", "Kind."), user("Hi")], "role", "System role not supported"),
        (GEMMA, [user("Hi"), user("Hi")], "messages", "must alternate"),
        (PHI_3, [Message("tool", "1")], "role", "writes no message of the role 'tool'"),
        (QWEN_3, [Message("wizard", "1")], "role", "'wizard' is not one of"),
        (QWEN_3, [Message("<|im_end|>", "1")], "role", "is not one of"),
        (QWEN_3, [], "messages", "1 to 4096"),
        (QWEN_3, [user("a\ud800b")], "content", "surrogate"),
        (QWEN_3, [user("\udfff")], "content", "surrogate"),
        (QWEN_3, [Message("assistant", thinking="\udfff")], "thinking", "surrogate"),
        (QWEN_3, [Message("tool", "1", tool_call_id="\ud800")], "tool_call_id", "surrogate"),
        (QWEN_3, [Message("tool", "1", name="\ud800")], "name", "surrogate"),
        (QWEN_3, [Message("user", cast("str", 7))], "content", "must be text, not int"),
        (
            QWEN_3,
            [Message("assistant", tool_calls=(ToolCall("f", {"a": {1, 2}}),))],
            "tool_calls",
            "holds a set",
        ),
        (
            MISTRAL,
            [user("Hi"), Message("assistant", tool_calls=(ToolCall("f", {}, "x"),))],
            "messages",
            "length 9",
        ),
        (
            LLAMA_3,
            [user("Hi"), Message("assistant", tool_calls=(ToolCall("f", {}), ToolCall("g", {})))],
            "messages",
            "single tool-calls",
        ),
        (
            PHI_3,
            [user("Hi"), Message("assistant", tool_calls=(ToolCall("f", {}),))],
            "messages",
            "refuses",
        ),
    ],
    ids=str,
)
def test_the_error_for_a_message_that_the_template_cannot_write_names_the_field(
    family: Family, messages: list[Message], field: str, problem: str
) -> None:
    with pytest.raises(InvalidArgument, match=problem) as caught:
        template_of(family).opening(messages, NOTHING)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


def test_a_later_system_prompt_is_refused_if_the_template_moves_it_to_the_beginning() -> None:
    """DeepSeek's template moves it to the beginning, which is already in the log."""
    with pytest.raises(InvalidArgument, match="no message of the role 'system' after a reply"):
        template_of(DEEPSEEK_R1).delta([Message("system", "Kind."), user("Hi")], None, NOTHING)


def test_a_system_prompt_in_the_middle_is_written_if_the_template_allows_it() -> None:
    template = template_of(QWEN_3)
    delta = template.delta([Message("system", "Kind."), user("Hi")], None, NOTHING)
    assert "<|im_start|>system\nKind.<|im_end|>\n" in spoken(template, flat(delta))


def deep(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"x": value}
    return value


@pytest.mark.parametrize(
    ("family", "setting", "field", "problem"),
    [
        (PHI_3, EQUIPPED, "tools", "does not write tools"),
        (QWEN_3, TemplateSetting(tools=({"a": "\ud800"},)), "tools", "surrogate"),
        (QWEN_3, TemplateSetting(tools=({"\ud800": 1},)), "tools", "surrogate"),
        (QWEN_3, TemplateSetting(tools=(deep(3000),)), "tools", "nested deeper than 64"),
        (QWEN_3, TemplateSetting(tools=({"a": object()},)), "tools", "holds a object"),
        (
            QWEN_3,
            TemplateSetting(options={"thinking": 1}),
            "template_options",
            "known: enable_thinking",
        ),
        (QWEN_3, TemplateSetting(options={"messages": []}), "template_options", "unknown option"),
        (QWEN_3, TemplateSetting(options={"content": "x"}), "template_options", "unknown option"),
        (GEMMA, TemplateSetting(options={"bos_token": "x"}), "template_options", "known: none"),
        (LLAMA_3, TemplateSetting(options={"date_string": 7}), "messages", "refuses"),
    ],
)
def test_a_setting_that_the_template_cannot_honour_is_refused(
    family: Family, setting: TemplateSetting, field: str, problem: str
) -> None:
    with pytest.raises(InvalidArgument, match=problem) as caught:
        template_of(family).opening([user("Hi")], setting)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{% for", "is not valid"),
        ("{{ nothing }}", "cannot write"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "writes no message"),
        ("{{ messages[0].content }}", "writes no message of the role 'user' after a reply"),
        ("\ud800", "surrogates not allowed"),
        ("{% for m in messages %}{{ m.content.x.y }}{% endfor %}", "refuses"),
        ("{{ ''.__class__.__mro__ }}{{ messages[0].content }}", "unsafe"),
        ("{% set _ = messages.append(1) %}{{ messages[0].content }}", "unsafe"),
    ],
)
def test_a_template_that_cannot_serve_is_refused_at_load(source: str, problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        template_with(source)


def test_nul_is_refused_where_the_tokenizer_would_lose_it() -> None:
    words = WordLevel({"<unk>": 0, "hello": 1}, unk_token="<unk>")
    source = "{% for m in messages %}{{ m.content }} {% endfor %}"
    template = ChatTemplate(Tokenizer(Library(words).to_str(), templates={"default": source}))
    with pytest.raises(InvalidArgument, match="NUL"):
        template.opening([user("a\0b")], NOTHING)


def test_text_at_the_start_of_a_log_is_tokenized_like_any_text() -> None:
    library = sentencepiece_library(("<s>",), prepend_scheme="first")
    source = "{% for m in messages %}{{ m.content }}<s>{% endfor %}"
    template = ChatTemplate(Tokenizer(library.to_str(), templates={"default": source}))
    assert flat(template.opening([user("the")], NOTHING)) == library.encode("the<s>").ids


def test_a_model_without_a_template_is_refused() -> None:
    with pytest.raises(ModelError, match="no chat template"):
        ChatTemplate(Tokenizer(byte_level_library().to_str()))
