"""Turns of one tenant share the KV of equal tokens. Different tenants share nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pensieve.v1 import conversation_pb2 as pb
from tests.conversations.rig_daemon import DaemonRig
from tests.conversations.test_daemon import TOKENIZER
from tests.conversations.test_unstored import options, run
from tests.guard.test_tenants import TokensRig

RULES = "Answer in one short sentence, and never guess. " * 6
NUM_RULES = len(TOKENIZER.encode(RULES).ids)
SHORT = pb.Sampling(max_tokens=8, ignore_eos=True)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[DaemonRig]:
    with DaemonRig(tmp_path / "data") as rig:
        yield rig


def first_turn(stub: Any, name: str, text: str, **fields: Any) -> Any:
    """Run the first turn of a new conversation under RULES; return its usage."""
    request = pb.CreateConversationRequest(conversation_id=name, system_prompt=RULES)
    stub.CreateConversation(request)
    events = stub.SendMessage(
        pb.SendMessageRequest(
            conversation_id=name, messages=[pb.NewMessage(content=text)], sampling=SHORT, **fields
        )
    )
    return [*events][-1].completed.usage


def test_conversations_with_the_same_beginning_share_kv_without_a_declared_prefix(
    rig: DaemonRig,
) -> None:
    assert first_turn(rig.stub, "first", "Is it late?").shared_tokens == 0
    usage = first_turn(rig.stub, "second", "Where are you?")
    assert usage.shared_tokens >= NUM_RULES // 32 * 32
    assert usage.shared_from == "first"
    assert usage.recomputed_tokens == 0
    assert rig.call(rig.daemon.check()) == []


def test_a_fork_and_an_unstored_prompt_share_kv_of_the_same_history(
    rig: DaemonRig,
) -> None:
    first_turn(rig.stub, "first", "Is it late?")
    log = [token for each in rig.messages("first") for token in each.token_ids]
    live = run(rig, [*log, 5, 6], options(4))
    assert live.cached_tokens >= (len(log) - 1) // 32 * 32
    rig.stub.ForkConversation(
        pb.ForkConversationRequest(conversation_id="first", new_conversation_id="fork")
    )
    usage = rig.ask("fork", "And now?", sampling=SHORT).completed.usage
    assert usage.device_tokens == len(log) - 1


def test_only_turns_with_the_same_cache_salt_share_kv(rig: DaemonRig) -> None:
    first_turn(rig.stub, "first", "Is it late?", cache_salt="one")
    assert first_turn(rig.stub, "second", "Is it late?").shared_tokens == 0
    assert first_turn(rig.stub, "third", "Is it late?", cache_salt="other").shared_tokens == 0
    assert first_turn(rig.stub, "fourth", "Is it late?", cache_salt="one").shared_tokens > 0
    with pytest.raises(grpc.RpcError) as refused:
        first_turn(rig.stub, "fifth", "Is it late?", cache_salt="x" * 300)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_tenants_share_no_kv(tmp_path: Path) -> None:
    with TokensRig(tmp_path, {"a": {}, "b": {}}) as rig:

        def shared(tenant: str, name: str) -> int:
            with rig.client(tenant) as client:
                conversation = client.conversation(name)
                conversation.create(system_prompt=RULES)
                reply = conversation.ask("Is it late?", max_tokens=8, ignore_eos=True)
            return reply.usage.shared_tokens

        assert shared("a", "first") == 0
        assert shared("b", "first") == 0
        assert shared("b", "second") > 0
        assert rig.call(rig.daemon.check()) == []


def test_a_stateless_chat_computes_only_new_tokens(rig: DaemonRig) -> None:
    log = TOKENIZER.encode(RULES).ids
    for _ in range(6):
        live = run(rig, log, options(20))
        log = [*log, *live.reply.token_ids, 7, 8, 9]
        assert len(rig.call(rig.daemon.check())) == 0
    assert live.cached_tokens >= (len(log) - 24 - 23) // 32 * 32
    assert live.figures["recomputed_tokens"] == 0
