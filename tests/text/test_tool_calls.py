"""Tool calls are found in the replies of each family. Anything else stays text."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pensieve.config import settings_named
from pensieve.errors import InvalidArgument
from pensieve.text import Message, Part, PartMarker, TemplateSetting, ToolCall
from pensieve.text.tool_calls import NAMES, STYLES, style_named, style_of
from pensieve.text.tool_calls.calls import CALLS_MAX
from pensieve.text.tool_calls.finder import WITHHELD_MAX
from pensieve.text.tool_calls.styles import CallForm
from tests.text import families
from tests.text.families import (
    LLAMA_3,
    MISTRAL,
    QWEN_2_5,
    QWEN_3,
    Family,
    template_of,
    tokenizer_of,
)
from tests.text.written_calls import CALLS, WRITERS, cut, read

PARIS = ("get_weather", {"city": "Paris", "days": 3})
TIME: tuple[str, dict[str, Any]] = ("get_time", {})

REPLIES = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n'
    '</tool_call>\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
    "hermes, with other members": '<tool_call>{"id": 7, "name": "get_weather", "type": {"a": ["f"]}, '
    '"arguments": {"city": "Paris", "days": 3}, "x": null}</tool_call>'
    '<tool_call>{"name": "get_time"}</tool_call>',
    "hermes, arguments first": '<tool_call>{"arguments": {"city": "Paris", "days": 3}, '
    '"name": "get_weather"}</tool_call>\n<tool_call>{"arguments": null, "name": "get_time"}',
    "hermes, arguments in a string": '<tool_call>{"name": "get_weather", "arguments": '
    '" {\\"city\\": \\"Paris\\", \\"days\\": 3} "}</tool_call>\n'
    '<tool_call>{"name": "get_time", "arguments": ""}</tool_call>',
    "hermes, a bracket missing": '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris", '
    '"days": 3}</tool_call>\n<tool_call>{"name": "get_time", "arguments": {}</tool_call>',
    "hermes, xml": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n"
    "<function=get_time>\n</function>\n</tool_call>",
    "llama": '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}; '
    '{"name": "get_time", "parameters": {}}',
    "llama, behind a tag": ' <|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris", '
    '"days": 3}};{"name": "get_time", "arguments": {}}\n',
    "mistral": '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, '
    '{"name": "get_time", "arguments": {}, "id": "abcdefghi"}]',
    "mistral, named": '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}'
    "[TOOL_CALLS]get_time[CALL_ID]abcdefghi[ARGS]{}",
    "mistral, without a mark for arguments": '[TOOL_CALLS]get_weather{"city": "Paris", "days": 3}'
    "[TOOL_CALLS] get_time{}",
    "pythonic": "[get_weather(city='Paris', days=3), get_time()]",
    "pythonic, over lines": '[\n  get_weather(\n    city="Paris",\n    days = 3,\n  ),\n  get_time( )\n]',
}


@pytest.mark.parametrize("name", REPLIES)
def test_calls_are_read_from_replies(name: str) -> None:
    found = read(name.partition(",")[0], REPLIES[name])
    assert found.parsed_calls == [PARIS, TIME]
    assert (found.text, found.ends_with_call) == ("", True)


@pytest.mark.parametrize("name", REPLIES)
def test_a_reply_may_be_cut_into_tokens_anywhere(name: str) -> None:
    style, reply = name.partition(",")[0], REPLIES[name]
    assert read(style, *reply) == read(style, reply)
    for border in range(len(reply)):
        assert read(style, reply[:border], "", reply[border:]) == read(style, reply)


@pytest.mark.parametrize("name", REPLIES)
def test_a_reply_cut_off_at_any_length_loses_nothing(name: str) -> None:
    """At any length limit, an unfinished call is kept as it is, and the rest is text."""
    style, reply = name.partition(",")[0], REPLIES[name]
    for border in range(len(reply)):
        found = read(style, reply[:border])
        assert found.parsed_calls == [PARIS, TIME][: len(found.parsed_calls)]
        assert [each for each, _ in found.calls] == ["get_weather", "get_time"][: len(found.calls)]
        if not found.calls:
            assert found.text == reply[:border]


def test_arguments_are_passed_on_incrementally_and_verbatim() -> None:
    reply = (
        '<tool_call>{"name": "get_weather", "arguments": {"city" :\t"Par\\u0069s",\n"days":3e0 } }'
    )
    assert read("hermes", reply).calls == [
        ("get_weather", '{"city" :\t"Par\\u0069s",\n"days":3e0 }')
    ]
    cut_off = read("hermes", reply[: reply.index("\\u")])
    assert cut_off.calls == [("get_weather", '{"city" :\t"Par')]
    assert (cut_off.parsed_calls, cut_off.text, cut_off.ends_with_call) == ([], "", False)


def test_a_call_with_invalid_json_stays_unfinished_and_the_rest_is_text() -> None:
    found = read("hermes", '<tool_call>{"name": "get_time", "arguments": {"a": tru}}</tool_call> x')
    assert found.calls == [("get_time", '{"a": ')]
    assert (found.parsed_calls, found.text, found.ends_with_call) == (
        [],
        "tru}}</tool_call> x",
        False,
    )


def test_white_space_around_text_is_kept_and_around_calls_removed() -> None:
    found = read("hermes", "I look.\n\n" + REPLIES["hermes"] + "\n\nSo.\n")
    assert (found.text, found.parsed_calls) == ("I look.\n\nSo.\n", [PARIS, TIME])
    assert not found.ends_with_call
    assert read("hermes", REPLIES["hermes"] + "\n\nSo.").text == "So."
    assert read("hermes", REPLIES["hermes"] + "\n \n").text == ""


def test_a_call_may_follow_the_beginning_of_a_marker() -> None:
    for lead in ("<", "<tool_", "<tool_call>", '<tool_call>{"name', "a <b> "):
        found = read("hermes", lead + REPLIES["hermes"])
        assert (found.text, found.parsed_calls) == (lead.rstrip(), [PARIS, TIME])


NO_CALLS = [
    ("hermes", '{"name": "get_time", "arguments": {}}'),
    ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "get_time", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "get_time", "arguments": "[1]"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "get_time", "name": "get_time"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "get\\ud800"}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"a": 01}, "name": "get_time"}</tool_call>'),
    ("hermes", "<tool_call>{}</tool_call>"),
    ("hermes", "<tool_call>get_time</tool_call>"),
    ("hermes", "<tool_call>function=get_time></function></tool_call>"),
    ("hermes", "<tool_call><function=other></function></tool_call>"),
    ("hermes", "<function=get_time><b></function>"),
    ("llama", 'It is {"name": "get_time", "parameters": {}}'),
    ("llama", '{"name": "get_time"}'),
    ("llama", '{"city": "Paris"}'),
    ("llama", '<|python_tag|>print("hi")'),
    ("mistral", '[{"name": "get_time", "arguments": {}}]'),
    ("mistral", "[TOOL_CALLS][]"),
    ("mistral", "[TOOL_CALLS] get_time {}"),
    ("mistral", "[TOOL_CALLS]get_time[1]{}"),
    ("mistral", "[ TOOL_CALLS]get_time{}"),
    ("pythonic", "see [get_time()]"),
    ("pythonic", "[get_time]"),
    ("pythonic", "[1, 2]"),
    ("pythonic", "[other()]"),
    ("pythonic", "[get_weather('Paris')]"),
    ("pythonic", "[get_weather(city)]"),
    ("pythonic", "[get_weather(**{})]"),
    ("pythonic", "[get_weather(city==1)]"),
    ("pythonic", "[]"),
]


@pytest.mark.parametrize(("style", "text"), NO_CALLS)
def test_replies_without_a_valid_call_stay_text_exactly(style: str, text: str) -> None:
    for reply in (text, text + "\n", "\n " + text):
        found = read(style, *reply)
        assert found.text == reply or found.calls, reply
        assert found.parsed_calls == []
    assert read(style, text) == (text, [], [], False, "")


def test_without_tools_a_call_may_have_any_printable_name() -> None:
    assert read("hermes", '<tool_call>{"name": "other"}', tools=()).parsed_calls == [("other", {})]
    for name in ("", "a\\nb", "a" * 257):
        text = f'<tool_call>{{"name": "{name}"}}'
        assert read("hermes", text, tools=()).text == text


def test_a_reply_has_a_bounded_number_of_calls() -> None:
    one = '<tool_call>{"name": "get_time"}</tool_call>'
    found = read("hermes", one * (CALLS_MAX + 1))
    assert (len(found.parsed_calls), found.text) == (CALLS_MAX, one)


# -- literals --


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("'a\"b'", 'a"b'),
        ('"it\'s"', "it's"),
        (r"'a\n\t\\\'\"\x41\u00e9\U0001F600\d'", "a\n\t\\'\"Aé😀\\d"),
        ('"""a "quoted" word\nand ""more"""', 'a "quoted" word\nand ""more'),
        ("''", ""),
        ("''''''", ""),
        ("'a\\\nb'", "ab"),
        ("-1", -1),
        ("0.5e-3", 0.0005),
        (".5", 0.5),
        ("-.5", -0.5),
        ("5.", 5.0),
        ("1E3", 1000.0),
        ("None", None),
        ("true", True),
        ("[True, False, [], {}, [None,],]", [True, False, [], {}, [None]]),
        ("{'a': {'b': [1]}, \"c\": 'd',}", {"a": {"b": [1]}, "c": "d"}),
    ],
)
def test_python_literals_are_read_as_arguments(literal: str, value: Any) -> None:
    found = read("pythonic", f"[get_weather(city={literal})]")
    assert found.parsed_calls == [("get_weather", {"city": value})]


@pytest.mark.parametrize(
    "literal",
    [
        *("(1, 2)", "{1}", "{1: 2}", "1_000", "0x10", "007", "1j", ".", "-", "1+1", "1e999", "nan"),
        *("'a' 'b'", "f'a'", "b'a'", "'a\nb'", "'\\N{DOT}'", "'\\ud800'", "'\\101'", "x", "[1,,2]"),
        *("__import__('os')", "[,]", "'\\U00110000'", "+1", "1 if x else 2", "{'a' 1}", "{**a}"),
    ],
)
def test_python_expressions_that_are_not_literals_are_no_arguments(literal: str) -> None:
    found = read("pythonic", f"[get_weather(city={literal})]")
    assert found.parsed_calls == []
    assert [name for name, _ in found.calls] == ["get_weather"]
    assert found.text.endswith(")]")


def test_a_repeated_argument_is_no_call() -> None:
    assert read("pythonic", "[get_weather(city=1, city=2)]").parsed_calls == []
    twice = "<parameter=city>1</parameter>" * 2
    assert read("hermes", f"<function=get_weather>{twice}</function>").parsed_calls == []


def test_the_schema_decides_the_type_of_an_xml_argument() -> None:
    def element(city: str, days: str) -> str:
        return (
            f"<function=get_weather><parameter=city>{city}</parameter>"
            f"<parameter=days>{days}</parameter></function>"
        )

    for city, days, values in (
        ("7", "7", ("7", 7)),
        ("\n\na\n</b>\n\n", "True", ("\na\n</b>\n", True)),
        ('say "hi"\\', "soon", ('say "hi"\\', "soon")),
        ("</parameter", ' {"a": [1]}\n', ("</parameter", {"a": [1]})),
        ("", "{'a'}", ("", "{'a'}")),
    ):
        found = read("hermes", *element(city, days))
        assert found.parsed_calls == [("get_weather", {"city": values[0], "days": values[1]})]


# -- control tokens --


def test_a_marker_token_without_text_also_opens_a_call() -> None:
    call = Part.TOOL_CALL
    body = '{"name": "get_time", "arguments": {}}'
    for style, tokens in (
        ("hermes", [("", call), ("\n", call), (body, call), ("\n", call), ("", call)]),
        ("mistral", [("", call), (f"[{body}]", call)]),
        ("mistral", [("", call), ("get_time", call), ("", call), ("{}", call)]),
        ("llama", [("", call), (body, call)]),
        ("pythonic", [("", call), ("[get_time()]", call)]),
    ):
        once = read(style, "Wait. ", *tokens)
        assert (once.text, once.parsed_calls, once.ends_with_call) == ("Wait.", [TIME], True), style
        twice = read(style, "Wait. ", *tokens, *tokens)
        assert (twice.text, twice.parsed_calls) == ("Wait.", [TIME, TIME]), style
        apart = read(style, *tokens, "\n", *tokens, "\nSo.")
        assert (apart.text, apart.parsed_calls) == ("So.", [TIME, TIME]), style


def test_a_marker_that_is_a_token_counts_only_as_that_token() -> None:
    style = style_of(template_of(QWEN_3))
    assert style is not None
    assert read(style, REPLIES["hermes"]).text == REPLIES["hermes"]
    assert read(style, (REPLIES["hermes"], Part.TOOL_CALL)).parsed_calls == [PARIS, TIME]


def test_thinking_inside_the_beginning_of_a_call_makes_it_text() -> None:
    found = read("hermes", '<tool_call>{"name"', ("hm", Part.THINKING), ': "get_time"}')
    assert (found.text, found.thinking, found.calls) == (
        '<tool_call>{"name": "get_time"}',
        "hm",
        [],
    )


# -- styles --


def test_the_call_style_follows_from_the_models_template() -> None:
    found = {each.name: style_of(template_of(each)) for each in families.FAMILIES}
    styles = {name: style for name, style in found.items() if style is not None}
    assert {name: style.name for name, style in styles.items()} == {
        "llama-3": "llama",
        "qwen2.5": "hermes",
        "qwen3": "hermes",
        "mistral": "mistral",
        "smollm2": "hermes",
    }
    assert styles["qwen3"].mark_is_token
    assert styles["mistral"].mark_is_token


def test_the_tool_calls_setting_selects_a_style() -> None:
    template = template_of(LLAMA_3)
    assert style_named("auto", template) == style_of(template)
    assert style_named("none", template_of(QWEN_3)) is None
    hermes = style_named("hermes", template)
    assert hermes == replace(STYLES["hermes"], form=CallForm.HERMES)
    assert not hermes.mark_is_token
    with pytest.raises(InvalidArgument, match="pythonic"):
        style_named("xml", template)
    (setting,) = settings_named("tool_calls")
    assert setting.metavar == "|".join(NAMES)
    assert [setting.parse(each) for each in NAMES] == list(NAMES)


@pytest.mark.parametrize("family", [QWEN_2_5, QWEN_3, LLAMA_3, MISTRAL], ids=lambda each: each.name)
def test_a_call_written_by_a_template_is_read(family: Family) -> None:
    """The parts and texts of the call's tokens are computed as for a generated reply."""
    tokenizer, template = tokenizer_of(family), template_of(family)
    call = ToolCall("get_weather", {"city": 'Pa"ris\n', "days": [3, None]}, "abcdefghi")
    messages = (Message("user", "hi"), Message("assistant", tool_calls=(call,)))
    asks = template.render(messages[:1], TemplateSetting())
    ids = tokenizer.encode(
        template.render(messages, TemplateSetting(), reply_follows=False)[len(asks) :]
    ).ids
    marker = PartMarker(tokenizer)
    texts = ["" if tokenizer.is_silent(each) else tokenizer.token_text(each) for each in ids]
    tokens = [(text, marker.push(each)) for text, each in zip(texts, ids, strict=True)]
    style = style_of(template)
    assert style is not None
    found = read(style, *tokens)
    assert found.parsed_calls == [("get_weather", {"city": 'Pa"ris\n', "days": [3, None]})]
    assert (found.text.strip(), found.ends_with_call) == ("", True)


# -- anything --


@given(st.data(), st.sampled_from(sorted(WRITERS)), CALLS, st.lists(st.integers(0), max_size=20))
def test_random_written_calls_are_read(
    data: st.DataObject, writer: str, calls: list[tuple[str, dict[str, Any]]], borders: list[int]
) -> None:
    if writer == "hermes xml":  # a value must not contain its own end tag, and strings stay strings
        calls = [(name, dict.fromkeys(given, 7)) for name, given in calls]
    reply = WRITERS[writer](calls)
    found = read(writer.split()[0], *cut(reply, borders), tools=())
    assert [(name, json.dumps(given)) for name, given in found.parsed_calls] == [
        (name, json.dumps(given)) for name, given in calls
    ]
    assert (found.text, found.ends_with_call) == ("", True)


FRAGMENTS = st.lists(
    st.sampled_from(
        [
            *(
                "<tool_call>",
                "</tool_call>",
                "<function=get_time>",
                "</function>",
                "<|python_tag|>",
            ),
            *(
                "<parameter=city>",
                "</parameter>",
                "[TOOL_CALLS]",
                "[ARGS]",
                "get_time",
                "get_weather",
            ),
            *(
                '{"name": "get_time", ',
                '"arguments": ',
                '"parameters": ',
                "{",
                "}",
                "[",
                "]",
                "(",
                ")",
            ),
            *('"', "'", "\\", "\\u", ",", ":", "=", ";", " ", "\n", "a", "1", "-", "True", "null"),
            *("city", '"city"', "{}", '"{}"', "<", "ü"),
        ]
    ),
    max_size=30,
).map("".join)


@given(st.sampled_from(sorted(STYLES)), FRAGMENTS, st.lists(st.integers(0), max_size=20))
def test_any_text_is_read_the_same_however_it_is_cut(
    style: str, reply: str, borders: list[int]
) -> None:
    whole = read(style, reply)
    assert read(style, *cut(reply, borders)) == whole
    assert read(style, *reply) == whole
    assert read(style, *((each, Part.TOOL_CALL) for each in cut(reply, borders))) == read(
        style, (reply, Part.TOOL_CALL)
    )


@given(st.sampled_from(sorted(STYLES)), st.text() | FRAGMENTS)
def test_a_text_without_a_call_is_unchanged(style: str, reply: str) -> None:
    found = read(style, *reply)
    assert found.calls or found.text == reply


# -- hostile replies --


def test_the_withheld_text_is_limited() -> None:
    lead = '<tool_call>{"name": "get_time", "id": "'
    found = read("hermes", lead + "x" * WITHHELD_MAX, '"}</tool_call>')
    assert (found.calls, len(found.text)) == ([], len(lead) + WITHHELD_MAX + 14)
