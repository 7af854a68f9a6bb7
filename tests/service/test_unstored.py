"""Turns that leave nothing on disk: they run, end and are refused as turns of conversations are."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from pensieve.core.sampling import Sampling
from pensieve.core.turn import FinishReason, TurnOptions
from pensieve.engine.messages import CancelTurn, DeleteConversation, LogNeeded
from pensieve.errors import (
    ContextFull,
    InvalidArgument,
    PensieveError,
    QueueFull,
    TurnFailed,
    TurnInterrupted,
    Unavailable,
)
from pensieve.launch.echo_engine import digest, next_token
from pensieve.service.daemon_config import DaemonConfig
from pensieve.service.limits import Limits
from pensieve.service.live_turn import LiveTurn, unstored_key
from pensieve.v1 import admin_pb2
from pensieve.v1 import conversation_pb2 as pb
from tests.service.faulty_engine import POISON
from tests.service.rig_daemon import ECHO, DaemonRig, wait_for
from tests.service.test_daemon import END_ID, TOKENIZER

SECRET = "The treasure lies under the old oak."
PROMPT = tuple(TOKENIZER.encode(SECRET).ids)
SLOW = (*ECHO, "--seconds=0.005")
FAULTY = (sys.executable, "-m", "tests.service.faulty_engine", "nowhere")


def options(max_tokens: int = 12, priority: int = 0, **sampling: Any) -> TurnOptions:
    sampling.setdefault("ignore_eos", True)
    return TurnOptions(Sampling(max_tokens=max_tokens, **sampling), priority)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[DaemonRig]:
    with DaemonRig(tmp_path / "data") as rig:
        yield rig


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[DaemonRig]:
    """Its iterations take 5 ms, so that turns can be met while they run."""
    config = DaemonConfig(grace_seconds=0.2, limits={"few": Limits(turns_max=1)})
    with DaemonRig(tmp_path / "data", config=config, program=SLOW) as rig:
        yield rig


def begin(rig: DaemonRig, *arguments: Any, **named: Any) -> LiveTurn:
    live: LiveTurn = rig.call(rig.daemon.begin_unstored(*arguments, **named))
    return live


async def _take(start: int, stop: int) -> None:
    """A reader that takes what there is."""


def follow(rig: DaemonRig, live: LiveTurn) -> LiveTurn:
    async def read() -> None:
        await rig.daemon.conversations.follow(live, _take)

    rig.call(read())
    return live


def run(rig: DaemonRig, prompt: Sequence[int], of: TurnOptions, **named: Any) -> LiveTurn:
    return follow(rig, begin(rig, prompt, of, **named))


def expected(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What the echo engine says after it."""
    log = array("I", prompt)
    for _ in range(num_tokens):
        log.append(next_token(digest(log), TOKENIZER.vocab_size, END_ID))
    return list(log[len(prompt) :])


def cached(rig: DaemonRig) -> list[Any]:
    request = admin_pb2.ListCachedConversationsRequest()
    return list(rig.admin.ListCachedConversations(request).conversations)


def on_disk(data: Path) -> bytes:
    return b"".join(each.read_bytes() for each in sorted(data.rglob("*")) if each.is_file())


def test_the_reply_is_that_of_a_conversation_with_the_same_tokens(rig: DaemonRig) -> None:
    said = rig.ask("c", SECRET, sampling=pb.Sampling(max_tokens=12, ignore_eos=True))
    prompt = list(rig.messages("c")[0].token_ids)
    live = run(rig, prompt, options())
    assert live.token_ids == said.token_ids == expected(prompt, 12)
    assert (live.text, live.finish, live.failure) == (said.text, FinishReason.LENGTH, None)
    assert live.figures["prompt_tokens"] == len(prompt)
    assert live.figures["output_tokens"] == 12
    assert rig.num_live == 0


def test_nothing_of_it_is_on_the_disk_or_in_the_log(
    rig: DaemonRig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        live = run(rig, PROMPT, options())
    written = on_disk(tmp_path / "data")
    assert written, "there is a history to look into"
    for mark in (SECRET.encode(), live.text.encode(), array("I", PROMPT).tobytes()):
        assert mark not in written
    ended = [each for each in caplog.records if each.name == "pensieve.turns"]
    assert [each.figures["output_tokens"] for each in ended] == [12]  # type: ignore[attr-defined]
    assert SECRET not in caplog.text
    assert not list(rig.stub.ListConversations(pb.ListConversationsRequest()).conversations)


def test_the_engine_forgets_it_when_it_has_ended(rig: DaemonRig) -> None:
    run(rig, PROMPT * 20, options())
    assert cached(rig) == []
    assert rig.call(rig.daemon.check()) == []


def test_a_cancel_keeps_what_was_taken_and_its_readers_hear_the_end(slow: DaemonRig) -> None:
    live = begin(slow, PROMPT, options(90_000))
    wait_for(lambda: live.num_tokens >= 5)

    async def cancel() -> None:
        slow.daemon.conversations.cancel(live, 3)

    slow.call(cancel())
    follow(slow, live)
    assert (live.finish, live.num_tokens) == (FinishReason.CANCELLED, 3)
    assert live.text + live.tail == TOKENIZER.decode(expected(PROMPT, 3))
    assert cached(slow) == []


def test_one_that_nobody_reads_is_given_up(slow: DaemonRig) -> None:
    live = begin(slow, PROMPT, options(90_000))
    wait_for(lambda: live.finish is not None)
    assert live.finish is FinishReason.CANCELLED
    assert isinstance(live.failure, TurnInterrupted)
    assert (slow.num_live, cached(slow)) == (0, [])


def test_a_reader_that_leaves_and_a_reader_that_stays(slow: DaemonRig) -> None:
    live = begin(slow, PROMPT, options(60))

    async def leave() -> None:
        gone = asyncio.create_task(slow.daemon.conversations.follow(live, _take))
        await asyncio.sleep(0.02)
        gone.cancel()
        await slow.daemon.conversations.follow(live, _take)

    slow.call(leave())
    assert live.token_ids == expected(PROMPT, 60)


def test_the_end_of_the_engine_is_told_as_unavailable(slow: DaemonRig) -> None:
    live = begin(slow, PROMPT, options(90_000))
    wait_for(lambda: live.num_tokens)
    os.kill(slow.daemon.engine.pid or 0, signal.SIGKILL)
    with pytest.raises(Unavailable):
        follow(slow, live)
    wait_for(lambda: slow.daemon.serving)
    assert run(slow, PROMPT, options(5)).token_ids == expected(PROMPT, 5)


def test_a_prompt_that_kills_the_engine_is_refused_at_the_third_time(tmp_path: Path) -> None:
    with DaemonRig(tmp_path / "data", program=FAULTY) as rig:
        failures: list[PensieveError] = []
        while not any(isinstance(each, TurnFailed) for each in failures):
            wait_for(lambda: rig.daemon.engine.serving)
            try:
                run(rig, PROMPT, options(seed=POISON))
            except PensieveError as error:
                failures.append(error)
            assert len(failures) < 50
        assert failures[-1].reason == "ENGINE_DIED"
        assert rig.daemon.engine.num_restarts <= 3
        wait_for(lambda: rig.daemon.engine.serving)
        assert run(rig, PROMPT[1:], options(3)).finish is FinishReason.LENGTH


def test_a_drain_waits_for_it_and_takes_no_other(slow: DaemonRig) -> None:
    live = begin(slow, PROMPT, options(20))
    draining = asyncio.run_coroutine_threadsafe(slow.daemon.drain(60.0), slow._loop)
    follow(slow, live)
    draining.result(60)
    assert live.finish is FinishReason.LENGTH
    with pytest.raises(Unavailable):
        begin(slow, PROMPT, options())


def test_a_drain_that_has_no_time_interrupts_it(slow: DaemonRig) -> None:
    live = begin(slow, PROMPT, options(90_000))
    slow.call(slow.daemon.drain(0.0))
    assert isinstance(live.failure, Unavailable)
    assert slow.num_live == 0


def test_it_counts_for_its_tenant_and_for_the_daemon(slow: DaemonRig) -> None:
    live = begin(slow, PROMPT, options(90_000), tenant="few")
    with pytest.raises(QueueFull):
        begin(slow, PROMPT, options(), tenant="few")
    assert run(slow, PROMPT, options(2), tenant="another").finish is FinishReason.LENGTH

    async def drop() -> None:
        await slow.daemon.conversations.drop(live)

    slow.call(drop())
    assert run(slow, PROMPT, options(2), tenant="few").finish is FinishReason.LENGTH


def test_its_tenant_pays_for_what_was_computed(tmp_path: Path) -> None:
    config = DaemonConfig(limits={"poor": Limits(tokens_per_second=0.01)})
    with DaemonRig(tmp_path / "data", config=config) as rig:
        run(rig, PROMPT * 20, options(3), tenant="poor")
        with pytest.raises(QueueFull) as error:
            begin(rig, PROMPT, options(), tenant="poor")
        assert error.value.limit == "tokens_per_second"


@pytest.mark.parametrize(
    ("prompt", "sampling", "field"),
    [
        ([], {}, "prompt"),
        ([3, -1], {}, "prompt"),
        ([3, TOKENIZER.vocab_size], {}, "prompt"),
        ([3], {"temperature": -1.0}, "sampling.temperature"),
        ([3], {"stop_token_ids": (TOKENIZER.vocab_size,)}, "sampling.stop_token_ids"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(
    rig: DaemonRig, prompt: list[int], sampling: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidArgument) as error:
        begin(rig, prompt, options(**sampling))
    assert error.value.field == field
    assert rig.num_live == 0


def test_a_prompt_without_room_for_a_reply_is_refused(rig: DaemonRig) -> None:
    most = rig.daemon.context_max
    with pytest.raises(ContextFull):
        begin(rig, [3] * most, options())
    assert run(rig, [3] * (most - 1), options()).num_tokens == 1


def test_the_engine_never_asks_for_its_log_and_one_it_asks_for_fails_by_itself(
    slow: DaemonRig,
) -> None:
    """Were there a fault, the turn would end; the engine and other turns go on."""
    live, other = begin(slow, PROMPT, options(90_000)), begin(slow, PROMPT, options(60))

    async def ask_for_the_log() -> None:
        key = unstored_key("", live.number)
        slow.daemon.conversations.take([LogNeeded(live.number, key, 7)])

    slow.call(ask_for_the_log())
    with pytest.raises(TurnInterrupted):
        follow(slow, live)
    assert follow(slow, other).token_ids == expected(PROMPT, 60)


def test_no_name_that_a_client_can_say_is_its_own(slow: DaemonRig) -> None:
    live = begin(slow, PROMPT, options(60))
    key = unstored_key("", live.number)
    for name in (key, key.replace("/", "~"), str(live.turn_id)):
        with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
            slow.stub.DeleteConversation(pb.DeleteConversationRequest(conversation_id=name))
    assert follow(slow, live).finish is FinishReason.LENGTH


def test_what_the_engine_does_not_take_has_never_been(rig: DaemonRig) -> None:
    put: list[Any] = []

    async def refuse() -> None:
        unstored = rig.daemon.conversations.unstored

        def full(message: Any) -> None:
            put.append(message)
            raise Unavailable("the engine takes no messages at present")

        unstored._put, before = full, unstored._put
        try:
            with pytest.raises(Unavailable):
                await rig.daemon.begin_unstored(PROMPT, options())
        finally:
            unstored._put = before

    rig.call(refuse())
    assert len(put) == 1
    assert not any(isinstance(each, CancelTurn | DeleteConversation) for each in put)
    assert rig.num_live == 0
    assert run(rig, PROMPT, options(2)).finish is FinishReason.LENGTH
