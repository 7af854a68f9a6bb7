"""Which blocks a router is reported of: held against the cache of a real daemon, and by themselves."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import signal
import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from pensieve.engine.messages import CacheChanged, Message, Picture, WatchCache
from pensieve.errors import QueueFull
from pensieve.launch.programs import ENGINE
from pensieve.service import kv_events
from pensieve.service.grpc.auth import Token
from pensieve.service.kv_events import Batch, Block, HeldBlocks, KvEvents
from pensieve.service.live_turn import unstored_scope
from pensieve.v1.routers import smg_common_pb2 as common
from tests.service.rig_daemon import DaemonRig, wait_for
from tests.service.test_vllm_engine import PROMPT, generate, listening, request, stub

SIZE = 32
TINY = {"device_cache": "600t", "host_cache": "160t", "threads": "1"}


class Router:
    """A subscriber that believes what it is reported, and refuses what makes no sense."""

    def __init__(self, rig: DaemonRig, start: int = 0, metadata: Any = None) -> None:
        asked = common.SubscribeKvEventsRequest(start_sequence_number=start)
        self.call = stub(rig).SubscribeKvEvents(asked, metadata=metadata)
        self.held: dict[int, tuple[int, ...]] = {}  # all tokens up to the block's end
        self.num_removed = self.num_cleared = 0
        self.error: BaseException | None = None
        self.code: grpc.StatusCode | None = None
        self._sequence_number, self._event_id = start, 0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for batch in self.call:
                self._take(batch)
        except grpc.RpcError as error:
            self.code = error.code()
        except BaseException as error:  # the test sees it
            self.error = error
            self.call.cancel()

    def _take(self, batch: Any) -> None:
        self._sequence_number += 1
        assert batch.sequence_number == self._sequence_number
        assert batch.timestamp > 1e9
        for event in batch.events:
            self._event_id += 1
            assert event.event_id == self._event_id
            kind = event.WhichOneof("data")
            if kind == "cleared":
                self.num_cleared += 1
                self.held = {}
            elif kind == "removed":
                for number in event.removed.block_hashes:
                    del self.held[number]  # each was stored before
                    self.num_removed += 1
            else:
                self._store(event.stored)
        assert self.num_cleared

    def _store(self, stored: Any) -> None:
        before: tuple[int, ...] = ()
        if stored.HasField("parent_block_hash"):
            before = self.held[stored.parent_block_hash]  # which is held
        for block in stored.blocks:
            assert block.block_hash not in self.held
            assert block.block_size == len(block.token_ids) == SIZE
            before = self.held[block.block_hash] = (*before, *block.token_ids)

    def stop(self) -> None:
        self.call.cancel()
        self._thread.join()
        assert self.error is None, self.error


@contextmanager
def router(rig: DaemonRig, **arguments: Any) -> Iterator[Router]:
    subscribed = Router(rig, **arguments)
    try:
        wait_for(lambda: subscribed.num_cleared or subscribed.code or subscribed.error)
        yield subscribed
    finally:
        subscribed.stop()


def num_pictured(rig: DaemonRig, tenant: str = "") -> int:
    """Blocks at the beginning of what the picture shows of this tenant's requests."""
    prefix = f"{unstored_scope(tenant)}/"
    answer = rig.call(rig.daemon.query(lambda number: Picture(number, 100, prefix)))
    total = 0
    for _, num_tokens, _, left_out, strip in answer.rows:
        assert not left_out
        letters = ""
        for part in strip.replace("d", " d").replace("b", " b").replace("h", " h").split():
            letters += part[0] * int(part[1:].split("-")[0].split("c")[0])
            if "-" in part or "c" in part:
                break
        if strip[:1] in ("-", "c"):
            letters = ""
        total += min(len(letters), int(num_tokens) // SIZE)
    return total


def test_what_a_router_knows_is_what_the_cache_holds(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with DaemonRig(data, listening=listening(data), program=ENGINE, written=TINY) as rig:
        chooses = random.Random(1)
        logs = [[chat + 300, *PROMPT] for chat in range(6)]
        whole: set[tuple[int, ...]] = set()
        with router(rig) as first:
            for _ in range(26):
                log = chooses.choice(logs)
                tokens, _, _ = generate(rig, log, max_tokens=chooses.randint(20, 60))
                log += tokens
                whole |= {tuple(log[:end]) for end in range(SIZE, len(log) + 1, SIZE)}
                log += PROMPT
                wait_for(lambda: num_pictured(rig) == len(first.held))
                assert set(first.held.values()) <= whole
            assert first.num_cleared == 1
            assert first.num_removed > 10
            with router(rig) as second:
                wait_for(lambda: second.held == first.held)
                assert second.held
        wait_for(lambda: rig.call(nobody_watches(rig)))
        assert rig.call(rig.daemon.check()) == []


async def nobody_watches(rig: DaemonRig) -> bool:
    return not rig.daemon.kv_events.num_subscriptions


def test_a_tenant_learns_of_its_own_requests_alone(tmp_path: Path) -> None:
    data, red, blue = tmp_path / "data", "r" * 40, "b" * 40
    tokens = tuple(
        Token(hashlib.sha256(each.encode()).digest(), name)
        for each, name in ((red, "red"), (blue, "blue"))
    )
    with DaemonRig(data, listening=listening(data, tokens=tokens)) as rig:
        of_red = (("authorization", f"Bearer {red}"),)
        of_blue = (("authorization", f"Bearer {blue}"),)
        prompt = [5, *PROMPT] * 8
        with (
            router(rig, metadata=of_red) as first,
            router(rig, metadata=of_blue) as second,
            router(rig) as unknown,
        ):
            assert unknown.code is grpc.StatusCode.UNAUTHENTICATED
            list(stub(rig).Generate(request(prompt, max_tokens=2), metadata=of_red))
            wait_for(lambda: first.held)
            list(stub(rig).Generate(request(prompt[:70], max_tokens=2), metadata=of_blue))
            wait_for(lambda: len(second.held) == 2)
            assert not first.held.keys() & second.held.keys()


def test_conversations_are_not_told(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with DaemonRig(data, listening=listening(data)) as rig, router(rig) as found:
        rig.ask("secret", "The treasure lies under the old oak. " * 20)
        generate(rig, [7] * 70, max_tokens=2)
        wait_for(lambda: found.held)
        assert set(found.held.values()) == {(7,) * 32, (7,) * 64}


def test_a_stream_counts_on_from_where_its_caller_was(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with DaemonRig(data, listening=listening(data)) as rig:
        generate(rig, [7] * 70, max_tokens=2)
        with router(rig, start=41) as found:
            wait_for(lambda: len(found.held) == 2)
            assert found.num_cleared == 1


def test_an_engine_that_dies_holds_nothing(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with DaemonRig(data, listening=listening(data)) as rig, router(rig) as found:
        generate(rig, [7] * 70, max_tokens=2)
        wait_for(lambda: len(found.held) == 2)
        assert rig.daemon.engine.pid is not None
        os.kill(rig.daemon.engine.pid, signal.SIGKILL)
        wait_for(lambda: found.num_cleared == 2 and not found.held)
        wait_for(lambda: rig.daemon.engine.serving)
        generate(rig, [8] * 40, max_tokens=2)
        wait_for(lambda: set(found.held.values()) == {(8,) * 32})


# -- by itself --


@pytest.mark.parametrize("seed", range(20))
def test_a_block_is_told_while_all_before_it_are_held(seed: int) -> None:
    choose = random.Random(seed)
    parents = {number: choose.randrange(number) for number in range(1, 40)}
    blocks = HeldBlocks()
    held: set[int] = set()
    reported: dict[int, None] = {}
    for _ in range(300):
        number = choose.randrange(1, 40)
        if number in held:
            held.remove(number)
            for each in blocks.remove(number):
                del reported[each.number]
        else:
            held.add(number)
            for each in blocks.add(Block(number, parents[number], array("I"))):
                assert not each.parent or each.parent in reported
                reported[each.number] = None
        assert set(reported) == {each for each in held if reaches(each, parents, held)}
        places = list(blocks.reported)
        for place in places:
            assert not parents[place] or places.index(parents[place]) < places.index(place)


def reaches(number: int, parents: dict[int, int], held: set[int]) -> bool:
    while number:
        if number not in held:
            return False
        number = parents[number]
    return True


def changed(*stored: tuple[int, ...], removed: tuple[int, ...] = (), watch: int = 1) -> Any:
    return CacheChanged(watch, unstored_scope("red"), stored, removed)


def subscribed(put: list[Message] | None = None) -> KvEvents:
    return KvEvents((put if put is not None else []).append)


def test_one_that_lags_behind_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "BLOCKS_MAX", 4)

    async def play() -> None:
        events = subscribed()
        with events.subscribed("red") as slow, events.subscribed("red") as quick:
            for each in (slow, quick):
                assert await each.batches() == [Batch(cleared=True)]
            for number in range(1, 6):
                events.take(changed((number, number - 1, number)))
                assert sum(len(each.stored) for each in await quick.batches()) == 1
            events.take(changed(removed=(3,)))
            (gone,) = await quick.batches()
            assert gone.removed == (5, 4, 3)
            cleared, anew = await slow.batches()
            assert cleared.cleared
            assert [each.number for each in anew.stored] == [1, 2]
            events.take(changed((3, 2, 3)))
            for each in (slow, quick):
                (batch,) = await each.batches()
                assert [block.number for block in batch.stored] == [3, 4, 5]

    asyncio.run(play())


def test_the_engine_is_asked_once_and_an_earlier_watch_is_not_heard() -> None:
    async def play() -> None:
        put: list[Message] = []
        events = subscribed(put)
        with events.subscribed("red"), events.subscribed("blue"):
            assert put == [WatchCache(1, "~unstored/")]
        assert put[1:] == [WatchCache(0)]
        with events.subscribed("red") as again:
            assert put[2:] == [WatchCache(2, "~unstored/")]
            await again.batches()
            events.take(changed((1, 0, 1)))
            events.take(changed((2, 0, 1), watch=2))
            (batch,) = await again.batches()
            assert [each.number for each in batch.stored] == [2]

    asyncio.run(play())


def test_a_tenant_has_so_many_subscriptions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "SUBSCRIPTIONS_MAX", 1)

    async def play() -> None:
        events = subscribed()
        with (
            events.subscribed("red"),
            events.subscribed("blue"),
            pytest.raises(QueueFull),
            events.subscribed("red"),
        ):
            raise AssertionError("it is one too many")
        assert not events.num_subscriptions

    asyncio.run(play())
