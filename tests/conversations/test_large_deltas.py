"""No message exceeds the gRPC limit, however far its reader is behind."""

from __future__ import annotations

import pytest

from pensieve.api.grpc.translate import deltas
from pensieve.conversations.live_turn import LiveTurn, ReplyTokens
from pensieve.core.iteration import Logprob
from pensieve.sampling import LOGPROBS_MAX
from pensieve.text import Part

RECEIVED_BYTES_MAX = 4 << 20  # default limit of a gRPC client
MARGIN = 1000  # for the message around its delta


def turn(num_tokens: int, text: str = "w", logprobs: int = 0) -> LiveTurn:
    live = LiveTurn(1, "c", 0, 1)
    for number in range(num_tokens):
        live.reply.texts.append(text)
        live.reply.parts.append(Part.THINKING if number < num_tokens // 3 else Part.TEXT)
        if logprobs:
            top = tuple(Logprob(2**31 + each, -1.5) for each in range(logprobs))
            assert isinstance(live.reply.logprobs, list)
            live.reply.logprobs.append((-0.5, top))
        live.reply.token_ids.append(number)
    return live


@pytest.mark.parametrize(
    "live",
    [
        turn(20_000, logprobs=LOGPROBS_MAX),
        turn(3_000, text="\N{GRINNING FACE}" * 700),
        turn(3, text="\N{GRINNING FACE}" * 3_000_000),
    ],
    ids=["many logprobs", "long words", "huge words"],
)
def test_a_late_reader_gets_everything_in_messages_within_the_size_limit(live: LiveTurn) -> None:
    token_ids: list[int] = []
    texts: list[str] = []
    logprobs: list[tuple[float, int]] = []
    for delta in deltas(live.reply.span(0, live.num_tokens)):
        assert delta.ByteSize() <= RECEIVED_BYTES_MAX - MARGIN
        token_ids += delta.token_ids
        texts.append(delta.text)
        logprobs += [(each.logprob, len(each.alternatives)) for each in delta.logprobs]
    assert token_ids == live.reply.token_ids
    assert "".join(texts) == live.text
    assert logprobs == [(logprob, len(top)) for logprob, top in live.reply.logprobs]


def test_a_small_delta_is_one_message_for_each_kind_of_text() -> None:
    found = list(deltas(turn(300).reply.span(50, 250)))
    assert [len(each.token_ids) for each in found] == [50, 150]


def test_a_long_replayed_text_is_split_too() -> None:
    live = LiveTurn(
        *(1, "c", 0, 1),
        ReplyTokens(list(range(9)), ["long " * 2_000_000], parts=[Part.TEXT] * 9),
    )
    found = list(deltas(live.reply.span(0, 9)))
    assert all(each.ByteSize() <= RECEIVED_BYTES_MAX - MARGIN for each in found)
    assert "".join(each.text for each in found) == live.text
    assert [token for each in found for token in each.token_ids] == list(range(9))
