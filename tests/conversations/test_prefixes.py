"""Conversations with the same system prompt share its KV, with or without a prefix_id."""

from __future__ import annotations

from pathlib import Path

import pytest

from pensieve.v1 import admin_pb2
from pensieve.v1 import conversation_pb2 as pb
from tests.conversations.rig_daemon import DaemonRig, StreamedTurn

SHORT = pb.Sampling(max_tokens=8, ignore_eos=True)
RULES = "Answer in one short sentence, and never guess. " * 6


@pytest.fixture
def rig(tmp_path: Path) -> DaemonRig:
    return DaemonRig(tmp_path / "data")


def begin(rig: DaemonRig, name: str, text: str, prefix_id: str = "rules") -> StreamedTurn:
    rig.stub.CreateConversation(
        pb.CreateConversationRequest(conversation_id=name, system_prompt=RULES, prefix_id=prefix_id)
    )
    return rig.ask(name, text, sampling=SHORT)


def test_a_conversation_under_a_known_prefix_computes_only_its_own_tokens(rig: DaemonRig) -> None:
    with rig:
        first = begin(rig, "first", "Is it raining?").completed.usage
        assert (first.device_tokens, first.recomputed_tokens) == (0, 0)
        second = begin(rig, "second", "Is it cold?").completed.usage
        assert second.prompt_tokens == second.device_tokens + second.new_tokens
        assert second.device_tokens > 96  # whole chunks, and a part of the next
        unnamed = begin(rig, "unnamed", "Is it cold?", "").completed.usage
        assert unnamed.device_tokens >= second.device_tokens
        assert rig.admin.CheckIntegrity(admin_pb2.CheckIntegrityRequest()).problems == []


def test_sharing_a_prefix_does_not_change_replies(rig: DaemonRig) -> None:
    """Compare a conversation alone with the same conversation beside a conversation of the same prefix."""
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
        assert third.device_tokens >= 96


def test_an_evicted_prefix_is_computed_again(rig: DaemonRig) -> None:
    with rig:
        begin(rig, "first", "Is it raining?")
        rig.admin.EvictConversation(admin_pb2.EvictConversationRequest(conversation_id="first"))
        usage = begin(rig, "second", "Is it cold?").completed.usage
        assert (usage.device_tokens, usage.new_tokens) == (0, usage.prompt_tokens)
