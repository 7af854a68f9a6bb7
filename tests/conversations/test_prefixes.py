"""What conversations under one prefix share, and what they never share."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from pensieve.conversations.live_turn import LiveTurn
from pensieve.conversations.prefixes import TOKENS_MAX, SharedPrefix, SharedPrefixes, common
from pensieve.v1 import admin_pb2
from pensieve.v1 import conversation_pb2 as pb
from tests.conversations.rig_daemon import DaemonRig, Said

SHORT = pb.Sampling(max_tokens=8, ignore_eos=True)
RULES = "Answer in one short sentence, and never guess. " * 6


def tokens(*ids: int) -> array[int]:
    return array("I", ids)


@pytest.mark.parametrize(
    ("one", "other", "count"),
    [
        ((), (), 0),
        ((1, 2), (1, 2), 2),
        ((1, 2, 3), (1, 2, 4, 5), 2),
        ((2,), (1,), 0),
        ((1,), (), 0),
    ],
)
def test_what_is_common_ends_where_they_first_differ(
    one: tuple[int, ...], other: tuple[int, ...], count: int
) -> None:
    assert common(tokens(*one), tokens(*other)) == count
    assert common(tokens(*other), tokens(*one)) == count


def test_the_latest_conversation_of_a_prefix_is_shared_within_its_tenant() -> None:
    prefixes = SharedPrefixes()
    prefixes.remember("a", "p", "first", tokens(1, 2, 3, 4))
    prefixes.remember("a", "p", "second", tokens(1, 2, 9))
    assert prefixes.shared("a", "p", tokens(1, 2, 9, 9)) == SharedPrefix("second", 3)
    assert prefixes.shared("a", "p", tokens(1, 2, 3, 4)) == SharedPrefix("second", 2)
    assert prefixes.shared("a", "p", tokens(7, 2, 3, 4)) is None
    assert prefixes.shared("b", "p", tokens(1, 2, 9, 9)) is None
    assert prefixes.shared("a", "q", tokens(1, 2, 9, 9)) is None


def test_one_token_at_least_is_left_to_compute() -> None:
    prefixes = SharedPrefixes()
    prefixes.remember("", "p", "c", tokens(1, 2, 3))
    assert prefixes.shared("", "p", tokens(1, 2, 3)) == SharedPrefix("c", 2)
    assert prefixes.shared("", "p", tokens(1)) is None


def test_what_was_rewound_or_deleted_is_shared_no_more() -> None:
    prefixes = SharedPrefixes()
    prefixes.remember("a", "p", "c", tokens(1, 2, 3))
    prefixes.forget("b", "c")
    assert prefixes.shared("a", "p", tokens(1, 2, 3)) is not None
    prefixes.forget("a", "c")
    assert prefixes.shared("a", "p", tokens(1, 2, 3)) is None


def test_memory_is_bounded() -> None:
    prefixes = SharedPrefixes(prefixes_max=2)
    long = array("I", range(TOKENS_MAX + 10))
    for name in ("p", "q", "p", "r"):
        prefixes.remember("", name, "c", long)
    assert prefixes.shared("", "q", long) is None
    assert prefixes.shared("", "p", long) == SharedPrefix("c", TOKENS_MAX)


@pytest.fixture
def rig(tmp_path: Path) -> DaemonRig:
    return DaemonRig(tmp_path / "data")


def begin(rig: DaemonRig, name: str, text: str, prefix_id: str = "rules") -> Said:
    rig.stub.CreateConversation(
        pb.CreateConversationRequest(conversation_id=name, system_prompt=RULES, prefix_id=prefix_id)
    )
    return rig.ask(name, text, sampling=SHORT)


def test_a_conversation_under_a_known_prefix_computes_only_its_own_words(rig: DaemonRig) -> None:
    with rig:
        first = begin(rig, "first", "Is it raining?").completed.usage
        assert (first.device_tokens, first.recomputed_tokens) == (0, 0)
        second = begin(rig, "second", "Is it cold?").completed.usage
        assert second.prompt_tokens == second.device_tokens + second.new_tokens
        assert second.device_tokens > first.prompt_tokens - 20
        stranger = begin(rig, "stranger", "Is it cold?", "").completed.usage
        assert stranger.device_tokens == 0
        assert rig.admin.CheckIntegrity(admin_pb2.CheckIntegrityRequest()).problems == []


def test_sharing_changes_no_word(rig: DaemonRig) -> None:
    """Compare a conversation alone with the same conversation beside one that shares its prefix."""
    with rig:
        alone = begin(rig, "alone", "Is it cold?", "")
        begin(rig, "first", "Is it raining?")
        shared = begin(rig, "shared", "Is it cold?")
        assert shared.token_ids == alone.token_ids
        again = rig.ask("shared", "And now?", sampling=SHORT)
        assert again.token_ids == rig.ask("alone", "And now?", sampling=SHORT).token_ids


def test_the_prefix_outlives_the_conversation_that_computed_it(rig: DaemonRig) -> None:
    with rig:
        begin(rig, "first", "Is it raining?")
        begin(rig, "second", "Is it cold?")
        rig.stub.DeleteConversation(pb.DeleteConversationRequest(conversation_id="first"))
        third = begin(rig, "third", "Is it late?").completed.usage
        assert third.device_tokens > third.prompt_tokens - 20


def test_what_was_dropped_of_a_prefix_is_computed_again(rig: DaemonRig) -> None:
    with rig:
        begin(rig, "first", "Is it raining?")
        rig.admin.EvictConversation(admin_pb2.EvictConversationRequest(conversation_id="first"))
        usage = begin(rig, "second", "Is it cold?").completed.usage
        assert (usage.device_tokens, usage.new_tokens) == (0, usage.prompt_tokens)


def test_a_log_that_was_cut_while_a_turn_began_is_shared_no_more(rig: DaemonRig) -> None:
    """Another conversation may be rewound after the turn is stored, and before it is submitted."""

    async def rewind_first(live: LiveTurn) -> None:
        if live.conversation_id == "second":
            await rig.daemon.writable.rewind("first", 0)

    with rig:
        begin(rig, "first", "Is it raining?")
        rig.daemon.events.begun.subscribe(rewind_first)
        usage = begin(rig, "second", "Is it cold?").completed.usage
        assert (usage.device_tokens, usage.new_tokens) == (0, usage.prompt_tokens)
