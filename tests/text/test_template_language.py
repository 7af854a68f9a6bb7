"""What a template may use: the date, loops, macros, and control tokens in any expression."""

from datetime import UTC, datetime

from pensieve.text import ChatTemplate, Message, TemplateSetting, Tokenizer
from tests.text.families import PHI_3, template_of
from tests.text.tiny_tokenizers import byte_level_library
from tests.text.world import EQUIPPED, NOTHING, flat, spoken, template_with, user

LOOP = "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}"


def opening_text(template: ChatTemplate, setting: TemplateSetting = NOTHING) -> str:
    return spoken(template, flat(template.opening([user("Hi")], setting)))


def test_the_date_comes_from_the_setting_and_not_from_the_clock() -> None:
    template = template_with(LOOP + "{{ strftime_now('%d %b %Y') }}")
    newton = TemplateSetting(now=datetime(1687, 7, 5, tzinfo=UTC))
    assert opening_text(template, newton) == "<s>user:Hi</s>05 Jul 1687"


def test_loop_controls_generation_tags_and_unescaped_json_work() -> None:
    template = template_with(
        "{% for m in messages %}{% generation %}<s>{{ m.content | tojson }}{% endgeneration %}"
        "{% if loop.index > 5 %}{% break %}{% endif %}{% endfor %}{{ {'é': '<b>'} | tojson }}"
    )
    assert opening_text(template) == '<s>"Hi"{"é": "<b>"}'


def test_a_second_template_serves_conversations_with_tools() -> None:
    template = template_with(
        LOOP, tool_use="{% for t in tools %}[{{ t.function.name }}]{% endfor %}" + LOOP
    )
    assert opening_text(template) == "<s>user:Hi</s>"
    assert opening_text(template, EQUIPPED) == "[get_weather]<s>user:Hi</s>"


def test_control_tokens_survive_macros_sets_and_filters() -> None:
    template = template_with(
        "{% macro turn(m) %}<s>{{ m.role }}{% endmacro %}"
        "{% set end %}{{ eos_token }}{% endset %}"
        "{% for m in messages %}{{ turn(m) | trim }}{{ ('  ' ~ bos_token ~ m.content).strip() }}"
        "{{ ['', '</s>'] | join('<s>') }}{% filter trim %} {{ m.content }}</s> {% endfilter %}{{ end }}"
        "{% endfor %}"
    )
    ids = flat(template.opening([user("Hi")], NOTHING))
    start, end = (template.tokenizer.token_id(text) for text in ("<s>", "</s>"))
    assert start is not None
    assert end is not None
    assert spoken(template, ids) == "<s>user<s>Hi<s></s>Hi</s></s>"
    assert (ids.count(start), ids.count(end)) == (3, 3)


def test_control_tokens_survive_in_lists_and_mappings() -> None:
    template = template_with(
        "{% set turn = {'user': '<s>', 'assistant': '</s>'} %}"
        "{% for m in messages %}{{ turn[m.role] }}{{ m.content }}"
        "{% for end in ['</s>'] + ['<s>'] %}{{ end }}{% endfor %}{% endfor %}"
    )
    start, end = (template.tokenizer.token_id(text) for text in ("<s>", "</s>"))
    ids = flat(template.opening([user("Hi")], NOTHING))
    assert (ids[0], ids[-2:]) == (start, [end, start])


def test_a_control_token_may_be_composed_with_a_role() -> None:
    template = template_of(PHI_3)
    ids = flat(template.opening([user("Hi")], NOTHING))
    assert ids[0] == template.tokenizer.token_id("<|user|>")


def test_a_delta_does_not_repeat_the_next_turns_first_token() -> None:
    """GLM's models end a turn with the token that names the next speaker."""
    library = byte_level_library(("<|assistant|>", "<|tool|>", "<|user|>"))
    source = (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    user_id, tool_id = (library.token_to_id(text) for text in ("<|user|>", "<|tool|>"))
    assert user_id is not None
    assert tool_id is not None
    template = ChatTemplate(
        Tokenizer(library.to_str(), eos_token_ids=[user_id, tool_id], templates={"default": source})
    )
    assert template.end_of_turn_ids == {user_id, tool_id}
    messages = [user("Hi"), Message("tool", "1")]
    after_user = flat(template.delta(messages, user_id, NOTHING))
    assert spoken(template, after_user) == "\nHi<|tool|>\n1<|assistant|>\n"
    after_tool = flat(template.delta(messages, tool_id, NOTHING))
    assert spoken(template, after_tool) == "<|user|>\nHi<|tool|>\n1<|assistant|>\n"
