"""Turns that write nothing to disk run, end and are refused like turns of conversations."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import sys
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from pensieve.conversations.daemon_config import DaemonConfig
from pensieve.conversations.live_turn import LiveTurn, ReplyTokens, unstored_key
from pensieve.core.turn import FinishReason, TurnOptions
from pensieve.engine.messages import (
    CancelTurn,
    DeleteConversation,
    EvictConversation,
    LogNeeded,
)
from pensieve.errors import (
    ContextFull,
    InvalidArgument,
    PensieveError,
    QueueFull,
    TurnFailed,
    TurnInterrupted,
    Unavailable,
)
from pensieve.guard.limits import Limits
from pensieve.launch.echo_engine import digest, next_token
from pensieve.sampling import Sampling
from pensieve.v1 import admin_pb2
from pensieve.v1 import conversation_pb2 as pb
from tests.conversations.faulty_engine import POISON
from tests.conversations.rig_daemon import ECHO, DaemonRig, wait_for
from tests.conversations.test_daemon import END_ID, TOKENIZER

SECRET = "The treasure lies under the old oak."
PROMPT = tuple(TOKENIZER.encode(SECRET).ids)
SLOW = (*ECHO, "--seconds=0.005")
FAULTY = (sys.executable, "-m", "tests.conversations.faulty_engine", "nowhere")


def options(max_tokens: int = 12, priority: int = 0, **sampling: Any) -> TurnOptions:
    sampling.setdefault("ignore_eos", True)
    return TurnOptions(Sampling(max_tokens=max_tokens, **sampling), priority)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[DaemonRig]:
    with DaemonRig(tmp_path / "data") as rig:
        yield rig


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[DaemonRig]:
    """A daemon with iterations of 5 ms, so that tests can act on running turns. None is given up."""
    config = DaemonConfig(grace_seconds=3600, limits={"few": Limits(turns_max=1)})
    with DaemonRig(tmp_path / "data", config=config, program=SLOW) as rig:
        yield rig


def begin(rig: DaemonRig, *arguments: Any, **named: Any) -> LiveTurn:
    live: LiveTurn = rig.call(rig.daemon.begin_unstored(*arguments, **named))
    return live


async def _take(tokens: ReplyTokens) -> None:
    """Ignore the tokens. The caller still counts as a reader."""


def follow(rig: DaemonRig, live: LiveTurn) -> LiveTurn:
    async def read() -> None:
        await rig.daemon.conversations.followers.follow(live, _take)

    rig.call(read())
    return live


def run(rig: DaemonRig, prompt: Sequence[int], options: TurnOptions, **named: Any) -> LiveTurn:
    return follow(rig, begin(rig, prompt, options, **named))


def expected(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return the tokens that the echo engine generates after this prompt."""
    log = array("I", prompt)
    for _ in range(num_tokens):
        log.append(next_token(digest(log), TOKENIZER.vocab_size, END_ID))
    return list(log[len(prompt) :])


def cached(rig: DaemonRig) -> list[Any]:
    request = admin_pb2.ListCachedConversationsRequest()
    return list(rig.admin.ListCachedConversations(request).conversations)


def on_disk(data: Path) -> bytes:
    return b"".join(each.read_bytes() for each in sorted(data.rglob("*")) if each.is_file())


def test_an_unstored_reply_equals_the_reply_of_a_conversation_with_the_same_tokens(
    rig: DaemonRig,
) -> None:
    said = rig.ask("c", SECRET, sampling=pb.Sampling(max_tokens=12, ignore_eos=True))
    prompt = list(rig.messages("c")[0].token_ids)
    live = run(rig, prompt, options())
    assert live.reply.token_ids == said.token_ids == expected(prompt, 12)
    assert (live.text, live.finish, live.failure) == (said.text, FinishReason.LENGTH, None)
    assert live.figures["prompt_tokens"] == len(prompt)
    assert live.figures["output_tokens"] == 12
    assert rig.num_live == 0


def test_an_unstored_turn_leaves_no_text_on_the_disk_or_in_the_log(
    rig: DaemonRig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        live = run(rig, PROMPT, options())
    written = on_disk(tmp_path / "data")
    assert written, "the data folder has files to search"
    for mark in (SECRET.encode(), live.text.encode(), array("I", PROMPT).tobytes()):
        assert mark not in written
    ended = [each for each in caplog.records if each.name == "pensieve.turns"]
    assert [each.figures["output_tokens"] for each in ended] == [12]  # type: ignore[attr-defined]
    assert SECRET not in caplog.text
    assert not list(rig.stub.ListConversations(pb.ListConversationsRequest()).conversations)


def test_the_engine_keeps_no_kv_of_an_unstored_turn_shorter_than_a_chunk(rig: DaemonRig) -> None:
    run(rig, PROMPT[:10], options())
    assert cached(rig) == []
    assert rig.call(rig.daemon.check()) == []


def test_the_next_prompt_reuses_the_whole_chunks_of_the_previous_turn(rig: DaemonRig) -> None:
    first = run(rig, PROMPT * 8, options(40))
    log = [*PROMPT * 8, *first.reply.token_ids]
    again = [*log, *PROMPT]
    second = run(rig, again, options(5))
    whole = (len(log) - 1) // 32 * 32  # the engine keeps no partly filled chunk of an unstored turn
    assert (first.cached_tokens, second.cached_tokens) == (0, whole)
    assert second.figures["device_tokens"] == whole
    assert second.figures["prompt_tokens"] == len(again)
    assert second.figures["recomputed_tokens"] == 0
    assert second.reply.token_ids == expected(again, 5)
    (kept,) = cached(rig)  # the second turn has all chunks of the first turn
    assert kept.conversation_id == str(second.attempt_id)
    assert kept.device_tokens == (len(again) + 4) // 32 * 32
    assert rig.call(rig.daemon.check()) == []


def test_several_prompts_that_continue_the_same_turn_share_its_kv(rig: DaemonRig) -> None:
    first = run(rig, PROMPT * 8, options(40))
    log = [*PROMPT * 8, *first.reply.token_ids]
    assert len(log) == 128
    for number in range(3):
        prompt = [*log, *range(10 + number, 80 + number)]
        live = run(rig, prompt, options(5))
        assert live.cached_tokens == (128 if number else 96)  # 96: the last token had no KV yet
        assert live.reply.token_ids == expected(prompt, 5)
    assert rig.call(rig.daemon.check()) == []


def test_a_prompt_shares_the_kv_of_a_running_unstored_turn(slow: DaemonRig) -> None:
    running = begin(slow, PROMPT * 20, options(90_000))
    wait_for(lambda: running.num_tokens)
    prompt = [*PROMPT * 20, 7]
    live = run(slow, prompt, options(5))
    assert live.cached_tokens == len(PROMPT * 20)
    assert live.reply.token_ids == expected(prompt, 5)

    async def cancel() -> None:
        slow.daemon.conversations.ends.stop(running)

    slow.call(cancel())
    follow(slow, running)
    assert running.reply.token_ids == expected(PROMPT * 20, running.num_tokens)
    longer = [*PROMPT * 20, *running.reply.token_ids, 9]
    assert run(slow, longer, options(5)).reply.token_ids == expected(longer, 5)
    assert slow.call(slow.daemon.check()) == []


def test_a_repeated_prompt_computes_only_its_last_token(rig: DaemonRig) -> None:
    prompt = (PROMPT * 20)[:128]
    assert run(rig, prompt, options(5)).cached_tokens == 0
    assert run(rig, prompt, options(5)).cached_tokens == 127  # at least one token must be computed
    live = run(rig, [*prompt, 5], options(5))
    assert live.cached_tokens in (127, 128)  # without or with the last token of the history
    assert live.reply.token_ids == expected([*prompt, 5], 5)


def test_tenants_share_no_kv_of_unstored_turns(rig: DaemonRig) -> None:
    for tenant in ("a", "b", ""):
        assert run(rig, PROMPT * 20, options(5), tenant=tenant).cached_tokens == 0
    assert run(rig, PROMPT * 20, options(5), tenant="b").cached_tokens > 0


def test_a_turn_that_was_given_up_leaves_the_cached_chunks_usable(slow: DaemonRig) -> None:
    first = run(slow, PROMPT * 8, options(40))
    log = [*PROMPT * 8, *first.reply.token_ids]
    second = begin(slow, [*log, *PROMPT], options(90_000))
    wait_for(lambda: second.num_tokens)

    async def drop() -> None:
        slow.daemon.conversations.ends.give_up(second)
        await slow.daemon.conversations.followers.until_ended(second)

    slow.call(drop())
    wait_for(lambda: len(cached(slow)) == 1)
    third = run(slow, [*log, *PROMPT], options(5))
    assert third.cached_tokens == (len(log) - 1) // 32 * 32
    assert third.reply.token_ids == expected([*log, *PROMPT], 5)
    assert third.figures["recomputed_tokens"] == 0


def test_a_restarted_engine_has_no_cached_tokens(slow: DaemonRig) -> None:
    run(slow, PROMPT * 20, options(5))
    os.kill(slow.daemon.engine.pid or 0, signal.SIGKILL)
    wait_for(lambda: not slow.daemon.serving)
    wait_for(lambda: slow.daemon.serving)
    live = run(slow, PROMPT * 20, options(5))
    assert (live.cached_tokens, live.reply.token_ids) == (0, expected(PROMPT * 20, 5))


def test_evicted_tokens_of_an_unstored_turn_count_as_new_tokens(rig: DaemonRig) -> None:
    first = run(rig, PROMPT * 8, options(40))
    log = [*PROMPT * 8, *first.reply.token_ids]

    async def evict() -> None:
        await rig.daemon.engine.query(lambda n: EvictConversation(unstored_key("", 1), False, n))

    rig.call(evict())
    live = run(rig, [*log, 9], options(5))
    assert (live.cached_tokens, live.reply.token_ids) == (0, expected([*log, 9], 5))
    assert live.figures["recomputed_tokens"] == 0, (
        "the daemon does not know that they were computed before"
    )


def test_many_growing_chats_have_the_same_replies_as_each_alone(slow: DaemonRig) -> None:
    """Many chats run at once. Some fork, are cancelled, or are dropped. Every token is checked."""
    rng = random.Random(7)
    chats = [[*PROMPT * rng.randint(1, 4)] for _ in range(6)]

    async def talk(chat: list[int]) -> int:
        daemon, num_cached = slow.daemon, 0
        for turn in range(5):
            live = await daemon.begin_unstored(chat, options(rng.randint(1, 70)))
            roll = rng.random()
            if roll < 0.2:
                await asyncio.sleep(0.02)
                daemon.conversations.ends.stop(live, rng.randint(1, 9))
            elif roll < 0.3:
                await asyncio.sleep(0.02)
                daemon.conversations.ends.give_up(live)
                await daemon.conversations.followers.until_ended(live)
                continue
            await daemon.conversations.followers.follow(live, _take)
            assert live.reply.token_ids[: live.num_tokens] == expected(chat, live.num_tokens), turn
            num_cached += live.cached_tokens
            if rng.random() < 0.2:  # another chat continues from here, too
                chats.append([*chat, 5])
            chat += [
                *live.reply.token_ids[: live.num_tokens],
                *rng.choices(PROMPT, k=rng.randint(1, 60)),
            ]
        return num_cached

    async def crowd() -> int:
        first = await asyncio.gather(*map(talk, list(chats)))
        forks = await asyncio.gather(*map(talk, chats[6:][:6]))
        return sum(first) + sum(forks)

    assert slow.call(crowd()) > 1000
    assert slow.num_live == 0
    assert slow.call(slow.daemon.check()) == []


def test_a_cancellation_keeps_the_requested_tokens_and_ends_the_readers(slow: DaemonRig) -> None:
    live = begin(slow, PROMPT, options(90_000))
    wait_for(lambda: live.num_tokens >= 5)

    async def cancel() -> None:
        slow.daemon.conversations.ends.stop(live, 3)

    slow.call(cancel())
    follow(slow, live)
    assert (live.finish, live.num_tokens) == (FinishReason.CANCELLED, 3)
    assert live.text + live.tail == TOKENIZER.decode(expected(PROMPT, 3))
    assert cached(slow) == []


def test_an_unstored_turn_without_readers_is_given_up(tmp_path: Path) -> None:
    config = DaemonConfig(grace_seconds=0.2)
    with DaemonRig(tmp_path / "data", config=config, program=SLOW) as rig:
        live = begin(rig, PROMPT, options(90_000))
        wait_for(lambda: live.finish is not None)
        assert live.finish is FinishReason.CANCELLED
        assert isinstance(live.failure, TurnInterrupted)
        assert (rig.num_live, cached(rig)) == (0, [])


def test_a_turn_continues_if_one_of_its_readers_leaves(slow: DaemonRig) -> None:
    live = begin(slow, PROMPT, options(60))

    async def leave() -> None:
        gone = asyncio.create_task(slow.daemon.conversations.followers.follow(live, _take))
        await asyncio.sleep(0.02)
        gone.cancel()
        await slow.daemon.conversations.followers.follow(live, _take)

    slow.call(leave())
    assert live.reply.token_ids == expected(PROMPT, 60)


def test_readers_get_unavailable_if_the_engine_dies(slow: DaemonRig) -> None:
    live = begin(slow, PROMPT, options(90_000))
    wait_for(lambda: live.num_tokens)
    os.kill(slow.daemon.engine.pid or 0, signal.SIGKILL)
    with pytest.raises(Unavailable):
        follow(slow, live)
    wait_for(lambda: slow.daemon.serving)
    assert run(slow, PROMPT, options(5)).reply.token_ids == expected(PROMPT, 5)


def test_a_prompt_that_killed_the_engine_three_times_fails(tmp_path: Path) -> None:
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


def test_a_drain_waits_for_unstored_turns_and_refuses_new_ones(slow: DaemonRig) -> None:
    live = begin(slow, PROMPT, options(20))
    draining = asyncio.run_coroutine_threadsafe(slow.daemon.drain(60.0), slow._loop)
    follow(slow, live)
    draining.result(60)
    assert live.finish is FinishReason.LENGTH
    with pytest.raises(Unavailable):
        begin(slow, PROMPT, options())


def test_a_drain_without_time_interrupts_unstored_turns(slow: DaemonRig) -> None:
    live = begin(slow, PROMPT, options(90_000))
    slow.call(slow.daemon.drain(0.0))
    assert isinstance(live.failure, Unavailable)
    assert slow.num_live == 0


def test_unstored_turns_count_towards_the_tenants_limit(slow: DaemonRig) -> None:
    live = begin(slow, PROMPT, options(90_000), tenant="few")
    with pytest.raises(QueueFull):
        begin(slow, PROMPT, options(), tenant="few")
    assert run(slow, PROMPT, options(2), tenant="another").finish is FinishReason.LENGTH

    async def drop() -> None:
        slow.daemon.conversations.ends.give_up(live)
        await slow.daemon.conversations.followers.until_ended(live)

    slow.call(drop())
    assert run(slow, PROMPT, options(2), tenant="few").finish is FinishReason.LENGTH


def test_the_tenant_is_charged_for_unstored_turns(tmp_path: Path) -> None:
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
def test_an_invalid_unstored_turn_is_refused_with_its_field_name(
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


def test_a_request_for_the_log_of_an_unstored_turn_ends_only_that_turn(
    slow: DaemonRig,
) -> None:
    """If the engine asked for the log (a bug), this turn would end. The engine and other turns continue."""
    live, other = begin(slow, PROMPT, options(90_000)), begin(slow, PROMPT, options(60))

    async def ask_for_the_log() -> None:
        key = unstored_key("", live.attempt_id)
        slow.daemon.conversations.take([LogNeeded(live.attempt_id, key, 7)])

    slow.call(ask_for_the_log())
    with pytest.raises(TurnInterrupted):
        follow(slow, live)
    assert follow(slow, other).reply.token_ids == expected(PROMPT, 60)


def test_no_conversation_id_of_a_client_reaches_an_unstored_turn(slow: DaemonRig) -> None:
    live = begin(slow, PROMPT, options(60))
    key = unstored_key("", live.attempt_id)
    for name in (key, key.replace("/", "~"), str(live.turn_id)):
        with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
            slow.stub.DeleteConversation(pb.DeleteConversationRequest(conversation_id=name))
    assert follow(slow, live).finish is FinishReason.LENGTH


def test_a_turn_that_the_engine_does_not_accept_leaves_nothing_behind(
    rig: DaemonRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[Any] = []

    async def refuse() -> None:
        def full(message: Any) -> None:
            messages.append(message)
            raise Unavailable("the engine takes no messages at present")

        monkeypatch.setattr(rig.daemon.engine, "put", full)
        try:
            with pytest.raises(Unavailable):
                await rig.daemon.begin_unstored(PROMPT, options())
        finally:
            monkeypatch.undo()

    rig.call(refuse())
    assert len(messages) == 1
    assert not any(isinstance(each, CancelTurn | DeleteConversation) for each in messages)
    assert rig.num_live == 0
    assert run(rig, PROMPT, options(2)).finish is FinishReason.LENGTH
