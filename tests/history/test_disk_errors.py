"""What a history service does beside its calls: it goes on where the disk or a long check does not."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pensieve.errors import StoreUnavailable
from pensieve.history import presence, service
from pensieve.store import NewConversation
from pensieve.store.remote.methods import METHODS
from tests.history.rig_service import ServiceRig, call, in_thread, wait_for

NEW = NewConversation("c", "fingerprint 1")


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[ServiceRig]:
    with ServiceRig(tmp_path, lease_seconds=1.0) as found:
        yield found


def test_a_lease_that_runs_out_while_the_disk_is_full_ends_when_it_is_not(
    rig: ServiceRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = rig.connect()
    call(one, "create_conversation", NEW)
    fails = threading.Event()
    fails.set()
    end = rig.service._calls.end_session

    def refused(number: int) -> None:
        if fails.is_set():
            raise StoreUnavailable("the disk is full")
        end(number)

    monkeypatch.setattr(rig.service._calls, "end_session", refused)
    one.close()
    wait_for(lambda: "sessions could not be looked through" in caplog.text)
    fails.clear()
    wait_for(lambda: rig.replicas() == [])
    assert caplog.text.count("sessions could not be looked through") == 1


def test_conversations_are_given_up_a_few_at_a_time(
    rig: ServiceRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "GROUP_MAX", 3)
    monkeypatch.setattr(presence, "SHARE_SLACK", 0)
    sizes: list[int] = []
    give_up = rig.service._give_up

    def counted(session: int, names: Any) -> None:
        sizes.append(len(names))
        give_up(session, names)

    monkeypatch.setattr(rig.service, "_give_up", counted)
    one, two = rig.connect("one"), rig.connect("two")
    for number in range(10):  # its share is 1.25 x 5
        call(one, "create_conversation", NewConversation(f"c{number}", "fingerprint 1"))
    wait_for(lambda: sum(sizes) >= 4)
    assert max(sizes) <= 3
    assert call(two, "claim", "c0") is None  # the one that was used least lately


def test_a_check_of_all_holds_up_no_read_and_is_made_once(
    rig: ServiceRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, num_runs, num_asked = threading.Event(), [0], [0]
    verified = rig.service._verified

    async def counted(asked: Any) -> Any:
        num_asked[0] += 1
        return await verified(asked)

    @functools.wraps(METHODS["verify"].function)
    def verify(*_: Any, **__: Any) -> list[str]:
        num_runs[0] += 1
        assert gate.wait(60.0)
        return ["a problem"]

    monkeypatch.setattr(rig.service, "_verified", counted)
    monkeypatch.setattr(METHODS["verify"], "function", verify)
    one, two = rig.connect("one"), rig.connect("two")
    call(one, "create_conversation", NEW)
    found: list[Any] = []
    checking = [in_thread(lambda who=who: found.append(call(who, "verify"))) for who in (one, two)]
    wait_for(lambda: num_runs[0] == 1)
    assert call(two, "reader.get_conversation", "c").revision == 0
    wait_for(lambda: num_asked[0] == 2)
    gate.set()
    for each in checking:
        each.join(60.0)
    assert found == [["a problem"], ["a problem"]]
    assert num_runs[0] == 1
