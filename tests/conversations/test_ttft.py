"""The objective for the time to first token: which turns are refused, and with which error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pensieve.client import Client, Retry
from pensieve.errors import QueueFull
from pensieve.v1 import admin_pb2
from tests.conversations.rig_daemon import ECHO, details, read_turn, wait_for
from tests.conversations.test_admission import call_on_loop
from tests.guard.test_tenants import ENDLESS, SHORT, TokensRig

TTFT, SECONDS_PER_ADMISSION = 20.0, 8.0


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[TokensRig]:
    """A daemon whose engine has room for one turn."""
    tenants: dict[str, dict[str, Any]] = {"noisy": {}, "quiet": {}}
    program, written = (*ECHO, "--seconds=0.002"), {"turns_max": "1"}
    with TokensRig(tmp_path, tenants, program, written, TTFT) as rig:
        yield rig


def more(rig: TokensRig) -> dict[str, float]:
    return dict(rig.admin.GetStats(admin_pb2.GetStatsRequest(), timeout=60).stats.more)


def flood(rig: TokensRig) -> list[Any]:
    """Let one turn of a tenant run and three wait, as if the engine admitted a turn every 8 s."""
    calls = [rig.begin("noisy", f"n{i}", ENDLESS, request_id=f"r{i}") for i in range(4)]
    turns = rig.daemon.conversations.turns
    wait_for(lambda: call_on_loop(rig, lambda: turns.num_waiting) == 3)

    def admit_late() -> None:
        future = rig._loop.time() + 8 * SECONDS_PER_ADMISSION
        rig.daemon.admission.turn_admitted(0.0, future)

    call_on_loop(rig, admit_late)
    return calls


def test_only_the_flooding_tenant_is_refused(rig: TokensRig) -> None:
    calls = flood(rig)
    with pytest.raises(grpc.RpcError) as error:
        read_turn(rig.begin("noisy", "n9", SHORT))
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    found = details(error.value)
    assert found["ErrorInfo"].reason == "QUEUE_FULL"
    assert not found["ErrorInfo"].metadata
    wait = 3 * SECONDS_PER_ADMISSION - TTFT
    assert found["RetryInfo"].retry_delay.ToSeconds() == pytest.approx(wait, abs=3)
    assert more(rig)["refused_for_ttft"] == 1
    quiet = rig.begin("quiet", "q", SHORT)
    for call in calls:
        call.cancel()
    assert read_turn(quiet).completed.revision == 1
    wait_for(lambda: rig.num_live == 0)
    assert read_turn(rig.begin("noisy", "n9", SHORT)).completed.revision == 1, (
        "no turn is ahead of it"
    )


def test_a_retry_attaches_to_its_waiting_turn_and_is_not_refused(rig: TokensRig) -> None:
    calls = flood(rig)
    again = rig.begin("noisy", "n3", ENDLESS, request_id="r3")
    assert more(rig)["refused_for_ttft"] == 0
    assert more(rig)["queue_wait_seconds"] == 0.0, "the wait of a new tenant"
    for call in (*calls, again):
        call.cancel()


def test_the_sdk_error_has_the_retry_time(rig: TokensRig) -> None:
    calls = flood(rig)
    token = rig.secrets["noisy"]
    with (
        Client(rig.server.address, token=token, retry=Retry(retries=0)) as client,
        pytest.raises(QueueFull) as error,
    ):
        client.conversation("n9").ask("hello", max_tokens=3)
    assert error.value.retry_after_seconds == pytest.approx(4.0, abs=3)
    for call in calls:
        call.cancel()


def test_the_pace_is_measured_from_computed_prompts(rig: TokensRig) -> None:
    """The echo engine predicts costs that it does not have."""
    prompts = rig.daemon.admission.prompts
    assert prompts.cost is not None
    assert prompts.pace.ratio is None
    for number in range(4):
        read_turn(rig.begin("quiet", f"c{number}", SHORT))
    assert prompts.pace.ratio is not None
    assert more(rig)["queue_wait_seconds"] == 0.0


@pytest.mark.parametrize("leaves", [False, True])
def test_an_ended_turn_does_not_count_as_ahead(rig: TokensRig, leaves: bool) -> None:
    call = rig.begin("quiet", "c", ENDLESS if leaves else SHORT)
    if leaves:
        next(iter(call))
        call.cancel()
    else:
        read_turn(call)
    wait_for(lambda: rig.num_live == 0)
    assert not call_on_loop(rig, rig.daemon.conversations.turns.without_token)
