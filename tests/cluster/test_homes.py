"""What a router remembers of homes, beside the table of owners."""

from __future__ import annotations

import asyncio
import math

import pytest

from pensieve.cluster import homes as homes_module
from pensieve.cluster.homes import ACTIVE_SECONDS, BEHIND, LOCATED_SECONDS, Homes
from pensieve.errors import Unavailable

NAMES = ("ada", "bob", "cleo")


class Table:
    """The table of owners, and a clock."""

    def __init__(self) -> None:
        self.owners: dict[str, str] = {}
        self.num_reads = 0
        self.now = 0.0
        self.fails = False
        self.homes = Homes(lambda: self.now)

    async def locate(self, key: str) -> str | None:
        self.num_reads += 1
        if self.fails:
            raise Unavailable("the history service is away")
        return self.owners.get(key)

    def of(self, key: str, running: tuple[str, ...] = NAMES) -> str | None:
        try:
            return asyncio.run(self.homes.of(key, lambda: running, self.locate))
        finally:
            self.homes.check()


def test_the_owner_goes_before_the_hash() -> None:
    table = Table()
    assert table.of("trip-42") == "bob"
    table.owners["trip-42"] = "ada"
    assert table.of("trip-42") == "ada"


def test_an_owner_is_located_once_in_a_while() -> None:
    table = Table()
    table.owners["trip-42"] = "bob"
    assert [table.of("trip-42") for _ in range(5)] == ["bob"] * 5
    assert table.num_reads == 1
    table.now += LOCATED_SECONDS
    table.owners["trip-42"] = "ada"
    assert table.of("trip-42") == "ada"
    assert table.num_reads == 2


def test_a_conversation_stays_where_it_was_while_the_history_service_is_away() -> None:
    table = Table()
    table.owners["trip-42"] = "bob"
    assert table.of("trip-42") == "bob"
    table.fails = True
    table.now += 60.0
    assert table.of("trip-42") == "bob"


def test_only_the_keys_of_a_replica_that_died_move() -> None:
    table = Table()
    before = {key: table.of(key) for key in (f"c-{index}" for index in range(90))}
    table.homes.forget("cleo")
    after = {key: table.of(key, ("ada", "bob")) for key in before}
    moved = {key for key in before if before[key] != after[key]}
    assert moved == {key for key in before if before[key] == "cleo"}
    assert len(moved) > 10


def test_a_replica_that_comes_takes_no_conversation_away() -> None:
    table = Table()
    before = {key: table.of(key, ("ada", "bob")) for key in (f"c-{index}" for index in range(90))}
    assert {key: table.of(key, NAMES) for key in before} == before
    new = [table.of(f"new-{index}", NAMES) for index in range(60)]
    assert new.count("cleo") > 10  # but the new ones


def test_what_begins_with_a_prefix_is_at_home_there_while_there_is_room() -> None:
    table = Table()
    at = [table.of(f"c-{index}{BEHIND}helpful") for index in range(30)]
    first = at[0]
    assert {first} < set(at) == set(NAMES)
    assert at.count(first) <= math.ceil(1.25 * 31 / 3)
    assert at.count(first) > 30 / 3  # more than the others: it is the fullest
    assert table.of("c-1") == at[1]  # without the prefix, which later requests do not name
    table.homes.check()


def test_routers_agree_on_the_home_of_a_prefix() -> None:
    new = {name: Table().of(f"new{BEHIND}{name}") for name in ("a", "b", "c", "d", "e", "f")}
    other = {name: Table().of(f"{BEHIND}{name}") for name in new}
    assert new == other  # also where the conversation's id is the replica's choice
    assert len(set(new.values())) > 1


def test_what_is_remembered_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes_module, "KEYS_MAX", 10)
    table = Table()
    for index in range(50):
        table.of(f"c-{index}")
    assert sum(table.homes.load(name) for name in NAMES) == 10


def test_a_replica_that_comes_gets_its_share_of_the_new_conversations_and_not_all() -> None:
    table = Table()
    for index in range(3000):
        table.of(f"c-{index}", ("ada", "bob"))
    table.now += ACTIVE_SECONDS + 1.0  # nobody goes on with these
    new = [table.of(f"new-{index}") for index in range(900)]
    assert max(new.count(name) for name in NAMES) <= math.ceil(1.1 * 900 / 3) + 1
    assert sum(table.homes.load(name) for name in NAMES) == 900
    assert table.of("c-7") in ("ada", "bob")  # it is still known where that was


def test_what_is_used_again_stays_active() -> None:
    table = Table()
    at = table.of("trip-42")
    table.of("c-1")
    table.now += ACTIVE_SECONDS - 1.0
    table.of("trip-42")
    table.now += 2.0
    assert sum(table.homes.load(name) for name in NAMES) == table.homes.load(str(at)) == 1
    table.homes.check()


def test_a_replica_that_dies_while_an_owner_is_located_is_no_home() -> None:
    homes, running = Homes(lambda: 0.0), {"ada", "bob"}

    async def scenario() -> list[str | None]:
        answered = asyncio.Event()

        async def locate(key: str) -> str:
            await answered.wait()
            return "ada"

        asked = [
            asyncio.create_task(homes.of(f"c-{index}", lambda: running, locate))
            for index in range(50)
        ]
        await asyncio.sleep(0)
        running.remove("ada")
        homes.forget("ada")
        answered.set()
        return await asyncio.gather(*asked)

    assert asyncio.run(scenario()) == ["bob"] * 50
    assert (homes.load("ada"), homes.load("bob")) == (0, 50)
    homes.check()


def test_without_replicas_there_is_no_home() -> None:
    assert Table().of("trip-42", ()) is None


def test_that_nobody_owns_a_key_is_not_asked_for_each_time() -> None:
    table = Table()
    homes = {table.of("trip-42") for _ in range(5)}
    assert (len(homes), table.num_reads) == (
        1,
        2,
    )  # the second may be the one behind its first turn
    table.now += LOCATED_SECONDS
    table.owners["trip-42"] = "ada"
    assert (table.of("trip-42"), table.num_reads) == ("ada", 3)


def test_a_key_of_any_length_takes_a_little_memory_and_has_a_home_of_its_own() -> None:
    table = Table()
    long = [f"{'x' * 1_000_000}{number}" for number in range(30)]
    homes = [table.of(key) for key in long]
    assert [table.of(key) for key in long] == homes
    assert len(set(homes)) > 1
    assert table.of(f"trip-42{BEHIND}{long[0]}")
    kept = [*table.homes._remembered, *table.homes._active, *table.homes._located]
    assert len(table.homes._remembered) == 31
    assert max(map(len, kept)) <= 128
