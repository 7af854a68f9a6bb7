"""Where calls go if the recorded owner is wrong or gone. The owners are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from pensieve.api.grpc import forwarding, peers
from pensieve.api.grpc.forwarding import Forwarder, NotOwner
from pensieve.api.grpc.peers import Peers
from pensieve.errors import OwnedElsewhere, Unavailable

OURS = "two:1"
OWNER = OwnedElsewhere("c", "one", "one:1")
LOOK_SECONDS = 0.01


class ScriptedClaims:
    """Return given results: one for `claim`, and one for each call of `take`."""

    replica, address, lease_seconds = "two", OURS, 10.0

    def __init__(self, claimed: OwnedElsewhere | None, *taken: OwnedElsewhere | None) -> None:
        self._claimed, self._taken = claimed, list(taken)

    async def claim(self, conversation_id: str, tenant: str) -> OwnedElsewhere | None:
        return self._claimed

    async def take(self, conversation_id: str, tenant: str) -> OwnedElsewhere | None:
        return self._taken.pop(0)


class ScriptedCall:
    """A call that answers with `num_messages`, and then blocks until cancelled."""

    def __init__(self, may_repeat: bool, num_messages: int) -> None:
        self.may_repeat, self._num_messages = may_repeat, num_messages
        self._cancelled = asyncio.Event()
        self.passed_on: list[Any] = []

    def begin(self, address: str, channel: grpc.aio.Channel) -> Any:
        return self

    def cancel(self) -> None:
        self._cancelled.set()

    async def answer(self, call: Any) -> AsyncIterator[Any]:
        await self._cancelled.wait()
        for number in range(self._num_messages):
            yield number
        raise asyncio.CancelledError

    async def pass_on(self, message: Any) -> None:
        self.passed_on.append(message)


@pytest.fixture(autouse=True)
def short_look_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "LOOK_SECONDS", LOOK_SECONDS)
    monkeypatch.setattr(peers.OwnerWatch.__init__, "__defaults__", (LOOK_SECONDS,))


async def answered(owners: Any, call: Any, owner: OwnedElsewhere = OWNER) -> bool:
    forwarder = Forwarder(owners, Peers("two"))
    try:
        return await forwarder.forward(owner, "t", call)
    finally:
        await forwarder.close()


def test_the_forwarder_waits_if_a_newer_daemon_has_the_owners_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_sent = 0

    async def refuse(*_: Any) -> None:
        nonlocal num_sent
        num_sent += 1
        raise NotOwner(OWNER)

    monkeypatch.setattr(Forwarder, "_send", refuse)
    taken = [OWNER] * (2 * forwarding.OWNERS_MAX)
    assert asyncio.run(answered(ScriptedClaims(OWNER, *taken, None), None)) is False
    assert num_sent == len(taken) + 1


def test_the_forwarder_never_forwards_to_its_own_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(Forwarder, "_send", fail)
    earlier = OwnedElsewhere("c", "earlier", OURS)
    assert asyncio.run(answered(ScriptedClaims(earlier, earlier, None), None, earlier)) is False


@pytest.mark.parametrize(("may_repeat", "num_messages"), [(False, 0), (True, 1)])
def test_a_call_that_may_have_been_executed_is_not_repeated(
    may_repeat: bool, num_messages: int
) -> None:
    async def forward() -> None:
        call = ScriptedCall(may_repeat, num_messages)
        with pytest.raises(Unavailable, match="may have been executed"):
            await answered(ScriptedClaims(None), call)
        assert len(call.passed_on) == num_messages

    asyncio.run(forward())


def test_a_repeatable_call_is_answered_locally_once_its_owner_is_gone() -> None:
    async def forward() -> None:
        assert await answered(ScriptedClaims(None), ScriptedCall(True, 0)) is False

    asyncio.run(forward())


def test_the_oldest_channel_without_calls_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "CHANNELS_MAX", 2)

    async def lend() -> None:
        others = Peers("two")
        async with others.channel("a:1") as first:
            async with others.channel("b:1") as second:
                pass
            async with others.channel("c:1"), others.channel("d:1"), others.channel("a:1") as again:
                assert again is first
                assert first.get_state() is not grpc.ChannelConnectivity.SHUTDOWN
                assert second.get_state() is grpc.ChannelConnectivity.SHUTDOWN
        await others.close()

    asyncio.run(lend())
