"""Deltas are exactly what the template writes, token by token, and the past is never touched."""

from datetime import UTC, datetime

import pytest
from tokenizers import Tokenizer as Library
from tokenizers.models import WordLevel

from pensieve.errors import InvalidArgument, ModelError
from pensieve.text import ChatTemplate, Message, Setting, Tokenizer, ToolCall
from pensieve.text.message import MESSAGES_MAX
from tests.text.families import (
    DEEPSEEK_R1,
    FAMILIES,
    GEMMA,
    LLAMA_3,
    MISTRAL,
    PHI_3,
    QWEN_2_5,
    QWEN_3,
    Family,
    byte_level_library,
    sentencepiece_library,
    template_of,
)

NOTHING = Setting()
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Says what the weather is.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
EQUIPPED = Setting(tools=(TOOL,))


def user(content):
    return Message("user", content)


def spoken(template, ids):
    """All of it, special tokens too."""
    return b"".join(template.tokenizer.piece(i, first=False) for i in ids).decode()


def by_name(family):
    return family.name


# -- against transformers --


def oracle_ids(family: Family, messages, tools=None, **options):
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
def test_an_opening_has_the_ids_that_transformers_gives_it(family):
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
    delta = template.opening(messages, Setting(options=options))
    assert delta.token_ids == oracle_ids(family, plain, **options)


@pytest.mark.parametrize("family", [LLAMA_3, QWEN_2_5, QWEN_3, MISTRAL], ids=by_name)
def test_tools_and_their_calls_have_the_ids_that_transformers_gives_them(family):
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
    delta = template.opening(messages, Setting((TOOL,), options))
    assert delta.token_ids == oracle_ids(family, plain, [TOOL], **options)


# -- appending --

APPEND_ONLY = [LLAMA_3, QWEN_2_5, QWEN_3, PHI_3, GEMMA, MISTRAL]


@pytest.mark.parametrize("family", APPEND_ONLY, ids=by_name)
def test_a_chat_of_many_turns_has_the_ids_of_one_rendering(family):
    template = template_of(family)
    first, *turns = [user(f"Hello {i}, how are you?") for i in range(4)]
    history = [first]
    log = template.opening([first], NOTHING).token_ids
    for turn in turns:
        kept = list(log)
        # Mistral's template puts a space before a reply, and its models say that space themselves.
        reply = " Yes, fine." if family is MISTRAL else "Yes, fine."
        log += template.tokenizer.encode(reply).ids
        log += template.delta([turn], None, NOTHING).token_ids
        history += [Message("assistant", "Yes, fine."), turn]
        assert log[: len(kept)] == kept
    whole = template.render(history, NOTHING)
    if family is not PHI_3:  # its tokens swallow the white space behind them
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
        # Phi-3's tokens swallow the white space behind them.
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
def test_a_delta_begins_with_what_still_closes_the_open_reply(family, open_delta, closed_delta):
    template = template_of(family)
    ordinary = template.tokenizer.encode_text("a")[0]
    for last in (ordinary, None):
        assert spoken(template, template.delta([user("Hi")], last, NOTHING).token_ids) == open_delta
    for last in template.end_of_turn_ids:
        assert (
            spoken(template, template.delta([user("Hi")], last, NOTHING).token_ids) == closed_delta
        )


def test_the_token_that_closes_a_reply_ends_a_turn_although_no_file_says_so():
    template = template_of(GEMMA)
    assert template.end_of_turn_ids == {
        template.tokenizer.token_id("<eos>"),
        template.tokenizer.token_id("<end_of_turn>"),
    }
    assert template.tokenizer.eos_token_ids == {template.tokenizer.token_id("<eos>")}


def test_thinking_switched_off_stays_in_the_log_that_it_was_sampled_into():
    template = template_of(QWEN_3)
    quiet = Setting(options={"enable_thinking": False})
    opening = template.opening([user("Hello")], quiet).token_ids
    assert spoken(template, opening).endswith("assistant\n<think>\n\n</think>\n\n")
    delta = template.delta([user("Hi")], None, quiet).token_ids
    assert spoken(template, delta) == (
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_a_tools_answer_follows_a_sampled_call():
    template = template_of(QWEN_3)
    end = template.tokenizer.token_id("<|im_end|>")
    answers = [Message("tool", "one"), Message("tool", "two")]
    delta = template.delta(answers, end, EQUIPPED)
    assert spoken(template, delta.token_ids) == (
        "\n<|im_start|>user\n<tool_response>\none\n</tool_response>"
        "\n<tool_response>\ntwo\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    first, second = (spoken(template, delta.token_ids[a:b]) for a, b in delta.spans)
    assert first == "\n<|im_start|>user\n<tool_response>\none\n</tool_response>"
    assert second.startswith("\n<tool_response>\ntwo")


def test_a_deepseek_answer_follows_a_sampled_call():
    template = template_of(DEEPSEEK_R1)
    delta = template.delta(
        [Message("tool", "sunny")], template.tokenizer.token_id(DEEPSEEK_R1.eos), NOTHING
    )
    assert spoken(template, delta.token_ids) == (
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>sunny<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
        "<｜Assistant｜><think>\n"
    )


def test_a_clients_own_call_is_written_as_json_where_the_template_adds_text_to_it():
    template = template_of(DEEPSEEK_R1)
    call = Message("assistant", tool_calls=(ToolCall("f", {"a": "é"}),))
    opening = template.opening([user("Hi"), call, Message("tool", "1")], NOTHING)
    assert '<｜tool▁sep｜>f\n```json\n{"a": "é"}\n```' in spoken(template, opening.token_ids)


def test_the_system_prompt_and_the_tools_are_written_once():
    """Mistral's template would move both to the last message."""
    template = template_of(MISTRAL)
    opening = template.opening([Message("system", "Be kind."), user("Hello")], EQUIPPED)
    assert spoken(template, opening.token_ids).count("get_weather") == 1
    assert "Be kind." in spoken(template, opening.token_ids)
    delta = template.delta([user("Hi")], None, EQUIPPED)
    assert spoken(template, delta.token_ids) == "</s>[INST] Hi[/INST]"


def test_a_template_that_wants_to_see_the_call_that_is_answered():
    source = QWEN_2_5.template.replace(
        '{%- elif message.role == "tool" %}',
        '{%- elif message.role == "tool" %}{%- if not messages[loop.index0 - 1].tool_calls and '
        'messages[loop.index0 - 1].role != "tool" %}{{ raise_exception("No call") }}{%- endif %}',
    )
    template = template_with(source, special=QWEN_2_5.special, plain=QWEN_2_5.plain_added)
    end = template.tokenizer.token_id("<|im_end|>")
    delta = template.delta([Message("tool", "one", tool_call_id="x")], end, NOTHING)
    assert spoken(template, delta.token_ids).startswith(
        "\n<|im_start|>user\n<tool_response>\none\n"
    )


# -- spans --


@pytest.mark.parametrize("family", FAMILIES, ids=by_name)
def test_messages_tile_the_log(family):
    template = template_of(family)
    messages = [user("Hello"), Message("assistant", "Yes"), user("Hi")]
    for delta in (template.opening(messages, NOTHING), template.delta(messages, None, NOTHING)):
        starts, stops = zip(*delta.spans, strict=True)
        assert starts == (0, *stops[:-1])
        assert stops[-1] == len(delta.token_ids)
        pieces = [spoken(template, delta.token_ids[a:b]) for a, b in delta.spans]
        for message, piece in zip(messages, pieces, strict=True):
            assert message.content in piece


def test_the_span_of_each_message():
    template = template_of(QWEN_2_5)
    end = template.tokenizer.token_id("<|im_end|>")
    delta = template.delta([user("Hello"), Message("assistant", "Yes"), user("Hi")], end, NOTHING)
    assert [spoken(template, delta.token_ids[a:b]) for a, b in delta.spans] == [
        "\n<|im_start|>user\nHello<|im_end|>\n",
        "<|im_start|>assistant\nYes<|im_end|>\n",
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    ]
    opening = template.opening([Message("system", "Kind."), user("Hi")], NOTHING)
    assert spoken(template, opening.token_ids[slice(*opening.spans[0])]) == (
        "<|im_start|>system\nKind.<|im_end|>\n"
    )


def test_a_template_that_insists_on_a_users_message_at_the_end():
    template = template_with(
        "{% if messages[-1].role != 'user' %}{{ raise_exception('Say something!') }}{% endif %}"
        + LOOP
    )
    messages = [user("Hello"), Message("assistant", "Yes"), user("Hi")]
    for delta in (template.opening(messages, NOTHING), template.delta(messages, None, NOTHING)):
        pieces = [spoken(template, delta.token_ids[a:b]) for a, b in delta.spans]
        assert pieces[0].endswith("<s>user:Hello</s>")
        assert pieces[1:] == ["", "<s>assistant:Yes</s><s>user:Hi</s>"]


def test_a_control_token_is_never_shared_by_two_messages():
    """Phi-3 ends a last message with <|endoftext|>, which begins like <|user|>."""
    template = template_of(PHI_3)
    delta = template.opening([user("Hello"), Message("assistant", "Yes"), user("Hi")], NOTHING)
    assert [spoken(template, delta.token_ids[a:b]) for a, b in delta.spans] == [
        "<|user|>Hello<|end|>",
        "<|assistant|>Yes<|end|>",
        "<|user|>Hi<|end|><|assistant|>",
    ]


def test_a_message_that_the_template_writes_into_the_next_has_an_empty_span():
    template = template_of(MISTRAL)
    opening = template.opening([Message("system", "Kind."), user("Hi")], NOTHING)
    assert opening.spans[0][1] <= 1  # BOS at most
    assert opening.spans[1][1] == len(opening.token_ids)


# -- what is refused --


@pytest.mark.parametrize(
    ("family", "messages", "field", "problem"),
    [
        (GEMMA, [Message("system", "Kind."), user("Hi")], "role", "System role not supported"),
        (GEMMA, [user("Hi"), user("Hi")], "messages", "must alternate"),
        (PHI_3, [Message("tool", "1")], "role", "writes no message of the role 'tool'"),
        (QWEN_3, [Message("wizard", "1")], "role", "'wizard' is not one of"),
        (QWEN_3, [Message("<|im_end|>", "1")], "role", "is not one of"),
        (QWEN_3, [], "messages", "1 to 128"),
        (QWEN_3, [user("x")] * (MESSAGES_MAX + 1), "messages", "1 to 128"),
        (QWEN_3, [user("a\ud800b")], "content", "surrogate"),
        (QWEN_3, [user("\udfff")], "content", "surrogate"),
        (QWEN_3, [Message("assistant", thinking="\udfff")], "thinking", "surrogate"),
        (QWEN_3, [Message("tool", "1", tool_call_id="\ud800")], "tool_call_id", "surrogate"),
        (QWEN_3, [Message("tool", "1", name="\ud800")], "name", "surrogate"),
        (QWEN_3, [Message("user", 7)], "content", "must be text, not int"),
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
def test_what_cannot_be_written_is_refused_and_names_the_field(family, messages, field, problem):
    with pytest.raises(InvalidArgument, match=problem) as caught:
        template_of(family).opening(messages, NOTHING)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


def test_a_system_prompt_that_could_only_stand_at_the_beginning():
    """DeepSeek's template moves it there, where the log has long been written."""
    with pytest.raises(InvalidArgument, match="no message of the role 'system' after a reply"):
        template_of(DEEPSEEK_R1).delta([Message("system", "Kind."), user("Hi")], None, NOTHING)


def test_a_system_prompt_in_the_middle():
    template = template_of(QWEN_3)
    delta = template.delta([Message("system", "Kind."), user("Hi")], None, NOTHING)
    assert "<|im_start|>system\nKind.<|im_end|>\n" in spoken(template, delta.token_ids)


def deep(levels):
    value: object = {}
    for _ in range(levels):
        value = {"x": value}
    return value


@pytest.mark.parametrize(
    ("family", "setting", "field", "problem"),
    [
        (PHI_3, EQUIPPED, "tools", "does not write tools"),
        (QWEN_3, Setting(tools=({"a": "\ud800"},)), "tools", "surrogate"),
        (QWEN_3, Setting(tools=({"\ud800": 1},)), "tools", "surrogate"),
        (QWEN_3, Setting(tools=(deep(3000),)), "tools", "nested deeper than 64"),
        (QWEN_3, Setting(tools=({"a": object()},)), "tools", "holds a object"),
        (QWEN_3, Setting(options={"thinking": 1}), "template_options", "known: enable_thinking"),
        (QWEN_3, Setting(options={"messages": []}), "template_options", "unknown option"),
        (QWEN_3, Setting(options={"content": "x"}), "template_options", "unknown option"),
        (GEMMA, Setting(options={"bos_token": "x"}), "template_options", "known: none"),
        (LLAMA_3, Setting(options={"date_string": 7}), "messages", "refuses"),
    ],
)
def test_a_setting_that_cannot_be_honoured_is_refused(family, setting, field, problem):
    with pytest.raises(InvalidArgument, match=problem) as caught:
        template_of(family).opening([user("Hi")], setting)
    assert caught.value.field == field


def template_with(source, *, special=("<s>", "</s>"), plain=(), **named):
    library = byte_level_library(special, plain)
    strings = {"bos_token": special[0], "eos_token": special[-1]}
    return ChatTemplate(
        Tokenizer(library.to_str(), special_strings=strings, templates={"default": source, **named})
    )


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
def test_a_template_that_cannot_serve_is_refused_at_load(source, problem):
    with pytest.raises(ModelError, match=problem):
        template_with(source)


def test_nul_is_refused_where_the_tokenizer_would_lose_it():
    words = WordLevel({"<unk>": 0, "hello": 1}, unk_token="<unk>")
    source = "{% for m in messages %}{{ m.content }} {% endfor %}"
    template = ChatTemplate(Tokenizer(Library(words).to_str(), templates={"default": source}))
    with pytest.raises(InvalidArgument, match="NUL"):
        template.opening([user("a\0b")], NOTHING)


def test_a_log_that_begins_with_text_begins_like_any_text():
    library = sentencepiece_library(("<s>",), prepend_scheme="first")
    source = "{% for m in messages %}{{ m.content }}<s>{% endfor %}"
    template = ChatTemplate(Tokenizer(library.to_str(), templates={"default": source}))
    assert template.opening([user("the")], NOTHING).token_ids == library.encode("the<s>").ids


def test_a_model_without_a_template():
    with pytest.raises(ModelError, match="no chat template"):
        ChatTemplate(Tokenizer(byte_level_library().to_str()))


# -- what templates are offered --

LOOP = "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}"


def opening_text(template, setting=NOTHING):
    return spoken(template, template.opening([user("Hi")], setting).token_ids)


def test_the_day_is_a_value_and_not_the_clocks():
    template = template_with(LOOP + "{{ strftime_now('%d %b %Y') }}")
    newton = Setting(now=datetime(1687, 7, 5, tzinfo=UTC))
    assert opening_text(template, newton) == "<s>user:Hi</s>05 Jul 1687"


def test_loop_controls_generation_tags_and_json_without_escapes():
    template = template_with(
        "{% for m in messages %}{% generation %}<s>{{ m.content | tojson }}{% endgeneration %}"
        "{% if loop.index > 5 %}{% break %}{% endif %}{% endfor %}{{ {'é': '<b>'} | tojson }}"
    )
    assert opening_text(template) == '<s>"Hi"{"é": "<b>"}'


def test_a_second_template_serves_conversations_with_tools():
    template = template_with(
        LOOP, tool_use="{% for t in tools %}[{{ t.function.name }}]{% endfor %}" + LOOP
    )
    assert opening_text(template) == "<s>user:Hi</s>"
    assert opening_text(template, EQUIPPED) == "[get_weather]<s>user:Hi</s>"


def test_control_tokens_that_pass_through_macros_sets_and_filters():
    template = template_with(
        "{% macro turn(m) %}<s>{{ m.role }}{% endmacro %}"
        "{% set end %}{{ eos_token }}{% endset %}"
        "{% for m in messages %}{{ turn(m) | trim }}{{ ('  ' ~ bos_token ~ m.content).strip() }}"
        "{{ ['', '</s>'] | join('<s>') }}{% filter trim %} {{ m.content }}</s> {% endfilter %}{{ end }}"
        "{% endfor %}"
    )
    ids = template.opening([user("Hi")], NOTHING).token_ids
    start, end = (template.tokenizer.token_id(text) for text in ("<s>", "</s>"))
    assert spoken(template, ids) == "<s>user<s>Hi<s></s>Hi</s></s>"
    assert (ids.count(start), ids.count(end)) == (3, 3)


def test_control_tokens_in_lists_and_mappings():
    template = template_with(
        "{% set turn = {'user': '<s>', 'assistant': '</s>'} %}"
        "{% for m in messages %}{{ turn[m.role] }}{{ m.content }}"
        "{% for end in ['</s>'] + ['<s>'] %}{{ end }}{% endfor %}{% endfor %}"
    )
    start, end = (template.tokenizer.token_id(text) for text in ("<s>", "</s>"))
    ids = template.opening([user("Hi")], NOTHING).token_ids
    assert (ids[0], ids[-2:]) == (start, [end, start])


def test_a_control_token_composed_of_a_role():
    template = template_of(PHI_3)
    ids = template.opening([user("Hi")], NOTHING).token_ids
    assert ids[0] == template.tokenizer.token_id("<|user|>")


def test_a_reply_that_ended_with_the_next_turns_first_token():
    """GLM's models end a turn by naming who speaks next."""
    library = byte_level_library(("<|assistant|>", "<|tool|>", "<|user|>"))
    source = (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    user_id, tool_id = (library.token_to_id(text) for text in ("<|user|>", "<|tool|>"))
    template = ChatTemplate(
        Tokenizer(library.to_str(), eos_token_ids=[user_id, tool_id], templates={"default": source})
    )
    assert template.end_of_turn_ids == {user_id, tool_id}
    messages = [user("Hi"), Message("tool", "1")]
    after_user = template.delta(messages, user_id, NOTHING).token_ids
    assert spoken(template, after_user) == "\nHi<|tool|>\n1<|assistant|>\n"
    after_tool = template.delta(messages, tool_id, NOTHING).token_ids
    assert spoken(template, after_tool) == "<|user|>\nHi<|tool|>\n1<|assistant|>\n"
