"""Each thread of the service owns its state: this is checked, and the check finds violations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pensieve.v1 import conversation_pb2 as pb
from tests.conversations.owner_threads import OwnerThreads
from tests.conversations.rig_daemon import DaemonRig


class Counter:
    def __init__(self) -> None:
        self.count = 0

    @property
    def is_zero(self) -> bool:
        return not self.count

    def add(self, number: int) -> int:
        self.count += number
        return self._sum()

    def _sum(self) -> int:
        return self.count


def test_only_the_owner_thread_may_use_methods_and_properties() -> None:
    caller = ["loop"]
    owners = OwnerThreads(lambda: caller[0])
    counter = Counter()
    owners.watch(counter, "loop")
    assert counter.is_zero
    assert counter.add(2) == 2
    caller[0] = "store"
    with pytest.raises(AssertionError, match=r"Counter\.add belongs to the loop, and store called"):
        counter.add(1)
    with pytest.raises(AssertionError, match=r"Counter\.is_zero belongs to the loop"):
        assert counter.is_zero
    assert counter.count == 2
    assert len(owners.violations) == 2


def test_calls_from_wrong_threads_of_a_daemon_are_detected(tmp_path: Path) -> None:
    """Each violation here once was a real bug, such as the event loop using the history."""
    with DaemonRig(tmp_path / "data") as rig:
        rig.ask("c", "hello", sampling=pb.Sampling(max_tokens=4, ignore_eos=True))
        conversations = rig.daemon.conversations

        async def meddle() -> None:
            with pytest.raises(AssertionError, match=r"History\.rewind belongs to the store"):
                conversations._history.rewind("c", 0)
            with pytest.raises(AssertionError, match=r"ConversationStore\.get_conversation"):
                rig.daemon.store.get_conversation("c")
            with pytest.raises(AssertionError, match=r"Turns\.all_live belongs to the loop"):
                await rig.daemon.threads.in_store("", conversations.turns.all_live)
            with pytest.raises(AssertionError, match=r"put belongs to the loop"):
                await rig.daemon.threads.in_store("", rig.daemon.engine.put, None)

        rig.call(meddle())
        assert len(rig.owners.violations) == 4
        rig.owners.violations.clear()
        assert rig.daemon.store.verify() == []  # allowed: it uses its own connection


def test_a_short_turn_needs_two_jobs_of_the_store_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One job begins the turn and one ends it. More thread switches would slow every stream."""
    with DaemonRig(tmp_path / "data") as rig:
        rig.ask("c", "hello", sampling=pb.Sampling(max_tokens=4, ignore_eos=True))
        jobs: list[str] = []
        in_store = rig.daemon.threads.in_store

        async def record_job(tenant: str, function: Any, *arguments: Any, **named: Any) -> Any:
            jobs.append(function.__name__)
            return await in_store(tenant, function, *arguments, **named)

        monkeypatch.setattr(rig.daemon.threads, "in_store", record_job)
        rig.ask("c", "and now?", sampling=pb.Sampling(max_tokens=4, ignore_eos=True))
        assert len(jobs) == 2
