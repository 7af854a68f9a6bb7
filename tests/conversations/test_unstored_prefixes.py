"""Which earlier turn a prompt continues, and which earlier turns are no longer needed."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

from pensieve.conversations.unstored import ChunkDigests, SharedChunks, UnstoredPrefixes


def chain(tokens: Sequence[int] | str, tenant: str = "", size: int = 2) -> list[bytes]:
    made = ChunkDigests(tenant, size)
    made.extend(array("I", [ord(each) if isinstance(each, str) else each for each in tokens]))
    return made.digests


def test_a_chain_made_in_pieces_is_the_chain_of_the_whole() -> None:
    whole = chain(range(100), size=7)
    assert len(whole) == 14
    rng = random.Random(1)
    made, at = ChunkDigests("", 7), 0
    while at < 100:
        step = rng.randint(0, 20)
        made.extend(array("I", range(at, min(at + step, 100))))
        at += step
    assert made.digests == whole


def test_a_digest_is_of_all_that_is_before_it() -> None:
    assert chain("aabb")[0] == chain("aacc")[0]
    assert chain("aabb")[1] != chain("ccbb")[1]
    assert not set(chain("aabb", "one")) & set(chain("aabb", "other"))


def test_the_longest_known_beginning_is_found() -> None:
    prefixes = UnstoredPrefixes(100)
    assert prefixes.register("x", chain("aabbcc")) == []
    assert prefixes.find(chain("aabbccdd")) == SharedChunks("x", 3, True)
    assert prefixes.find(chain("aabbdd")) == SharedChunks("x", 2, False)
    assert prefixes.find(chain("bbaa")) is None
    assert prefixes.find([]) is None


def test_one_that_holds_what_another_one_held_takes_its_place() -> None:
    prefixes = UnstoredPrefixes(100)
    prefixes.register("x", chain("aabb"))
    assert prefixes.register("y", chain("aabbcc")) == ["x"]
    assert "x" not in prefixes
    assert prefixes.find(chain("aabb")) == SharedChunks("y", 2, False)
    prefixes.check()


def test_one_that_holds_something_of_its_own_stays() -> None:
    prefixes = UnstoredPrefixes(100)
    prefixes.register("x", chain("aabbcc"))
    assert prefixes.register("y", chain("aabbdd")) == []
    assert prefixes.find(chain("aabbcc")) == SharedChunks("x", 3, True)
    assert prefixes.find(chain("aabb")) == SharedChunks("y", 2, False)
    prefixes.check()


def test_one_without_a_whole_chunk_holds_nothing() -> None:
    prefixes = UnstoredPrefixes(100)
    assert prefixes.register("x", chain("a")) == []
    assert "x" not in prefixes


def test_the_first_that_was_registered_goes_where_there_are_too_many() -> None:
    prefixes = UnstoredPrefixes(4)
    prefixes.register("x", chain("aabb"))
    prefixes.register("y", chain("ccdd"))
    prefixes.register("x", chain("aabb"))  # this counts as a use
    assert prefixes.register("z", chain("ee")) == ["y"]
    assert prefixes.find(chain("aabb")) == SharedChunks("x", 2, True)
    assert prefixes.register("w", chain("ffgghhiijj")) == ["x", "z", "w"]
    assert prefixes.find(chain("ff")) is None
    prefixes.check()


def test_random_growth_keeps_the_books_and_finds_nothing_false() -> None:
    rng = random.Random(3)
    prefixes = UnstoredPrefixes(60)
    logs: dict[str, list[int]] = {}
    for number in range(2000):
        base = rng.choice([*logs.values()]) if logs and rng.random() < 0.7 else []
        log = [*base[: rng.randint(0, len(base))], *rng.choices(range(3), k=rng.randint(0, 9))][:60]
        found = prefixes.find(chain(log))
        if found is not None:
            shared = found.num_chunks * 2
            assert logs[found.holder][:shared] == log[:shared]
            assert found.is_whole == (len(logs[found.holder]) // 2 == found.num_chunks)
        name = f"t{number}"
        logs[name] = log
        for gone in prefixes.register(name, chain(log)):
            del logs[gone]
        if len(log) < 2:
            del logs[name]
        assert set(logs) == set(prefixes._digests)
        prefixes.check()
