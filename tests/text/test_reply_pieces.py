"""A reply is split into thinking, text and calls while its tokens arrive."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pensieve.text.parts import Part
from pensieve.text.reply_pieces import WHITE_CHARACTERS_MAX, ReplyPieces, Text, Thinking
from pensieve.text.tool_calls import STYLES, CallArguments, CallBegan, CallStyle, ParsedCall
from tests.text.written_calls import TOOLS, Read, cut, together

TEXT, THINKING, CALL = Part.TEXT, Part.THINKING, Part.TOOL_CALL


def pieces_of(*tokens: tuple[str, Part], style: CallStyle | None = None) -> Read:
    cutter = ReplyPieces(style, ())
    pieces = [each for text, part in tokens for each in cutter.push(text, part)]
    return together([*pieces, *cutter.end()], cutter)


def test_pieces_are_released_with_the_tokens_that_complete_them() -> None:
    cutter = ReplyPieces(STYLES["hermes"], TOOLS)
    pushed = [
        cutter.push(text, part)
        for text, part in (
            ("<think>", THINKING),
            ("\nThe user", THINKING),
            (" asks.\n", THINKING),
            ("</think>", THINKING),
            ("\n\nI'll", TEXT),
            (" look.\n", TEXT),
            ("<tool_call>", CALL),
            ('\n{"name": "get_weather"', CALL),
            (', "arguments": {"city"', CALL),
            (': "Paris"}}\n', CALL),
            ("</tool_call>", CALL),
            ("", TEXT),
        )
    ]
    assert pushed == [
        [],
        [Thinking("The user")],
        [Thinking(" asks.")],
        [],
        [Text("I'll")],
        [Text(" look.")],
        [],
        [],
        [CallBegan(0, "get_weather"), CallArguments(0, '{"city"')],
        [CallArguments(0, ': "Paris"}')],
        [],
        [],
    ]
    assert cutter.end() == []
    assert cutter.num_calls == 1
    assert cutter.calls == [ParsedCall(0, "get_weather", {"city": "Paris"})]
    assert cutter.ends_with_call


def test_without_a_call_style_calls_stay_text() -> None:
    call = '<tool_call>{"name": "get_time"}</tool_call>'
    found = pieces_of((call, CALL), ("\n", TEXT))
    assert (found.text, found.calls, found.ends_with_call) == (call + "\n", [], False)


@pytest.mark.parametrize(
    ("thinking", "shown"),
    [
        ("<think>\nyes, <think> is a word\n</think>\n\n", "yes, <think> is a word"),
        ("because[/THINK]", "because"),
        ("[THINK]why[/THINK]", "why"),
        ("<think>\n\n</think>", ""),
        ("</think>", ""),
        ("cut off", "cut off"),
        ("a </thin", "a </thin"),
        ("<thi", "<thi"),
        (" a </think> b \n", "a </think> b"),
        ("a</think></think>", "a</think>"),
        ("\n" * 9_000 + "a b" + "\n" * 9, "a b"),
    ],
)
def test_thinking_is_shown_without_its_opening_and_closing_tags(thinking: str, shown: str) -> None:
    assert pieces_of((thinking, THINKING)).thinking == shown
    assert pieces_of(*((each, THINKING) for each in thinking)).thinking == shown


def test_parts_of_thinking_become_paragraphs_and_empty_ones_are_dropped() -> None:
    found = pieces_of(
        ("<think>one</think>", THINKING),
        (" and", TEXT),
        ("<think>\n</think>", THINKING),
        ("", TEXT),
        ("<think>two</think>", THINKING),
        (" done ", TEXT),
        ("<think> \n", THINKING),
        ("\n", TEXT),
        ("<think>three", THINKING),
    )
    assert (found.thinking, found.text) == ("one\n\ntwo\n\nthree", "and done \n")


def test_leading_white_space_is_kept_unless_thinking_precedes_it() -> None:
    assert pieces_of((" \n", TEXT), ("Hello ", TEXT)).text == " \nHello "
    behind = pieces_of((" \n", TEXT), ("hm", THINKING), ("\n\n", TEXT), ("Hello ", TEXT))
    assert (behind.thinking, behind.text) == ("hm", "Hello ")
    assert pieces_of(("hm", THINKING), ("\n\n", TEXT)).text == ""


def test_a_long_run_of_white_space_is_passed_on() -> None:
    """A long run of white space is not held back. White space directly after it is passed on, too."""
    long = "\n" * (WHITE_CHARACTERS_MAX + 1)
    cutter = ReplyPieces(None)
    assert cutter.push("a" + long[1:], TEXT) == [Text("a")]
    assert cutter.push("\n", TEXT) == [Text(long)]
    assert cutter.push("\n", TEXT) == [Text("\n")]
    assert cutter.push("b\n", TEXT) == [Text("b")]
    assert cutter.end() == [Text("\n")]


TOKENS = st.lists(
    st.tuples(
        st.lists(
            st.sampled_from(
                [
                    *(
                        "<think>",
                        "</think>",
                        "[THINK]",
                        "[/THINK]",
                        "<",
                        "</",
                        " ",
                        "\n",
                        "a",
                        "b c",
                    ),
                    *('<tool_call>{"name": "f"}', "</tool_call>", " " * 600),
                ]
            ),
            max_size=8,
        ).map("".join),
        st.sampled_from(Part),
    ),
    max_size=6,
)


@example([('[THINK]<tool_call>{"name": "f"}', CALL)], [], STYLES["hermes"])
@given(TOKENS, st.lists(st.integers(0), max_size=12), st.sampled_from([None, STYLES["hermes"]]))
def test_pieces_are_the_same_however_the_reply_is_cut_into_tokens(
    tokens: list[tuple[str, Part]], borders: list[int], style: CallStyle | None
) -> None:
    whole = pieces_of(*tokens, style=style)
    for cutting in (lambda text: cut(text, borders) or [""], lambda text: list(text) or [""]):
        assert whole == pieces_of(
            *((each, part) for text, part in tokens for each in cutting(text)), style=style
        )
    assert whole.thinking == whole.thinking.strip() or " " * 600 in whole.thinking
