"""A turn that kills the engine is not retried for ever, and does not make other turns fail."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from pensieve.client import Client, Retry
from pensieve.conversations.live_turn import LiveTurn, ReplyTokens, TurnPhase
from pensieve.conversations.turns import RECORDS_MAX, Suspects
from pensieve.core.turn import FinishReason, Usage
from pensieve.engine.messages import TurnEnded
from pensieve.errors import TurnFailed
from tests.conversations.faulty_engine import POISON, VENOM
from tests.conversations.rig_daemon import ECHO, DaemonRig

FAULTY = (sys.executable, "-m", "tests.conversations.faulty_engine", "nowhere")
PATIENT = Retry(retries=100, first_seconds=0.05, most_seconds=0.3)


def turn(turn_id: int, num_tokens: int = 0) -> LiveTurn:
    return LiveTurn(turn_id, "c", 0, 1, ReplyTokens([7] * num_tokens))


@pytest.mark.parametrize("seed", [POISON, VENOM])
def test_a_turn_that_kills_the_engine_fails_after_three_deaths(seed: int, tmp_path: Path) -> None:
    with DaemonRig(tmp_path / "data", program=FAULTY) as rig:
        with Client(rig.server.address, retry=PATIENT) as client:
            conversation = client.conversation("poison")
            for deaths in (3, 6):  # a retry by the user gets three new attempts
                with pytest.raises(TurnFailed) as caught:
                    conversation.ask("hello", request_id="r", seed=seed, max_tokens=4)
                assert caught.value.reason == "ENGINE_DIED"
                assert rig.daemon.engine.num_restarts <= deaths
            reply = client.conversation("other").ask("hello", max_tokens=4, ignore_eos=True)
            assert len(reply.token_ids) == 4
        # A failing engine may still receive the retried turn. Its end then counts as caused by this turn.
        assert rig.daemon.engine.num_restarts in ((6,) if seed == POISON else (5, 6))


def test_a_turn_fails_after_three_reported_engine_failures(tmp_path: Path) -> None:
    """The engine reports the failure, and ends its turns itself."""
    faults = tmp_path / "faults"
    faults.write_text("memory\n" * 20)
    with DaemonRig(tmp_path / "data", program=(*FAULTY[:-1], str(faults))) as rig:
        with (
            Client(rig.server.address, retry=PATIENT) as client,
            pytest.raises(TurnFailed) as error,
        ):
            client.conversation("c").ask("hello", max_tokens=4)
        assert error.value.reason == "ENGINE_DIED"
        assert faults.read_text().count("memory") == 17


@pytest.mark.parametrize("seed", [POISON, VENOM])
def test_turns_beside_one_that_kills_the_engine_are_completed(seed: int, tmp_path: Path) -> None:
    with DaemonRig(tmp_path / "data", program=FAULTY) as rig:
        replies = []

        def talk(number: int) -> None:
            with Client(rig.server.address, retry=PATIENT) as client:
                conversation = client.conversation(f"c{number}")
                replies.append(conversation.ask("hello", max_tokens=1500, ignore_eos=True))

        talkers = [threading.Thread(target=talk, args=(number,)) for number in range(4)]
        for talker in talkers:
            talker.start()
        with Client(rig.server.address, retry=PATIENT) as client, pytest.raises(TurnFailed):
            client.conversation("poison").ask("hello", seed=seed, max_tokens=4)
        for talker in talkers:
            talker.join(60)
        assert [len(reply.token_ids) for reply in replies] == [1500] * 4


def test_a_turn_that_arrives_after_the_engine_failed_is_not_suspect(tmp_path: Path) -> None:
    """The engine has ended its turns and reads no more, but the daemon has not noticed its end yet."""
    slow = (*ECHO, "--seconds=0.02")
    with DaemonRig(tmp_path / "data", program=slow) as rig, Client(rig.server.address) as client:
        turns = []  # keep references: a turn to which nothing refers is abandoned
        for name in ("first", "second"):
            turns.append(client.conversation(name).send("hello", max_tokens=500, ignore_eos=True))
            next(turns[-1])

        async def fail() -> None:
            first, second = rig.daemon.conversations.turns.all_live()
            failed = FinishReason.FAILED
            end = TurnEnded(
                first.attempt_id, first.conversation_id, failed, Usage(), "ENGINE_FAILED"
            )
            rig.daemon._on_events([end])
            rig.daemon._on_down("it has failed")
            assert set(rig.daemon.conversations.turns.suspects._records) == {first.turn_id}
            assert second.phase is TurnPhase.GIVING_UP

        rig.call(fail())
        turns.append(client.conversation("later").send("hello", max_tokens=500, ignore_eos=True))
        next(turns[-1])

        async def die() -> None:
            later = rig.daemon.conversations.turns.of_conversation("later")
            assert later is not None
            rig.daemon._on_down("another engine has died")
            assert later.turn_id in rig.daemon.conversations.turns.suspects._records

        rig.call(die())


def test_two_suspected_turns_are_retried_one_after_the_other() -> None:
    suspects, one, other, new = Suspects(), turn(1), turn(2, 3), turn(3)
    for _ in range(2):
        assert not suspects.engine_died(one)
        assert not suspects.engine_died(other)
    assert suspects.must_wait(one, lambda: [one, other, new])
    assert suspects.must_wait(other, lambda: [one, other, new])
    assert not suspects.must_wait(new, lambda: [one, other, new])
    assert not suspects.must_wait(one, lambda: [one, new])
    further = turn(2, 4)  # the turn is now beyond the token at which the engine died
    assert not suspects.must_wait(one, lambda: [one, further])
    assert not suspects.engine_died(further), "this turn did not stop the engine at that token"
    assert suspects.engine_died(one)
    assert not suspects.engine_died(one), "a turn that has failed begins without a record"


def test_the_number_of_records_of_suspects_is_limited() -> None:
    suspects = Suspects()
    for number in range(RECORDS_MAX + 10):
        suspects.engine_died(turn(number))
    assert len(suspects._records) == RECORDS_MAX
    suspects.ended(turn(RECORDS_MAX))
    assert len(suspects._records) == RECORDS_MAX - 1
