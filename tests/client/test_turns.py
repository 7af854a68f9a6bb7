"""The progress of a turn and the retry policy, without sockets."""

from __future__ import annotations

import subprocess
import sys

import grpc
import pytest

from pensieve import errors
from pensieve.api.grpc import translate
from pensieve.client import Delta, Restarted, Retry
from pensieve.client.grpc_errors import error_of
from pensieve.client.requests import sampling_of, send_request
from pensieve.client.turn_progress import ReplyAccumulator
from pensieve.guard.client_errors import client_text, is_for_the_log
from pensieve.v1 import conversation_pb2 as pb


def started(attempt: int = 1, replayed: bool = False) -> pb.SendMessageResponse:
    return pb.SendMessageResponse(
        started=pb.TurnStarted(turn_id="7", request_id="r", attempt=attempt, replayed=replayed)
    )


def delta(text: str, *token_ids: int) -> pb.SendMessageResponse:
    return pb.SendMessageResponse(
        delta=pb.TurnDelta(text=text, token_ids=token_ids, kind=pb.PART_KIND_TEXT)
    )


COMPLETED = pb.SendMessageResponse(
    completed=pb.TurnCompleted(finish_reason=pb.FINISH_REASON_STOP, revision=3)
)


def events_of(progress: ReplyAccumulator, *responses: pb.SendMessageResponse) -> list[object]:
    return [event for each in responses if (event := progress.take(each)) is not None]


def test_deltas_add_up_to_the_reply() -> None:
    progress = ReplyAccumulator()
    events = events_of(
        progress, started(), delta("Good ", 5), delta("", 6), delta("day", 7), COMPLETED
    )
    assert events == [Delta("Good ", (5,)), Delta("", (6,)), Delta("day", (7,))]
    assert progress.reply is not None
    assert (progress.reply.text, progress.reply.token_ids) == ("Good day", (5, 6, 7))
    assert (progress.reply.finish_reason, progress.reply.revision) == ("stop", 3)


def test_delivered_text_is_not_delivered_again_after_attaching() -> None:
    progress = ReplyAccumulator()
    events_of(progress, started(), delta("Good ", 5), delta("mor", 6))
    events = events_of(
        progress, started(), delta("Good morning", 5, 6, 7), delta("!", 8), COMPLETED
    )
    assert events == [Delta("ning", (7,)), Delta("!", (8,))]
    assert str(progress.reply) == "Good morning!"


def test_a_replay_may_deliver_all_text_with_the_last_token() -> None:
    progress = ReplyAccumulator()
    events_of(progress, started(), delta("Good ", 5))
    events = events_of(
        progress, started(replayed=True), delta("", 5), delta("Good morning", 6), COMPLETED
    )
    assert events == [Delta("morning", (6,))]


def test_a_new_attempt_yields_restarted_and_begins_again() -> None:
    progress = ReplyAccumulator()
    events_of(progress, started(), delta("Good ", 5))
    events = events_of(progress, started(attempt=2), delta("Bad ", 9), COMPLETED)
    assert events == [Restarted(2), Delta("Bad ", (9,))]
    assert str(progress.reply) == "Bad "


def test_restarted_is_omitted_if_no_text_was_delivered() -> None:
    progress = ReplyAccumulator()
    assert events_of(progress, started(), started(attempt=2), delta("x", 1)) == [Delta("x", (1,))]


def test_a_different_reply_of_the_same_turn_is_a_server_fault() -> None:
    progress = ReplyAccumulator()
    events_of(progress, started(), delta("Good ", 5))
    with pytest.raises(errors.ServerFault):
        events_of(progress, started(), delta("Bad!!!", 5))


ERRORS = [
    errors.TurnRunning("c", "5"),
    errors.StaleRevision(3, 4),
    errors.ContextFull(5000, 4096),
    errors.InvalidArgument("sampling.top_p", "must lie in (0, 1]"),
    errors.NotFound("there is no such conversation"),
    errors.AlreadyExists("taken"),
    errors.QueueFull("full"),
    errors.Unavailable("later"),
    errors.StoreUnavailable("the disk is full"),
    errors.DeadlineExceeded("too late"),
    errors.Unauthenticated("who?"),
    errors.PermissionDenied("no"),
    errors.TurnInterrupted("gone"),
    errors.TurnFailed("NAN_LOGITS", "not a number"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_the_client_rebuilds_the_daemons_error_from_its_status(error: errors.PensieveError) -> None:
    packed = translate.status(error).SerializeToString()
    again = error_of(
        translate.status_code(error),
        client_text(error),
        ((translate.DETAILS_KEY, packed),),
    )
    assert type(again) is type(error)
    # Texts that name files of the server's machine are not sent to clients.
    text = client_text(error) if is_for_the_log(error) else str(error)
    assert (str(again), again.reason) == (text, error.reason)
    for name, value in vars(error).items():
        assert getattr(again, name) == value
    wants_retry = isinstance(error, errors.QueueFull | errors.Unavailable)
    assert (again.retry_after_seconds is not None) == wants_retry


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.Unavailable),
        (grpc.StatusCode.UNIMPLEMENTED, errors.ServerFault),
        (grpc.StatusCode.INTERNAL, errors.ServerFault),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
        (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidArgument),
    ],
)
def test_a_status_without_details_has_the_class_of_its_code(
    code: grpc.StatusCode, kind: type[errors.PensieveError]
) -> None:
    assert type(error_of(code, "from a proxy", None)) is kind


def test_temporary_errors_are_retried_a_limited_number_of_times_and_others_never() -> None:
    retry = Retry(retries=3, first_seconds=1.0, most_seconds=3.0, drawn=lambda: 1.0)
    away = errors.Unavailable("away")
    assert [retry.pause(away, number, None) for number in (1, 2, 3, 4)] == [1.0, 2.0, 3.0, None]
    away.retry_after_seconds = 7.0
    assert retry.pause(away, 1, None) == 7.0
    assert retry.pause(away, 1, 6.0) is None  # the deadline would pass first
    full = errors.QueueFull("full")
    assert retry.pause(full, 1, None) is None
    full.retry_after_seconds = 0.5
    assert retry.pause(full, 1, None) == 1.0
    assert retry.pause(errors.TurnRunning("c", "1"), 1, None) is None


def test_a_request_has_only_the_given_fields() -> None:
    request = send_request(
        "c",
        [{"content": "hi"}, {"role": "tool", "content": "18 °C", "tool_call_id": "x"}],
        {
            "request_id": "r",
            "expected_revision": 0,
            "temperature": 0,
            "stop": "END",
            "logit_bias": {5: -1},
            "top_p": None,
        },
    )
    assert [message.role for message in request.messages] == [pb.ROLE_USER, pb.ROLE_TOOL]
    assert request.HasField("expected_revision")
    assert request.sampling.HasField("temperature")
    assert not request.sampling.HasField("top_p")
    assert list(request.sampling.stop) == ["END"]
    assert dict(request.sampling.logit_bias) == {5: -1.0}


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"temprature": 1}, "temprature"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"seed": -1}, "seed"),
        ({"stop": [5]}, "stop"),
    ],
)
def test_the_error_names_the_invalid_field(given: dict[str, object], field: str) -> None:
    with pytest.raises(errors.InvalidArgument) as error:
        sampling_of(given)
    assert error.value.field == field


@pytest.mark.parametrize("message", ["half \ud83d", [{"role": "user", "content": "\udc00"}]])
def test_text_that_utf8_cannot_encode_is_refused_before_sending(message: object) -> None:
    with pytest.raises(errors.InvalidArgument, match="surrogate"):
        send_request(
            "c",
            message,  # type: ignore[arg-type]
            {},
        )


def test_importing_the_sdk_loads_neither_torch_nor_the_server() -> None:
    heavy = "{'torch', 'transformers', 'numpy', 'sqlite3', 'tokenizers', 'pensieve.conversations'}"
    program = f"import sys, pensieve.client; print(sorted({heavy} & set(sys.modules)))"
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert printed.stdout == "[]\n"
