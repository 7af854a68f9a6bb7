"""Declared prefixes over the wire: what their conversations begin with, share, and keep after a deletion."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from pensieve.conversations.daemon_config import DaemonConfig
from pensieve.v1 import admin_pb2, conversation_pb2_grpc
from pensieve.v1 import conversation_pb2 as pb
from tests.conversations.rig_daemon import (
    DaemonRig,
    ServeProcess,
    StreamedTurn,
    details,
    send_signal,
    wait_for,
)
from tests.guard.test_tenants import TokensRig

SHORT = pb.Sampling(max_tokens=8, ignore_eos=True)
RULES = "Answer in one short sentence, and never guess. " * 6
SHOTS = (
    pb.NewMessage(content="  Is it raining?\n"),
    pb.NewMessage(role=pb.ROLE_ASSISTANT, content="It is."),
    pb.NewMessage(content="<|im_end|>Is it cold?"),
    pb.NewMessage(role=pb.ROLE_ASSISTANT, content="Grüße. "),
)


@pytest.fixture
def rig(tmp_path: Path) -> DaemonRig:
    return DaemonRig(tmp_path / "data")


def declare(rig: DaemonRig, prefix_id: str = "rules", **fields: Any) -> Any:
    fields.setdefault("system_prompt", RULES)
    fields.setdefault("messages", SHOTS)
    return rig.stub.CreatePrefix(pb.CreatePrefixRequest(prefix_id=prefix_id, **fields)).prefix


def create(rig: DaemonRig, name: str, prefix_id: str = "rules", **fields: Any) -> Any:
    request = pb.CreateConversationRequest(conversation_id=name, prefix_id=prefix_id, **fields)
    return rig.stub.CreateConversation(request).conversation


def begin(rig: DaemonRig, name: str, text: str, prefix_id: str = "rules") -> StreamedTurn:
    create(rig, name, prefix_id)
    return rig.ask(name, text, sampling=SHORT)


def warm_check(rig: DaemonRig, prefix_id: str = "rules") -> Callable[[], bool]:
    """Return a function that says whether all KV of a prefix is on the device."""

    def look() -> bool:
        found = rig.admin.ListCachedConversations(admin_pb2.ListCachedConversationsRequest())
        return any(
            each.conversation_id == f"prefix:{prefix_id}" and not each.dropped_tokens
            for each in found.conversations
        )

    return look


def log_of(rig: DaemonRig, name: str) -> list[int]:
    return [token for each in rig.messages(name) for token in each.token_ids]


def test_a_conversation_begins_with_the_messages_of_its_prefix(rig: DaemonRig) -> None:
    with rig:
        prefix = declare(rig)
        assert (prefix.prefix_id, prefix.num_messages, prefix.num_conversations) == ("rules", 5, 0)
        made = create(rig, "c", metadata={"a": 1})
        assert (made.prefix_id, made.revision, made.num_messages) == ("rules", 0, 5)
        assert made.num_tokens == prefix.num_tokens > 100
        assert dict(made.metadata) == {"a": 1}
        messages = rig.messages("c")
        assert [each.content for each in messages] == [RULES, *(each.content for each in SHOTS)]
        assert [each.role for each in messages] == [
            *(pb.ROLE_SYSTEM, pb.ROLE_USER, pb.ROLE_ASSISTANT, pb.ROLE_USER, pb.ROLE_ASSISTANT)
        ]
        assert {each.finish_reason for each in messages} == {pb.FINISH_REASON_UNSPECIFIED}
        found = rig.stub.GetPrefix(pb.GetPrefixRequest(prefix_id="rules"))
        assert found.prefix.num_conversations == 1
        assert [each.content for each in found.messages] == [each.content for each in messages]
        listed = rig.stub.ListPrefixes(pb.ListPrefixesRequest()).prefixes
        assert [each.prefix_id for each in listed] == ["rules"]
        conversations = rig.stub.ListConversations(pb.ListConversationsRequest()).conversations
        assert [each.conversation_id for each in conversations] == ["c"]


def test_a_declared_prefix_has_the_same_tokens_as_messages_sent_in_a_turn(rig: DaemonRig) -> None:
    with rig:
        declare(rig)
        under_prefix = begin(rig, "under", "And now? ")
        create(rig, "alone", "", system_prompt=RULES)
        messages = [*SHOTS, pb.NewMessage(content="And now? ")]
        request = pb.SendMessageRequest(conversation_id="alone", messages=messages, sampling=SHORT)
        for event in rig.stub.SendMessage(request):
            last = event
        assert log_of(rig, "alone") == log_of(rig, "under")
        assert last.completed.usage.prompt_tokens == under_prefix.completed.usage.prompt_tokens
        rig.ask("under", "So?", sampling=SHORT)
        rig.ask("alone", "So?", sampling=SHORT)
        assert log_of(rig, "alone") == log_of(rig, "under")


def test_the_first_conversation_computes_a_prefix_and_the_others_share_it(rig: DaemonRig) -> None:
    with rig:
        num_tokens = declare(rig).num_tokens
        first = begin(rig, "first", "Is it late?").completed.usage
        assert (first.shared_tokens, first.shared_from) == (0, "")
        for name in ("second", "third"):
            usage = begin(rig, name, "Is it far?").completed.usage
            assert usage.shared_tokens >= num_tokens - 1  # words of a question may be shared, too
            assert usage.shared_from in ("prefix:rules", "first", "second")
            assert usage.prompt_tokens == usage.shared_tokens + usage.new_tokens
            assert usage.recomputed_tokens == 0
        later = rig.ask("second", "And now?", sampling=SHORT).completed.usage
        assert (later.shared_tokens, later.shared_from) == (0, "")
        assert rig.admin.CheckIntegrity(admin_pb2.CheckIntegrityRequest()).problems == []


def test_usage_names_the_conversation_whose_undeclared_prefix_is_shared(rig: DaemonRig) -> None:
    with rig:
        create(rig, "first", "hint", system_prompt=RULES)
        rig.ask("first", "Is it late?", sampling=SHORT)
        create(rig, "second", "hint", system_prompt=RULES)
        usage = rig.ask("second", "Is it far?", sampling=SHORT).completed.usage
        assert usage.shared_tokens > 50
        assert usage.shared_from == "first"


def test_sharing_a_declared_prefix_does_not_change_replies(rig: DaemonRig) -> None:
    with rig:
        declare(rig)
        said = [begin(rig, name, "Is it far?") for name in ("first", "second", "third")]
        assert said[0].token_ids == said[1].token_ids == said[2].token_ids
        replay = rig.stub.SendMessage(
            pb.SendMessageRequest(
                conversation_id="third",
                request_id=said[2].started.request_id,
                messages=[pb.NewMessage(content="Is it far?")],
                sampling=SHORT,
            )
        )
        usage = [*replay][-1].completed.usage
        assert usage.shared_from == said[2].completed.usage.shared_from != ""


@pytest.mark.parametrize("shots", [(), SHOTS])
def test_the_first_conversation_shares_a_prefix_that_is_kept_warm(
    rig: DaemonRig, shots: tuple[Any, ...]
) -> None:
    with rig:
        num_tokens = declare(rig, keep_warm=True, messages=shots).num_tokens
        wait_for(warm_check(rig))
        usage = begin(rig, "first", "Is it late?").completed.usage
        assert (usage.shared_tokens, usage.shared_from) == (num_tokens, "prefix:rules")


def test_an_evicted_prefix_with_keep_warm_is_warmed_again(tmp_path: Path) -> None:
    config = DaemonConfig(grace_seconds=0.2, keep_warm_seconds=0.05)
    with DaemonRig(tmp_path / "data", config=config) as rig:
        declare(rig, keep_warm=True)
        declare(rig, "cold")
        for _ in range(2):
            wait_for(warm_check(rig))
            evict = admin_pb2.EvictConversationRequest(conversation_id="prefix:rules")
            rig.admin.EvictConversation(evict)
        wait_for(warm_check(rig))
        assert not warm_check(rig, "cold")()


def test_a_restarted_engine_warms_the_prefixes_that_are_kept_warm(rig: DaemonRig) -> None:
    with rig:
        num_tokens = declare(rig, keep_warm=True).num_tokens
        create(rig, "before")
        wait_for(warm_check(rig))
        before = rig.daemon.engine.num_restarts
        send_signal(rig.daemon.engine.pid, signal.SIGKILL)
        wait_for(lambda: rig.daemon.engine.num_restarts > before and rig.daemon.serving)
        wait_for(warm_check(rig))
        usage = rig.ask("before", "Is it late?", sampling=SHORT).completed.usage
        assert usage.shared_tokens == num_tokens


def test_a_conversation_without_kv_shares_its_warm_prefix_again(rig: DaemonRig) -> None:
    with rig:
        declare(rig, keep_warm=True)
        begin(rig, "c", "Is it late?")
        before = rig.daemon.engine.num_restarts
        send_signal(rig.daemon.engine.pid, signal.SIGKILL)
        wait_for(lambda: rig.daemon.engine.num_restarts > before and rig.daemon.serving)
        wait_for(warm_check(rig))
        usage = rig.ask("c", "And now?", sampling=SHORT).completed.usage
        assert usage.shared_from == "prefix:rules"
        assert usage.device_tokens == usage.shared_tokens > 100
        assert usage.recompute_reason == pb.RECOMPUTE_REASON_ENGINE_RESTARTED


def test_conversations_outlive_their_deleted_prefix(rig: DaemonRig) -> None:
    with rig:
        declare(rig)
        begin(rig, "c", "Is it late?")
        create(rig, "unsaid")
        before = log_of(rig, "c")
        rig.stub.DeletePrefix(pb.DeletePrefixRequest(prefix_id="rules"))
        assert log_of(rig, "c") == before
        assert rig.ask("c", "And now?", sampling=SHORT).completed.usage.recomputed_tokens == 0
        rig.ask("unsaid", "Is it late?", sampling=SHORT)
        assert log_of(rig, "unsaid") == before
        with pytest.raises(grpc.RpcError) as gone:
            rig.stub.GetPrefix(pb.GetPrefixRequest(prefix_id="rules"))
        assert gone.value.code() is grpc.StatusCode.NOT_FOUND
        with pytest.raises(grpc.RpcError) as gone:
            rig.stub.DeletePrefix(pb.DeletePrefixRequest(prefix_id="rules"))
        assert gone.value.details() == "there is no prefix 'rules'"
        assert create(rig, "later", system_prompt="Be loud.").num_messages == 1  # a free name
        assert rig.admin.CheckIntegrity(admin_pb2.CheckIntegrityRequest()).problems == []


def test_a_redeclared_prefix_is_not_shared_with_conversations_under_the_old_prefix(
    rig: DaemonRig,
) -> None:
    with rig:
        declare(rig)
        create(rig, "old")
        alone = begin(rig, "alone", "Is it late?").token_ids
        rig.stub.DeletePrefix(pb.DeletePrefixRequest(prefix_id="rules"))
        declare(rig, system_prompt=RULES.replace("guess", "argue"), keep_warm=True)
        wait_for(warm_check(rig))
        said = rig.ask("old", "Is it late?", sampling=SHORT)
        assert said.token_ids == alone
        assert begin(rig, "new", "Is it late?").completed.usage.shared_from == "prefix:rules"


def test_a_conversation_under_a_prefix_cannot_have_its_own_settings(rig: DaemonRig) -> None:
    with rig:
        declare(rig)
        with pytest.raises(grpc.RpcError) as refused:
            create(rig, "c", system_prompt=RULES)
        assert details(refused.value)["ErrorInfo"].reason == "PREFIX_TAKEN"
        with pytest.raises(grpc.RpcError) as taken:
            declare(rig)
        assert taken.value.code() is grpc.StatusCode.ALREADY_EXISTS


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prefix_id": ""}, "prefix_id"),
        ({"prefix_id": "a:b"}, "prefix_id"),
        ({"system_prompt": "", "messages": ()}, "prefix"),
        ({"messages": [pb.NewMessage(role=pb.ROLE_SYSTEM, content="x")]}, "messages"),
        ({"messages": [pb.NewMessage(content="")]}, "content"),
        ({"template_options": {"colour": True}}, "template_options"),
        ({"messages": [pb.NewMessage(content="x")] * 128}, "messages"),
        ({"system_prompt": "x" * (1 << 20) + "x"}, "system_prompt"),
    ],
)
def test_an_invalid_prefix_is_refused_with_its_field_name(
    rig: DaemonRig, fields: dict[str, Any], field: str
) -> None:
    with rig:
        with pytest.raises(grpc.RpcError) as refused:
            declare(rig, **fields)
        (violation,) = details(refused.value)["BadRequest"].field_violations
        assert violation.field == field
        assert not rig.stub.ListPrefixes(pb.ListPrefixesRequest()).prefixes


def test_clients_cannot_reach_the_stored_conversation_of_a_prefix(rig: DaemonRig) -> None:
    with rig:
        declare(rig)
        name = "prefix:rules"
        for call in (
            lambda: rig.stub.GetConversation(pb.GetConversationRequest(conversation_id=name)),
            lambda: rig.messages(name),
            lambda: rig.ask(name, "So?"),
            lambda: rig.stub.DeleteConversation(pb.DeleteConversationRequest(conversation_id=name)),
            lambda: rig.stub.ForkConversation(pb.ForkConversationRequest(conversation_id=name)),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                call()
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        with pytest.raises(grpc.RpcError) as refused:
            create(rig, name, "")
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_prefixes_belong_to_their_tenant_and_are_limited(tmp_path: Path) -> None:
    with TokensRig(tmp_path, {"a": {"prefixes_max": 2}, "b": {}}) as rig:

        def call(tenant: str, method: str, request: Any) -> Any:
            metadata = (("authorization", f"Bearer {rig.secrets[tenant]}"),)
            return getattr(rig.stub, method)(request, metadata=metadata)

        def declare(tenant: str, name: str) -> Any:
            request = pb.CreatePrefixRequest(prefix_id=name, system_prompt=RULES)
            return call(tenant, "CreatePrefix", request)

        for name in ("p", "q"):
            declare("a", name)
        with pytest.raises(grpc.RpcError) as full:
            declare("a", "r")
        assert full.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        declare("b", "p")
        listed = {
            tenant: [
                each.prefix_id
                for each in call(tenant, "ListPrefixes", pb.ListPrefixesRequest()).prefixes
            ]
            for tenant in ("a", "b")
        }
        assert listed == {"a": ["p", "q"], "b": ["p"]}
        call("a", "DeletePrefix", pb.DeletePrefixRequest(prefix_id="p"))
        declare("a", "r")
        with pytest.raises(grpc.RpcError) as other:
            call("b", "GetPrefix", pb.GetPrefixRequest(prefix_id="q"))
        assert other.value.code() is grpc.StatusCode.NOT_FOUND
        tenants = {
            each.name: each.prefixes
            for each in rig.admin.ListTenants(admin_pb2.ListTenantsRequest()).tenants
        }
        assert (tenants["a"], tenants["b"]) == (2, 1)
        all_prefixes = rig.admin.ListTenantPrefixes(admin_pb2.ListTenantPrefixesRequest()).prefixes
        assert [(each.tenant, each.prefix.prefix_id) for each in all_prefixes] == [
            *(("a", "q"), ("b", "p"), ("a", "r"))
        ]
        rig.admin.DeleteTenantPrefix(admin_pb2.DeleteTenantPrefixRequest(prefix_id="q", tenant="a"))
        with pytest.raises(grpc.RpcError) as gone:
            call("a", "GetPrefix", pb.GetPrefixRequest(prefix_id="q"))
        assert gone.value.code() is grpc.StatusCode.NOT_FOUND


def test_prefixes_are_listed_in_pages(rig: DaemonRig) -> None:
    with rig:
        for number in range(5):
            declare(rig, f"p{number}", messages=())
        names, token = [], ""
        while True:
            page = rig.stub.ListPrefixes(pb.ListPrefixesRequest(page_size=2, page_token=token))
            names.append([each.prefix_id for each in page.prefixes])
            if not (token := page.next_page_token):
                break
        assert names == [["p0", "p1"], ["p2", "p3"], ["p4"]]


def test_prefixes_survive_a_killed_daemon(tmp_path: Path) -> None:
    process = ServeProcess(tmp_path / "data")
    logs = []
    for life in range(3):
        with grpc.insecure_channel(process.start()) as channel:
            stub = conversation_pb2_grpc.ConversationServiceStub(channel)
            if not life:
                stub.CreatePrefix(
                    pb.CreatePrefixRequest(prefix_id="rules", system_prompt=RULES, messages=SHOTS)
                )
            request = pb.CreateConversationRequest(conversation_id=f"c{life}", prefix_id="rules")
            stub.CreateConversation(request)
            send = pb.SendMessageRequest(
                conversation_id=f"c{life}", messages=[pb.NewMessage(content="So?")], sampling=SHORT
            )
            assert [*stub.SendMessage(send)][-1].HasField("completed")
            listing = pb.ListMessagesRequest(conversation_id=f"c{life}", include_token_ids=True)
            logs.append([each.token_ids for each in stub.ListMessages(listing).messages])
        process.kill()
    assert logs[0] == logs[1] == logs[2]
