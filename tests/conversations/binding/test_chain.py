"""Changes that clients make when they send a history back do not change its digest. Other changes do."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pensieve.conversations.binding.chain import (
    ChainEnd,
    Piece,
    digests,
    extend_digest,
    pieces_of,
    plain_reply,
    prefix_id,
    session_digest,
)
from pensieve.errors import InvalidArgument
from pensieve.text import Message, Part, ToolCall

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"a": 1, "b": [2.0]}}}
TEXT = st.text(string.ascii_letters + ' \n\u00e9{}":,', max_size=8)
SCALAR = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(-1e9, 1e9) | TEXT
JSON = st.recursive(
    SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3)
)
CALL = st.builds(ToolCall, TEXT, st.dictionaries(TEXT, JSON, max_size=3), st.none() | TEXT)
MESSAGE = st.one_of(
    st.builds(Message, st.sampled_from(("system", "developer", "user")), TEXT),
    st.builds(
        Message,
        st.just("assistant"),
        TEXT,
        st.none() | TEXT,
        st.lists(CALL, max_size=2).map(tuple),
    ),
    st.builds(Message, st.just("tool"), TEXT, tool_call_id=st.none() | TEXT),
)
HISTORY = st.lists(MESSAGE, min_size=1, max_size=5)


def digest_of(messages: list[Message]) -> bytes:
    return digests([TOOL], {"thinking": True}, messages)[-1]


def rewritten_json(value: Any, order: random.Random) -> Any:
    """Return equal JSON with another key order, and with floats for integers."""
    if isinstance(value, dict):
        items = [(key, rewritten_json(item, order)) for key, item in value.items()]
        order.shuffle(items)
        return dict(items)
    if isinstance(value, list):
        return [rewritten_json(item, order) for item in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def resent(message: Message, number: int, order: random.Random) -> Message:
    """Return the message with the usual changes and omissions of a client that sends it back."""
    calls = tuple(
        ToolCall(call.name, rewritten_json(dict(call.arguments), order), f"own-{number}-{place}")
        for place, call in enumerate(message.tool_calls)
    )
    return Message(
        message.role,
        "" if calls else f" \n{message.content}\t",
        None,
        calls,
        message.tool_call_id,
        "weather" if message.role == "tool" else None,
    )


@given(HISTORY, st.randoms())
def test_usual_changes_by_clients_do_not_change_digests(
    messages: list[Message], order: random.Random
) -> None:
    messages = [replace(each, tool_call_id=None) for each in messages]
    again = [resent(each, number, order) for number, each in enumerate(messages)]
    assert digests([TOOL], {"a": 1, "b": 2}, messages) == digests(
        [rewritten_json(TOOL, order)], {"b": 2.0, "a": 1}, again
    )


def meaning(message: Message) -> Any:
    """Return the part of a message that must stay the same, computed without the chain."""
    if message.role == "tool":
        return ["tool", message.content.strip()]
    if message.tool_calls:
        calls = [
            [call.name.strip(), plain_json(dict(call.arguments))] for call in message.tool_calls
        ]
        return [message.role, "calls", calls]
    return [message.role, "text", message.content.strip()]


def plain_json(value: Any) -> Any:
    """Return a value in which 1.0 equals 1, but true does not."""
    if isinstance(value, dict):
        return {key: plain_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain_json(item) for item in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return ["number", Fraction(value)]
    return [type(value).__name__, value]


@given(HISTORY, HISTORY)
def test_histories_with_other_contents_have_other_digests(
    one: list[Message], other: list[Message]
) -> None:
    one = [replace(each, tool_call_id=None) for each in one]
    other = [replace(each, tool_call_id=None) for each in other]
    if [meaning(each) for each in one] != [meaning(each) for each in other]:
        assert digest_of(one) != digest_of(other)


@given(HISTORY, st.integers(0, 4), MESSAGE)
def test_an_inserted_message_changes_the_digest(
    messages: list[Message], place: int, extra: Message
) -> None:
    place %= len(messages)
    longer = [*messages[:place], extra, *messages[place:]]
    assert digest_of(longer) != digest_of(messages)
    assert len(set(digests([], {}, longer))) == len(longer) + 1


@given(HISTORY)
def test_each_digest_follows_from_the_previous_digest_and_the_next_message(
    messages: list[Message],
) -> None:
    found = digests([TOOL], {}, messages)
    for length in range(len(messages) + 1):
        assert found[: length + 1] == digests([TOOL], {}, messages[:length])
    reply = Message("assistant", "Yes.")
    assert extend_digest(found[-1], reply) == digests([TOOL], {}, [*messages, reply])[-1]


QUESTION = Message("user", "Rain?")


@pytest.mark.parametrize(
    "other",
    [
        [Message("user", "Rain!")],
        [Message("system", "Rain?")],
        [Message("user", "Ra in?")],
        [Message("user", "Rain?", name="Ada")],
        [QUESTION, Message("assistant", "")],
        [Message("user", ""), QUESTION],
        [Message("assistant", "", tool_calls=(ToolCall("Rain?", {}),))],
        [Message("tool", "Rain?")],
    ],
)
def test_each_relevant_change_changes_the_digest(other: list[Message]) -> None:
    assert digest_of(other) != digest_of([QUESTION])


def calls(*arguments: Any) -> Message:
    made = tuple(ToolCall("f", each, f"id{place}") for place, each in enumerate(arguments))
    return Message("assistant", "Let me see.", tool_calls=made)


def test_argument_types_change_the_digest_but_int_equals_float() -> None:
    assert digest_of([calls({"a": 1})]) == digest_of([calls({"a": 1.0})])
    assert digest_of([calls({"a": 1})]) != digest_of([calls({"a": True})])
    assert digest_of([calls({"a": 1})]) != digest_of([calls({"a": "1"})])
    assert digest_of([calls({"a": 1.5})]) != digest_of([calls({"a": 1})])
    assert digest_of([calls({"a": 10**22})]) == digest_of([calls({"a": 1e22})])
    assert digest_of([calls({"a": [1, 2]})]) != digest_of([calls({"a": [2, 1]})])
    assert digest_of([calls({"a": None})]) != digest_of([calls({})])


def test_tool_results_are_matched_to_calls_by_position_whatever_the_ids() -> None:
    def answered(ids: tuple[str, str], order: tuple[int, int]) -> bytes:
        made = tuple(ToolCall("f", {"a": place}, each) for place, each in enumerate(ids))
        answers = [Message("tool", "same", tool_call_id=ids[place]) for place in order]
        return digest_of([QUESTION, Message("assistant", "", tool_calls=made), *answers])

    assert answered(("x", "y"), (0, 1)) == answered(("call_1", "call_2"), (0, 1))
    assert answered(("x", "y"), (0, 1)) != answered(("x", "y"), (1, 0))
    assert answered(("x", "y"), (0, 0)) != answered(("x", "y"), (0, 1))


def test_tools_and_template_options_change_every_digest() -> None:
    plain = digests([], {}, [QUESTION])
    assert not set(plain) & set(digests([TOOL], {}, [QUESTION]))
    assert not set(plain) & set(digests([], {"thinking": False}, [QUESTION]))
    assert digests([TOOL], {}, [])[0] != digests([TOOL, TOOL], {}, [])[0]


def test_lone_surrogates_and_deep_arguments_do_not_crash() -> None:
    assert digest_of([Message("user", "\ud800")]) != digest_of([Message("user", "\udfff")])
    deep: Any = {}
    for _ in range(500):
        deep = {"a": deep}
    with pytest.raises(InvalidArgument):
        digest_of([calls(deep)])


def test_a_reply_is_split_into_its_parts() -> None:
    text = "I think. Hello!<call>"
    parts = [["thinking", 3, 9], ["text", 2, 6], ["tool_call", 1, 2]]
    pieces = [(Part.THINKING, "I think. "), (Part.TEXT, "Hello!"), (Part.TOOL_CALL, "<call>")]
    assert pieces_of(text, {"parts": parts}) == pieces
    assert pieces_of(text, {}) == [(Part.TEXT, text)]
    assert plain_reply(pieces) == Message("assistant", "Hello!<call>")


def test_the_state_after_a_reply_has_the_digest_of_the_history_sent_back() -> None:
    before = digests([], {}, [QUESTION])[-1]
    stream = {"parts": [["thinking", 3, 4], ["text", 2, 6]]}
    state = ChainEnd(before, session_digest("tab 1")).state("hmm\nIt is.", stream)
    assert state is not None
    sent = [QUESTION, Message("assistant", "It is.", thinking="hmm")]
    assert state.digest == digests([], {}, sent)[-1]
    assert state.client_session == session_digest("tab 1") != session_digest("tab 2")
    assert session_digest("") == b""


def test_an_unreadable_reply_has_no_state() -> None:
    def fails(pieces: Sequence[Piece]) -> Message:
        raise RecursionError(pieces)

    assert ChainEnd(b"", b"", fails).state("text", {}) is None


def test_a_prefix_id_depends_on_the_exact_text_and_tools() -> None:
    assert prefix_id("", []) == ""
    names = [
        prefix_id("Hi.", []),
        prefix_id("Hi. ", []),
        prefix_id("Hi.", [TOOL]),
        prefix_id("", [TOOL]),
    ]
    assert len({*names}) == 4
    assert all(len(each) <= 128 for each in names)
