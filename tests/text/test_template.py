"""Deltas are exactly what the template writes, token by token. Earlier tokens never change."""

import dataclasses
from typing import Any

import pytest

from pensieve.text import Message, TemplateSetting, ToolCall
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
from tests.text.tiny_tokenizers import byte_level_library
from tests.text.world import EQUIPPED, NOTHING, TOOL, by_name, flat, spoken, template_with, user

# -- against transformers --


def oracle_ids(family: Family, messages: Any, tools: Any = None, **options: Any) -> list[int]:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_library(family.special, family.plain_added, family.rstrip),
        bos_token=family.bos,
        eos_token=family.eos,
        chat_template=family.template,
    )
    return tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, return_dict=False, **options
    )


@pytest.mark.parametrize("family", FAMILIES, ids=by_name)
def test_an_opening_has_the_ids_that_transformers_gives_it(family: Family) -> None:
    template = template_of(family)
    messages = [
        user("  Hello there,\n\nhow are you? "),
        Message("assistant", "Yes "),
        user("мир 😀"),
    ]
    if family is not GEMMA:
        messages.insert(0, Message("system", "Be kind."))
    plain = [{"role": each.role, "content": each.content} for each in messages]
    options = {"date_string": "1 Jan 2026"} if family is LLAMA_3 else {}
    delta = template.opening(messages, TemplateSetting(options=options))
    assert flat(delta) == oracle_ids(family, plain, **options)


@pytest.mark.parametrize("family", [LLAMA_3, QWEN_2_5, QWEN_3, MISTRAL, SMOLLM2], ids=by_name)
def test_tools_and_their_calls_have_the_ids_that_transformers_gives_them(family: Family) -> None:
    template = template_of(family)
    call = ToolCall("get_weather", {"city": "Oslo", "days": [1, 2]}, "call00000")
    messages = [
        user("How is the weather?"),
        Message("assistant", tool_calls=(call,)),
        Message("tool", '{"rain": false}', tool_call_id="call00000"),
    ]
    plain = [
        {"role": "user", "content": "How is the weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "type": "function",
                    "id": "call00000",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
            ],
        },
        {"role": "tool", "content": '{"rain": false}', "tool_call_id": "call00000"},
    ]
    options = {"date_string": "1 Jan 2026"} if family is LLAMA_3 else {}
    delta = template.opening(messages, TemplateSetting((TOOL,), options))
    assert flat(delta) == oracle_ids(family, plain, [TOOL], **options)


SMOLLM2_ITSELF = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""


@pytest.mark.parametrize("system", [[], [Message("system", "Be kind.")]], ids=["own", "given"])
def test_without_tools_smollm2_uses_its_original_template(system: list[Message]) -> None:
    """The model was trained with that template."""
    itself = template_of(dataclasses.replace(SMOLLM2, template=SMOLLM2_ITSELF))
    messages = [*system, user(" Hello "), Message("assistant", "Yes "), user("мир 😀")]
    template = template_of(SMOLLM2)
    assert not itself.knows_tools
    assert template.knows_tools
    assert template.opening(messages, NOTHING) == itself.opening(messages, NOTHING)
    assert template.delta([user("a")], 2, NOTHING) == itself.delta([user("a")], 2, NOTHING)


# -- appending --


APPEND_ONLY = [LLAMA_3, QWEN_2_5, QWEN_3, PHI_3, GEMMA, MISTRAL, SMOLLM2]


@pytest.mark.parametrize("family", APPEND_ONLY, ids=by_name)
def test_a_chat_of_many_turns_has_the_same_ids_as_one_rendering(family: Family) -> None:
    template = template_of(family)
    first, *turns = [user(f"Hello {i}, how are you?") for i in range(4)]
    history = [first]
    log = flat(template.opening([first], NOTHING))
    for turn in turns:
        kept = list(log)
        # Mistral's template puts a space before a reply, and its models generate that space themselves.
        reply = " Yes, fine." if family is MISTRAL else "Yes, fine."
        log += template.tokenizer.encode(reply).ids
        log += flat(template.delta([turn], None, NOTHING))
        history += [Message("assistant", "Yes, fine."), turn]
        assert log[: len(kept)] == kept
    whole = template.render(history, NOTHING)
    if family is not PHI_3:  # Phi-3's control tokens swallow the white space after them
        assert spoken(template, log) == whole
    assert log == template.tokenizer.encode(whole, at_start=True).ids


@pytest.mark.parametrize(
    ("family", "open_delta", "closed_delta"),
    [
        (
            LLAMA_3,
            "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            QWEN_2_5,
            "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
            "\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        ),
        (MISTRAL, "</s>[INST] Hi[/INST]", "[INST] Hi[/INST]"),
        # Phi-3's control tokens swallow the white space after them.
        (PHI_3, "<|end|><|user|>Hi<|end|><|assistant|>", "<|user|>Hi<|end|><|assistant|>"),
        (
            GEMMA,
            "<end_of_turn>\n<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
            "\n<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
        ),
        (
            DEEPSEEK_R1,
            "<｜end▁of▁sentence｜><｜User｜>Hi<｜Assistant｜><think>\n",
            "<｜User｜>Hi<｜Assistant｜><think>\n",
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_delta_begins_with_the_text_that_closes_an_open_reply(
    family: Family, open_delta: str, closed_delta: str
) -> None:
    template = template_of(family)
    ordinary = template.tokenizer.encode_text("a")[0]
    for last in (ordinary, None):
        assert spoken(template, flat(template.delta([user("Hi")], last, NOTHING))) == open_delta
    for last in template.end_of_turn_ids:
        assert spoken(template, flat(template.delta([user("Hi")], last, NOTHING))) == closed_delta


def test_the_token_that_the_template_writes_after_a_reply_ends_a_turn() -> None:
    template = template_of(GEMMA)
    assert template.end_of_turn_ids == {
        template.tokenizer.token_id("<eos>"),
        template.tokenizer.token_id("<end_of_turn>"),
    }
    assert template.tokenizer.eos_token_ids == {template.tokenizer.token_id("<eos>")}


def test_the_empty_thinking_of_enable_thinking_false_stays_in_the_log() -> None:
    template = template_of(QWEN_3)
    quiet = TemplateSetting(options={"enable_thinking": False})
    opening = flat(template.opening([user("Hello")], quiet))
    assert spoken(template, opening).endswith("assistant\n<think>\n\n</think>\n\n")
    delta = flat(template.delta([user("Hi")], None, quiet))
    assert spoken(template, delta) == (
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_a_tools_answer_follows_a_sampled_call() -> None:
    template = template_of(QWEN_3)
    end = template.tokenizer.token_id("<|im_end|>")
    answers = [Message("tool", "one"), Message("tool", "two")]
    delta = template.delta(answers, end, EQUIPPED)
    assert spoken(template, flat(delta)) == (
        "\n<|im_start|>user\n<tool_response>\none\n</tool_response>"
        "\n<tool_response>\ntwo\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    first, second = (spoken(template, each) for each in delta)
    assert first == "\n<|im_start|>user\n<tool_response>\none\n</tool_response>"
    assert second.startswith("\n<tool_response>\ntwo")


def test_a_deepseek_answer_follows_a_sampled_call() -> None:
    template = template_of(DEEPSEEK_R1)
    delta = template.delta(
        [Message("tool", "sunny")], template.tokenizer.token_id(DEEPSEEK_R1.eos), NOTHING
    )
    assert spoken(template, flat(delta)) == (
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>sunny<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
        "<｜Assistant｜><think>\n"
    )


def test_a_call_sent_by_the_client_is_written_as_json_if_the_template_concatenates_it() -> None:
    template = template_of(DEEPSEEK_R1)
    call = Message("assistant", tool_calls=(ToolCall("f", {"a": "é"}),))
    opening = template.opening([user("Hi"), call, Message("tool", "1")], NOTHING)
    assert '<｜tool▁sep｜>f\n```json\n{"a": "é"}\n```' in spoken(template, flat(opening))


def test_the_system_prompt_and_the_tools_are_written_once() -> None:
    """Mistral's template would move both to the last message."""
    template = template_of(MISTRAL)
    opening = template.opening([Message("system", "Be kind."), user("Hello")], EQUIPPED)
    assert spoken(template, flat(opening)).count("get_weather") == 1
    assert "Be kind." in spoken(template, flat(opening))
    delta = template.delta([user("Hi")], None, EQUIPPED)
    assert spoken(template, flat(delta)) == "</s>[INST] Hi[/INST]"


def test_a_tool_message_works_if_the_template_requires_the_call_before_it() -> None:
    source = QWEN_2_5.template.replace(
        '{%- elif message.role == "tool" %}',
        '{%- elif message.role == "tool" %}{%- if not messages[loop.index0 - 1].tool_calls and '
        'messages[loop.index0 - 1].role != "tool" %}{{ raise_exception("No call") }}{%- endif %}',
    )
    template = template_with(source, special=QWEN_2_5.special, plain=QWEN_2_5.plain_added)
    end = template.tokenizer.token_id("<|im_end|>")
    delta = template.delta([Message("tool", "one", tool_call_id="x")], end, NOTHING)
    assert spoken(template, flat(delta)).startswith("\n<|im_start|>user\n<tool_response>\none\n")
