"""Events of a response: their order and numbers, and that they add up to the whole answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from pensieve.api.openai.answer import Heading
from pensieve.api.openai.conversation_items import Place, place_of, tag_of
from pensieve.api.openai.response_stream import (
    OutputItems,
    ResponseStream,
    failed_body,
    finished_body,
    pieces_of,
    unfinished_body,
)
from pensieve.conversations.live_turn import PromptTokens, ReplyTokens
from pensieve.core.turn import FinishReason
from pensieve.text.reply_pieces import CallArguments, CallBegan, Piece, ReplyPieces, Text, Thinking
from tests.api.openai.bodies import response

HEADING = Heading("abc", 1000, "tiny")
PLACE = Place("0123456789abcdef", 3)
PROMPT = PromptTokens(7, 5)
THINKS = (Thinking("The sum "), Thinking("is 4."))
SAYS = (Text("It "), Text("is "), Text("4."))
CALLS = (CallBegan(0, "add"), CallArguments(0, '{"a"'), CallArguments(0, ": 2}"))
ADAPTER: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def streamed(
    *pushes: Sequence[Piece], finish: FinishReason = FinishReason.STOP
) -> list[dict[str, Any]]:
    """Return the events of a reply whose pieces arrive in these groups."""
    request = response()
    items = OutputItems(PLACE)
    for each in pushes:
        items.push(each)
    items.end(is_whole=finish is FinishReason.STOP)
    body = finished_body(
        request, HEADING, ReplyTokens([1, 2], ["", ""], finish), PROMPT, items.items
    )
    stream = ResponseStream(request, PLACE, None, ReplyPieces(None))  # type: ignore[arg-type]  # logprobs alone need it
    events = stream.begin(unfinished_body(request, HEADING, "in_progress"))
    for each in pushes:
        events += stream.pieces(each)
    return [*events, *stream.end(body)]


def assembled(events: Sequence[dict[str, Any]]) -> list[Any]:
    """Assemble the output from the deltas alone."""
    found: list[Any] = []
    for each in events:
        kind = each["type"]
        if kind == "response.output_item.added":
            found.append([each["item"]["type"], ""])
        elif kind.endswith(".delta"):
            found[each["output_index"]][1] += each["delta"]
    return found


def test_text_deltas_lie_between_the_events_of_their_item() -> None:
    events = streamed(SAYS[:1], SAYS[1:])
    assert [each["type"] for each in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [each["sequence_number"] for each in events] == list(range(10))
    assert events[2]["item"]["content"] == []
    assert events[4]["delta"] == "It "
    assert events[6]["text"] == "It is 4."


def test_thinking_text_and_calls_become_items_in_order() -> None:
    events = streamed(THINKS, SAYS, CALLS)
    output = events[-1]["response"]["output"]
    assert [each["type"] for each in output] == ["reasoning", "message", "function_call"]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "The sum is 4."}]
    assert (output[2]["name"], output[2]["arguments"]) == ("add", '{"a": 2}')
    assert {each["status"] for each in output} == {"completed"}
    assert [each["id"] for each in output] == [
        "rs_0123456789abcdef-3-0",
        "msg_0123456789abcdef-3-1",
        "fc_0123456789abcdef-3-2",
    ]
    kinds = [each["type"] for each in events]
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
    assert kinds[-4:] == [
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert assembled(events) == [
        ["reasoning", "The sum is 4."],
        ["message", "It is 4."],
        ["function_call", '{"a": 2}'],
    ]


def test_each_call_has_its_own_item_and_id() -> None:
    second = (CallBegan(1, "sub"), CallArguments(1, "{}"))
    output = streamed(CALLS, second)[-1]["response"]["output"]
    assert [each["name"] for each in output] == ["add", "sub"]
    assert len({each["call_id"] for each in output}) == 2


def test_the_items_do_not_depend_on_how_pieces_are_grouped() -> None:
    together = streamed((*THINKS, *SAYS, *CALLS))
    apart = streamed(*((each,) for each in (*THINKS, *SAYS, *CALLS)))
    assert together[-1]["response"] == apart[-1]["response"]
    assert assembled(together) == assembled(apart)
    assert len(apart) > len(together)


@pytest.mark.parametrize("pushes", [(THINKS, SAYS, CALLS), (SAYS,), (), (CALLS,)])
def test_openais_client_assembles_the_same_response(pushes: Any) -> None:
    events = streamed(*pushes)
    state: Any = ResponseStreamState(input_tools=[], text_format=omit)
    for each in events:
        event = ADAPTER.validate_python(each)
        assert event.type == each["type"]
        found = state.handle_event(event)
    final = found[-1].response
    wanted = events[-1]["response"]["output"]
    assert [each.id for each in final.output] == [each["id"] for each in wanted]
    assert final.output_text == "".join(
        each["content"][0]["text"] for each in wanted if each["type"] == "message"
    )


def test_a_reply_without_any_text_is_an_empty_message() -> None:
    (item,) = streamed()[-1]["response"]["output"]
    assert (item["type"], item["content"][0]["text"]) == ("message", "")


def test_a_truncated_reply_has_an_incomplete_last_item() -> None:
    events = streamed(THINKS, SAYS, finish=FinishReason.LENGTH)
    body = events[-1]["response"]
    assert events[-1]["type"] == "response.incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [each["status"] for each in body["output"]] == ["completed", "incomplete"]
    (thinking,) = streamed(THINKS, finish=FinishReason.LENGTH)[-1]["response"]["output"]
    assert (thinking["type"], thinking["status"]) == ("reasoning", "incomplete")
    (call,) = streamed(CALLS[:2], finish=FinishReason.LENGTH)[-1]["response"]["output"]
    assert (call["arguments"], call["status"]) == ('{"a"', "incomplete")


def test_only_the_last_event_has_usage() -> None:
    events = streamed(SAYS)
    assert [each["response"]["usage"] for each in events[:2]] == [None, None]
    usage = events[-1]["response"]["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (7, 2)
    assert usage["input_tokens_details"]["cached_tokens"] == 5


def test_failure_events_carry_code_and_message() -> None:
    body = failed_body(response(), HEADING, "server_error", "the engine stopped")
    stream = ResponseStream(response(), PLACE, None, ReplyPieces(None))  # type: ignore[arg-type]
    (event,) = stream.failed(body)
    assert (event["type"], event["sequence_number"]) == ("response.failed", 0)
    assert event["response"]["error"] == {"code": "server_error", "message": "the engine stopped"}
    (error,) = stream.error("unavailable", "come back", None)
    assert error == {
        "type": "error",
        "code": "unavailable",
        "message": "come back",
        "param": None,
        "sequence_number": 1,
    }


def test_items_are_rebuilt_from_their_own_pieces() -> None:
    output = streamed(THINKS, SAYS, CALLS)[-1]["response"]["output"]
    again = OutputItems(PLACE)
    again.push(pieces_of(output))
    again.end(is_whole=True)
    assert again.items == output


def test_an_item_id_encodes_its_place() -> None:
    assert place_of("msg_0123456789abcdef-3-1") == (PLACE, 1)
    assert place_of(PLACE.item_id("fc", 2)) == (PLACE, 2)
    for wrong in ("msg_1", "msg_0123456789abcdef-3", "xy_0123456789abcdef-3-1", ""):
        assert place_of(wrong) is None
    assert tag_of("", "tea") != tag_of("ann", "tea")
