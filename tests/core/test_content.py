"""Conversations of one tenant share chunks by content; tenants share none, and wrong KV is never found."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pensieve.core import identities as identities_module
from pensieve.core.cache import KVCache
from pensieve.core.identities import Identities
from pensieve.core.iteration_builder import IterationBuilder
from pensieve.core.prefix_tree import Chunk
from pensieve.core.turn import FinishReason, Turn
from tests.core.world import REPEATING, ScriptedWorld, run

TEXT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]  # two and a half chunks


def identities(tokens: list[int], root: str = "", size: int = 2) -> list[bytes]:
    made = Identities(root, size)
    made.extend(array("I", tokens))
    return made.known


def ask(
    world: ScriptedWorld, name: str, text: list[int], num_reply: int = 1, root: str = "r"
) -> Turn:
    turn = world.ask(name, 0, num_reply, prompt=text)
    conversation = world.cache.conversations.get(name)
    known = conversation.identities if conversation is not None else None
    before = turn.history_tokens
    turn.identities = known.beginning(before) if known is not None else Identities(root, 4)
    return turn


def say(
    world: ScriptedWorld, name: str, text: list[int], num_reply: int = 1, root: str = "r"
) -> Turn:
    turn = ask(world, name, text, num_reply, root)
    world.until_ended(turn)
    world.scheduler.check(world.now)
    return turn


def test_identities_do_not_depend_on_how_the_log_grew() -> None:
    whole = identities(list(range(100)), size=7)
    assert len(whole) == 14
    draw, at, made = random.Random(1), 0, Identities("", 7)
    while at < 100:
        at = min(at + draw.randint(0, 20), 100)
        made.extend(array("I", range(at)))
    assert made.known == whole
    made.cut(50)
    assert made.known == whole[:7] == made.beginning(99).known


def test_an_identity_depends_on_the_root_and_all_earlier_tokens() -> None:
    assert identities([1, 1, 2, 2])[0] == identities([1, 1, 3, 3])[0]
    assert identities([1, 1, 2, 2])[1] != identities([3, 3, 2, 2])[1]
    assert not set(identities([1, 1, 2, 2], "one")) & set(identities([1, 1, 2, 2], "other"))


def test_a_prompt_with_a_cached_prefix_computes_only_the_rest() -> None:
    world = ScriptedWorld(20, 0)
    say(world, "a", [*TEXT, 1])
    usage = say(world, "b", [*TEXT, 2]).usage
    assert (usage.device_tokens, usage.shared_tokens, usage.new_tokens) == (10, 10, 1)

    stranger = say(world, "c", [*TEXT, 3], root="another tenant").usage
    assert (stranger.device_tokens, stranger.shared_tokens) == (0, 0)


def test_a_copied_page_is_not_copied_again_in_the_same_iteration() -> None:
    """The third chunks of a, b and c begin with the same tokens, so one copy could be made of another copy.

    A device makes the copies of an iteration in any order. So a copy must not be the source of another copy.
    """
    world = ScriptedWorld(20, 0)
    say(world, "a", [*TEXT, 1])
    ask(world, "b", [*TEXT, 2, 3], num_reply=3)
    ask(world, "c", [*TEXT, 2, 4], num_reply=3)
    assert len(world.next().copies) == 1
    world.run_until_idle()
    ask(world, "d", [*TEXT, 2, 5])
    assert len(world.next().copies) == 1


def test_a_hole_with_new_content_is_not_found_by_its_old_content() -> None:
    world = ScriptedWorld(12, 0, batch_tokens_max=4)
    old = list(range(5, 27))
    say(world, "a", old)
    world.wait(100.0)
    say(world, "other", [100 + number for number in range(35)], root="other")  # takes pages of "a"
    turn = ask(world, "a", [30, 31, 32, 33, 34])
    world.next()
    world.next()
    world.cancel_at(turn, turn.history_tokens)  # two of the lost chunks are computed
    world.run_until_idle()
    assert world.where("a") == "dd-ddd"
    world.rewind("a", 10)
    say(world, "a", [50, 51, 52, 53])
    say(world, "b", old[:18])  # the fake executor checks what the turn attends to
    world.scheduler.check(world.now)


def test_at_least_one_token_is_computed() -> None:
    world = ScriptedWorld(20, 0)
    say(world, "a", TEXT[:8])
    usage = say(world, "b", TEXT[:8]).usage
    assert (usage.device_tokens, usage.new_tokens) == (7, 1)


def test_a_client_that_sends_the_history_reuses_the_kv_of_the_reply() -> None:
    world = ScriptedWorld(20, 0)
    first = say(world, "a", TEXT, 9)
    usage = say(world, "b", [*first.tokens, 1, 2]).usage
    assert usage.device_tokens == len(first.tokens) - 1


def test_a_message_resent_after_a_rewind_is_not_recomputed() -> None:
    world = ScriptedWorld(20, 0)
    first = say(world, "a", TEXT, 5)
    world.fork_at("a", len(first.tokens), "keeps")
    world.rewind("a", 0)
    usage = say(world, "a", [*first.tokens, 1]).usage
    assert usage.device_tokens == len(first.tokens) - 1


def test_equal_chunks_of_two_turns_are_merged_when_the_turns_end() -> None:
    world = ScriptedWorld(20, 0)
    first, second = ask(world, "a", [*TEXT, 1, 2], 3), ask(world, "b", [*TEXT, 3, 4], 3)
    world.until_ended(first)
    world.until_ended(second)
    pages = 20 - world.cache.device.num_empty
    assert world.chunks("a")[0] is not world.chunks("b")[0]
    world.step()
    assert world.chunks("a")[:2] == world.chunks("b")[:2]
    assert world.chunks("a")[2] is not world.chunks("b")[2]
    assert 20 - world.cache.device.num_empty == pages - 2
    world.scheduler.check(world.now)
    assert say(world, "b", [9], 3).usage.recomputed_tokens == 0


def test_a_dropped_prefix_is_recomputed_once_for_all_its_holders() -> None:
    world = ScriptedWorld(8, 0)
    say(world, "a", [*TEXT, 1, 2], 3)
    world.wait(1000.0)
    say(world, "filler", [100 + n for n in range(18)], 4, root="other")
    assert world.where("a").startswith("-")
    usage = say(world, "b", [*TEXT, 1, 2, 3], 1).usage
    assert usage.recomputed_tokens > 0
    assert usage.shared_tokens == usage.device_tokens + usage.host_tokens
    assert say(world, "c", [*TEXT, 1, 2, 4], 1).usage.recomputed_tokens == 0


def test_chunks_of_a_failed_turn_are_not_found() -> None:
    world = ScriptedWorld(20, 0)
    say(world, "a", [*TEXT, 1])
    failing = ask(world, "b", [*TEXT, 2])
    world.executor.failing_turns.add(failing.attempt_id)
    world.until_ended(failing)
    assert len(world.cache.content) == 0
    usage = say(world, "c", [*TEXT, 3]).usage
    assert (usage.device_tokens, usage.new_tokens) == (0, 11)


def test_wrong_kv_that_made_a_turn_fail_is_not_reused() -> None:
    world = ScriptedWorld(30, 0)
    say(world, "a", [*TEXT, 1])
    say(world, "b", [*TEXT, 2])  # shares chunks with "a"
    page = world.chunks("a")[0].device_page
    assert page is not None
    world.executor.spoil(world.executor.device, page, 1)
    failing = say(world, "c", [*TEXT, 3])
    assert failing.finish is FinishReason.FAILED
    for name in ("d", "a", "b"):
        turn = say(world, name, [*TEXT, 4])
        assert turn.finish is FinishReason.LENGTH


def test_a_warm_does_not_register_chunks_that_another_turn_computes() -> None:
    world = ScriptedWorld(30, 0)
    say(world, "a", [*TEXT, 1])
    world.fork_at("a", 8, "b")
    page = world.chunks("a")[0].device_page
    assert page is not None
    world.executor.spoil(world.executor.device, page, 1)
    say(world, "c", [*TEXT, 3])  # fails, and the chunks of "a" and "b" lose their KV
    ask(world, "a", [4])
    known = world.cache.conversations["b"].identities
    assert known is not None
    warm = world.warm("b")
    warm.identities = known.beginning(8)
    iteration = world.scheduler.plan(world.now)
    assert iteration is not None
    assert warm.finish is FinishReason.WARMED  # all its chunks are written by the slice of "a"
    assert len(world.cache.content) == 0
    world.scheduler.check(world.now)


def test_only_the_newest_of_equal_temporary_conversations_stays() -> None:
    world = ScriptedWorld(30, 0)
    for number in range(5):
        turn = ask(world, f"t{number}", [*TEXT, 1, number], 2)
        turn.is_temporary = True
        world.until_ended(turn)
        world.wait(10.0)
        world.step()
    held = [name for name in world.cache.conversations if name.startswith("t")]
    assert len(held) == 5  # each ends with a chunk of its own
    for number in range(5, 10):
        turn = ask(world, f"t{number}", TEXT, 1)
        turn.is_temporary = True
        world.until_ended(turn)
        world.wait(10.0)
        world.step()
        world.scheduler.check(world.now)
    held = [name for name in world.cache.conversations if name.startswith("t")]
    assert held[5:] == ["t9"]
    assert world.cache.conversations["t9"].num_tokens == 8


SHAPES = (
    REPEATING,
    replace(REPEATING, overlap=True),
    replace(REPEATING, failing=0.0, spoiling=0.0, damaging=0.0, overlap=True),
    replace(REPEATING, staging_pages=12, overlap=True),
    replace(REPEATING, adopting=0.05, late=0.9),
    replace(REPEATING, policy="return", device_pages=16, host_pages=10),
)


@pytest.mark.parametrize("seed", range(400))
def test_replies_are_correct_with_random_repeated_content(seed: int) -> None:
    run(seed, SHAPES[seed % len(SHAPES)], checks_every=3)


def test_repeated_content_is_shared_and_merged() -> None:
    worlds = [run(seed, SHAPES[2]) for seed in range(30)]
    assert sum(each.cache.counters.merged for each in worlds) > 10


def omit_root(patch: pytest.MonkeyPatch) -> None:
    init = Identities.__init__
    patch.setattr(Identities, "__init__", lambda self, root, *rest: init(self, "", *rest))


def shorten_digests(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(identities_module, "IDENTITY_BYTES", 1)


def register_before_commit(patch: pytest.MonkeyPatch) -> None:
    complete = IterationBuilder._complete

    def early(self: IterationBuilder, turn: Turn, chunk: Chunk) -> None:
        complete(self, turn, chunk)
        turn.completed += [each[1:] for each in self.completed if each[0] is turn]
        caches[-1].register(turn)

    caches: list[KVCache] = []
    init = KVCache.__init__

    def remember(self: KVCache, *rest: Any) -> None:
        init(self, *rest)
        caches.append(self)

    patch.setattr(KVCache, "__init__", remember)
    patch.setattr(IterationBuilder, "_complete", early)


def register_invalidated(patch: pytest.MonkeyPatch) -> None:
    def register(self: KVCache, turn: Turn) -> None:
        for chunk, _ in turn.completed:
            if chunk.filled == self.config.chunk_tokens:
                self.content.register(turn, chunk)
        turn.completed.clear()

    patch.setattr(KVCache, "register", register)


PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "an identity leaves out the root": omit_root,
    "digests are so short that they collide": shorten_digests,
    "a chunk is found before its iteration was collected": register_before_commit,
    "a chunk that was invalidated is registered": register_invalidated,
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_noticed(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED[mistake](monkeypatch)
    assert any(fails(seed) for seed in range(1200)), f"1,200 seeds did not notice that {mistake}"


def fails(seed: int) -> bool:
    try:
        run(seed, SHAPES[seed % len(SHAPES)])
    except (AssertionError, IndexError):
        return True
    return False
