"""The programs in scripts/measure check what they time, and compare the results."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
import torch

from pensieve.bench import random_model
from pensieve.bench.random_model import RandomShape
from pensieve.errors import PensieveError, Unavailable
from pensieve.store.conversation_store import ConversationStore
from pensieve.store.records import NewMessage, NewTurn
from scripts.measurements import isolation, lanes, loops, planning, service, shared_pages, swap
from scripts.measurements.processes import pinned

# The programs look for the engine among the child processes of the daemon, so the tests start
# the daemon as a new process, and not by the fork server.
pytestmark = pytest.mark.executed


@pytest.mark.parametrize("policy", ["lru", "return"])
def test_planning_is_timed_under_pressure(policy: str) -> None:
    found = planning.measure(policy, 50, num_running=8, num_iterations=40)
    assert len(found.seconds) == 40
    assert found.chunks > 500
    assert found.reclaimed + found.dropped > 0


def test_each_history_is_at_least_as_long_as_requested() -> None:
    with pinned([], 0.01) as daemon:
        short, long = service.turn_costs(daemon, (40, 400), 10)
        assert 40 <= short.history_tokens < 400 <= long.history_tokens
        assert short.first_token_seconds > 0
        found = asyncio.run(service.delivered(daemon, 4, 40))
    assert found.tokens == 160
    assert 0 < found.messages <= 160
    assert found.gaps


def test_both_tenants_are_answered() -> None:
    # An idle-priority process might get no time at all beside the other tests.
    alone, beside, noise = isolation.compared(1, 1.5, noise_policy=os.SCHED_OTHER)
    assert min(alone.first + alone.gaps + beside.first + beside.gaps) > 0
    assert beside.refused == 0
    assert noise["OK"] > 0
    assert noise["INVALID_ARGUMENT"] > 0, "oversized requests must be refused"
    assert noise["RESOURCE_EXHAUSTED"] > 0, "requests above the tenant's limits must be refused"


def test_swap_times_the_first_token_of_each_tier(tmp_path: Path) -> None:
    random_model.make(tmp_path, RandomShape(2, 64, 2, 1, 128, 8000), context=1024)
    found = swap.first_tokens(tmp_path, 150, 2)
    assert {tier: len(times) for tier, times in found.items()} == dict.fromkeys(swap.TIERS, 2)


def test_turns_of_daemons_on_one_database_are_counted_and_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "BEGIN_SECONDS", 8.0)  # until both processes have started
    found = lanes.measured(f"sqlite://{tmp_path}/history.db", 2, 1, 2.0)
    assert found.turns
    assert min(found.turns) > 0


def test_check_finds_a_turn_that_another_writer_added(tmp_path: Path) -> None:
    with ConversationStore.open(tmp_path, "a test") as store:
        talker = lanes.Talker(store, "t")
        turn = store.begin_turn("t-3", NewTurn("r", [NewMessage("user", "hi", [1])])).turn
        store.finish_turn(turn.turn_id, NewMessage("assistant", "ho", [2]), "stop", {})
        with pytest.raises(Unavailable, match="t-3 is at revision 1, and had replies up to 0"):
            talker.check()


def test_shared_pages_are_timed() -> None:
    found = shared_pages.measure(shared_pages.Shape(3, 160, 128, 4, 2, 32, "float32"), 2)
    assert min(found) > 0


def test_sharing_that_changes_a_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = shared_pages.Inputs.run

    def wrong(self: shared_pages.Inputs, shared: object) -> torch.Tensor:
        return right(self, None) if shared is None else self.out.fill_(0.5)

    monkeypatch.setattr(shared_pages.Inputs, "run", wrong)
    with pytest.raises(PensieveError, match="sharing changes a result"):
        shared_pages.measure(shared_pages.Shape(2, 160, 64, 4, 2, 32, "float32"), 1)


@pytest.mark.parametrize(
    ("text", "is_loop"),
    [
        ("She was a robot that loved painting. " * 5, True),
        ("A story. " + "ab " * 60, True),
        ("It is big.\nIt is very big.\nIt was bigger then.", False),
        ("I like my dog a lot. Indeed. I like my dog a lot! And: i like my dog a lot.", False),
        ("\n".join(f"{n}. The number {n} comes here" for n in range(90)), False),
    ],
)
def test_a_loop_is_a_text_that_repeats_a_piece_or_a_sentence(text: str, is_loop: bool) -> None:
    assert loops.repeats(text) is is_loop


def test_sampling_is_a_preset_name_or_settings() -> None:
    assert loops.sampling_of("greedy") == ("greedy", {"temperature": 0.0})
    assert loops.sampling_of("top_k=5,min_p=0.1")[1] == {"top_k": 5, "min_p": 0.1}
