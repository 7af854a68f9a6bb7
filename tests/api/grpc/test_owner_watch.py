"""Waiting calls notice when the owner of a conversation is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from pensieve.api.grpc.peers import OwnerWatch, Wait
from pensieve.errors import NotFound, OwnedElsewhere, StoreUnavailable

LOOK_SECONDS = 0.01


class Claims:
    """Scripted results of claims, by conversation. None: the claim succeeds."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers: dict[str, OwnedElsewhere | Exception | None] = {}

    async def claim(self, conversation_id: str, tenant: str) -> OwnedElsewhere | None:
        assert tenant == "t"
        self.asked.append(conversation_id)
        found = self.answers.get(conversation_id, owner_of(conversation_id))
        if isinstance(found, OwnedElsewhere) or found is None:
            return found
        raise found


def owner_of(name: str, replica: str = "one") -> OwnedElsewhere:
    return OwnedElsewhere(name, replica, f"{replica}:1")


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(LOOK_SECONDS)


def begin_waits(watch: OwnerWatch, notified: list[str], *names: str) -> list[Wait]:
    return [watch.begin(owner_of(name), "t", partial(notified.append, name)) for name in names]


def test_one_claim_checks_the_owner_for_all_waiting_calls() -> None:
    async def run() -> None:
        claims, notified = Claims(), list[str]()
        watch = OwnerWatch(claims.claim, LOOK_SECONDS)
        waits = begin_waits(watch, notified, "a", "b", "c")
        await wait_until(lambda: len(claims.asked) >= 5)
        assert set(claims.asked) == {"a"}
        assert notified == []
        watch.end(waits[0])
        watch.end(waits[0])
        await wait_until(lambda: "b" in claims.asked)
        for wait in waits:
            watch.end(wait)
        await wait_until(lambda: not watch._watching)
        begin_waits(watch, notified, "d")  # a new call looks again
        await wait_until(lambda: "d" in claims.asked)
        await watch.close()

    asyncio.run(run())


def test_waiting_calls_are_notified_when_the_owner_is_gone_or_replaced() -> None:
    async def run() -> None:
        claims, notified = Claims(), list[str]()
        watch = OwnerWatch(claims.claim, LOOK_SECONDS)
        waits = begin_waits(watch, notified, "a", "b", "c", "d")
        claims.answers = {"a": None, "b": owner_of("b", "two"), "c": NotFound("it is deleted")}
        await wait_until(lambda: len(notified) == 2)
        assert notified == ["a", "b"]
        assert [each.is_over for each in waits] == [True, True, False, False]
        next_owner = waits[1].next_owner
        assert waits[0].next_owner is None
        assert next_owner is not None
        assert next_owner.replica == "two"
        assert claims.asked[:4] == ["a", "b", "c", "d"]
        await watch.close()

    asyncio.run(run())


def test_waiting_calls_are_not_notified_while_the_store_is_unavailable() -> None:
    async def run() -> None:
        claims, notified = Claims(), list[str]()
        watch = OwnerWatch(claims.claim, LOOK_SECONDS)
        claims.answers = {"a": StoreUnavailable("it is away")}
        begin_waits(watch, notified, "a", "b")
        await wait_until(lambda: len(claims.asked) >= 3)
        assert (set(claims.asked), notified) == ({"a"}, [])
        claims.answers = {"a": None, "b": None}
        await wait_until(lambda: notified == ["a", "b"])
        await watch.close()

    asyncio.run(run())


def test_a_call_that_is_answered_during_the_claim_is_not_notified() -> None:
    """The owner's answer has begun, so the owner decides how the call ends."""

    async def run() -> None:
        asked, notified, gate = list[str](), list[str](), asyncio.Event()

        async def claim(conversation_id: str, tenant: str) -> OwnedElsewhere | None:
            asked.append(conversation_id)
            if conversation_id == "a":
                await gate.wait()
            return None

        watch = OwnerWatch(claim, LOOK_SECONDS)
        first, _ = begin_waits(watch, notified, "a", "b")
        await wait_until(lambda: asked == ["a"])
        watch.end(first)
        gate.set()
        await wait_until(lambda: notified == ["b"])
        assert not first.is_over
        await watch.close()

    asyncio.run(run())
