"""Frames: the reader gets what the writer sent, and invalid frames are refused."""

from __future__ import annotations

import math
import socket
from array import array

import pytest

from pensieve.core.iteration import Logprob, SampledToken
from pensieve.core.turn import FinishReason, TurnOptions, Usage
from pensieve.engine import messages, pipe
from pensieve.sampling import Sampling

FULL = Sampling(
    temperature=0.7,
    top_p=0.9,
    seed=2**64 - 1,
    stop=("\n\n", "ENDE \ud83d"),
    stop_token_ids=(1, 2),
    logprobs=3,
    logit_bias=((7, -1.5), (9, 2.0)),
)
MESSAGES = [
    messages.SubmitTurn(
        1, "acme/trip-42", array("I", [0, 2**32 - 1, 5]).tobytes(), 2, TurnOptions(FULL, 3, 60.0)
    ),
    messages.SubmitTurn(2, "c", b"", 9, warm=True, first_position=9),
    messages.ProvideLog(2, array("I", [7, 8, 9]).tobytes()),
    messages.CancelTurn(1, 17),
    messages.ForkConversation("a", 5, "b"),
    messages.RewindConversation("a", 0),
    messages.DeleteConversation("a"),
    messages.EvictConversation("a", True, 9),
    messages.ListCached(3, 20, True),
    messages.Explain(4, "a"),
    messages.Picture(7, 50, "acme/"),
    messages.GetStats(5),
    messages.CheckIntegrity(6),
    messages.ExportKv(7, "acme/c", 100, 2, 1 << 20),
    messages.OpenImport("acme/c"),
    messages.ImportKv(8, "c", 1, (4, 2), (1 << 31, 0), 2, b"\x00\xff" * 9, (1,), True),
]
EVENTS: list[messages.EngineEvent] = [
    SampledToken(1, 5, "Grüße 日本\x00\n"),
    SampledToken(1, 6, "", True, -0.25, (Logprob(6, -0.25), Logprob(9, -1.5))),
    messages.LogNeeded(2, "c", 9),
    messages.TurnAdmitted(2),
    messages.TurnAdmitted(3, 77),
    messages.TurnEnded(1, "c", FinishReason.STOP, Usage(3, 4, 5, 6, 7, 1, 0.5, 0.75, None, 2.0)),
    messages.TurnEnded(2, "c", FinishReason.FAILED, Usage(), "NAN_LOGITS"),
    messages.Answer(
        3, {"pages": 2.0}, ("a page leaked",), (("c", 1.5, math.inf), (0, 3, "host", 1))
    ),
    messages.KvExported(9, "RUNS"),
]
PART = messages.KvExported(3, "", 2, (4, 4), (1, 2), 16, "d", 2, b"\x00\xff" * 9)


def frames_through_pipe(packed: bytes) -> list[pipe.Frame]:
    """Send bytes through a real pipe."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(packed)
        theirs.shutdown(socket.SHUT_WR)
        return list(pipe.frames(ours))


def frame_through_pipe(packed: bytes) -> pipe.Frame:
    (frame,) = frames_through_pipe(packed)
    return frame


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_sent(message: messages.EngineMessage) -> None:
    assert pipe.message_of(frame_through_pipe(pipe.pack_message(message))) == message


def test_every_kind_of_message_and_event_crosses_the_pipe() -> None:
    assert {type(each) for each in MESSAGES} == set(messages.EngineMessage.__args__)
    assert {type(each) for each in EVENTS} == set(messages.EngineEvent.__args__)


def test_events_arrive_as_they_were_published() -> None:
    assert pipe.events_of(frame_through_pipe(pipe.pack_events(EVENTS))) == EVENTS


def test_an_event_with_bytes_gets_a_separate_frame() -> None:
    first, last = messages.TurnAdmitted(1), messages.TurnAdmitted(2)
    packed = pipe.pack_events([first, PART, first, last])
    frames = [pipe.events_of(each) for each in frames_through_pipe(packed)]
    assert frames == [[first], [PART], [first, last]]
    assert pipe.events_of(frame_through_pipe(pipe.pack_events([PART]))) == [PART]


@pytest.mark.parametrize(
    "frame",
    [
        (["Nothing", 1], b""),
        (["CancelTurn"], b""),
        (["CancelTurn", 1, 2, 3], b""),
        (["SubmitTurn", 1, "c", 0, 0, [[0.0] * 40]], b""),
        (["SubmitTurn", 1, "c", 4, 0], b""),
        (["TurnOptions", 1], b""),
    ],
)
def test_an_invalid_message_is_refused(frame: pipe.Frame) -> None:
    with pytest.raises(pipe.BrokenPipe):
        pipe.message_of(frame)


@pytest.mark.parametrize(
    "frame",
    [
        (["stage", "x"], b""),
        (["events", [["Nothing", 1]]], b""),
        (["events", [["SampledToken", 1]]], b""),
        (["events"], b""),
        (["events", [["TurnAdmitted", 1], ["TurnAdmitted", 2]]], b"x"),
        (["events", [["KvExported", 3, "", 2, [4], [1], 16, "d", 2, 18]]], b"x"),
        (["events", [["TurnEnded", 1, "c", "gone", []]]], b""),
    ],
)
def test_an_invalid_event_is_refused(frame: pipe.Frame) -> None:
    with pytest.raises(pipe.BrokenPipe):
        pipe.events_of(frame)


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        (pipe.LENGTHS.pack(2, 1 << 30), "a head of 2 and a body of 1,073,741,824 bytes"),
        (pipe.LENGTHS.pack(0, 0), "a head of 0"),
        (pipe.LENGTHS.pack(9, 0) + b"[1]", "ended within a frame"),
        (b"\x01\x00\x00", "ended within a frame"),
        (pipe.LENGTHS.pack(3, 0) + b"[1,", "not JSON"),
        (pipe.LENGTHS.pack(2, 0) + b"{}", "without a kind"),
    ],
)
def test_an_invalid_frame_is_refused(written: bytes, problem: str) -> None:
    with pytest.raises(pipe.BrokenPipe, match=problem):
        frame_through_pipe(written)
