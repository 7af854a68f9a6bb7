"""Declared prefixes are stored, shared and deleted like conversations, but not listed with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pensieve.errors import AlreadyExists, InvalidArgument, NotFound
from pensieve.store import ConversationStore
from pensieve.store.records import NewConversation, NewMessage, NewPrefix
from pensieve.store.verify import verify
from tests.store.talk import create, reply, say, user
from tests.store.test_responses import raw

HEAD = (
    NewMessage("system", "Be kind.", [1, 2, 3]),
    NewMessage("user", "So?", [4]),
    NewMessage("assistant", "Yes.", [5, 6]),
)


def declare(store: ConversationStore, prefix_id: str = "rules", **fields: Any) -> None:
    fields.setdefault("messages", HEAD)
    store.prefixes.declare(NewPrefix(prefix_id, "f", **fields))


def begin(store: ConversationStore, name: str, prefix_id: str = "rules", tenant: str = "") -> None:
    store.prefixes.begin(NewConversation(name, "", prefix_id=prefix_id, tenant=tenant))


def test_a_conversation_under_a_prefix_begins_with_its_messages_tools_and_options(
    store: ConversationStore,
) -> None:
    declare(store, tools=({"name": "cup"},), template_options={"loud": True}, began_at=7.5)
    begin(store, "tea")
    made = store.get_conversation("tea")
    assert (made.revision, made.num_messages, made.num_tokens) == (0, 3, 6)
    assert (made.tools, made.template_options) == (({"name": "cup"},), {"loud": True})
    assert (made.prefix_id, made.template_time, made.fingerprint) == ("rules", 7.5, "f")
    assert list(store.log("tea")) == [1, 2, 3, 4, 5, 6]
    assert [each.content for each in store.messages("tea")] == ["Be kind.", "So?", "Yes."]
    assert store.verify() == []


def test_the_text_of_a_prefix_is_stored_once(store: ConversationStore) -> None:
    declare(store, messages=[NewMessage("system", "x" * 100_000, range(1000))])
    before = store.stored_bytes()
    for number in range(10):
        begin(store, f"c{number}")
    assert store.stored_bytes() - before < 10_000
    found = store.prefixes.find("rules")
    assert found is not None
    assert found.num_conversations == 10


def test_prefixes_are_counted_and_listed_separately_from_conversations(
    store: ConversationStore,
) -> None:
    create(store, "tea")
    declare(store)
    declare(store, "other")
    begin(store, "cup")
    assert store.num_conversations() == 2
    assert [each.conversation_id for each in store.list_conversations().conversations] == [
        "cup",
        "tea",
    ]
    page = store.list_conversations(1)
    assert [each.conversation_id for each in page.conversations] == ["cup"]
    next_page = store.list_conversations(1, page.next_page_token)
    assert (
        [each.conversation_id for each in next_page.conversations],
        next_page.next_page_token,
    ) == (
        ["tea"],
        "",
    )
    assert store.prefixes.num_of("") == 2
    reader = store.reader()
    assert reader.num_conversations() == 2
    assert [each.prefix_id for each in reader.prefixes().prefixes] == ["rules", "other"]
    first = reader.prefixes(1)
    assert [each.prefix_id for each in first.prefixes] == ["rules"]
    second = reader.prefixes(1, first.next_page_token)
    assert [each.prefix_id for each in second.prefixes] == ["other"]
    assert second.next_page_token == ""
    with pytest.raises(InvalidArgument, match="page_token"):
        reader.prefixes(1, "x")
    found, messages = reader.prefix("rules")
    assert (found.keep_warm, found.num_conversations, found.conversation.num_tokens) == (
        False,
        1,
        6,
    )
    assert [each.content for each in messages] == ["Be kind.", "So?", "Yes."]
    with pytest.raises(NotFound, match="there is no prefix 'none'"):
        reader.prefix("none")
    reader.close()


def test_a_prefix_is_visible_only_to_its_tenant(store: ConversationStore) -> None:
    declare(store, tenant="a")
    declare(store, tenant="b", messages=HEAD[:1], keep_warm=True)
    begin(store, "tea", tenant="b")
    assert list(store.log("tea", tenant="b")) == [1, 2, 3]
    assert store.prefixes.find("rules") is None
    with pytest.raises(NotFound):
        begin(store, "tea")
    assert [store.prefixes.num_of(tenant) for tenant in ("", "a", "b")] == [0, 1, 1]
    assert store.prefixes.to_keep_warm() == [("b", "rules")]
    reader = store.reader()
    assert [each.conversation.tenant for each in reader.all_prefixes()] == ["a", "b"]
    assert reader.num_prefixes() == {"a": 1, "b": 1}
    reader.close()


def test_a_conversation_outlives_the_prefix_it_was_created_with(store: ConversationStore) -> None:
    declare(store)
    begin(store, "tea")
    say(store, "tea", "r1", user("hi", 7), reply("hello", 8))
    store.delete_conversation("prefix:rules")
    assert store.prefixes.find("rules") is None
    assert list(store.log("tea")) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert store.verify() == []
    store.delete_conversation("tea")
    assert store.verify() == []
    assert store.stored_bytes() == 0
    assert b"Be kind" not in raw(store)


def test_a_rewind_keeps_the_messages_of_the_prefix(store: ConversationStore) -> None:
    declare(store)
    begin(store, "tea")
    conversation = store.get_conversation("tea")
    assert not store.prefixes.has_turns(conversation)
    say(store, "tea", "r1", user("hi", 7), reply("hello", 8))
    assert store.prefixes.has_turns(conversation)
    store.rewind_conversation("tea", 0)
    assert not store.prefixes.has_turns(conversation)
    assert list(store.log("tea")) == [1, 2, 3, 4, 5, 6]


def test_a_prefix_id_must_be_valid_and_is_declared_only_once(store: ConversationStore) -> None:
    declare(store)
    with pytest.raises(AlreadyExists, match="prefix 'rules' already exists"):
        declare(store, messages=HEAD[:1])
    with pytest.raises(InvalidArgument, match="prefix_id"):
        declare(store, "prefix:rules")
    begin(store, "tea")
    with pytest.raises(AlreadyExists, match="conversation 'tea' already exists"):
        begin(store, "tea")
    with pytest.raises(InvalidArgument, match="conversation_id"):
        begin(store, "prefix:tea")


def test_the_id_of_a_deleted_prefix_is_only_a_hint_again(store: ConversationStore) -> None:
    """After its deletion, a prefix no longer decides how later conversations with its id begin."""
    declare(store)
    begin(store, "tea")
    store.delete_conversation("prefix:rules")
    head = [NewMessage("system", "Be loud.")]
    store.create_conversation(NewConversation("cup", "f", head, prefix_id="rules"))
    store.create_conversation(NewConversation("pot", "f", head, prefix_id="rules"))
    assert [each.content for each in store.messages("pot")] == ["Be loud."]


def test_prefixes_survive_a_restart(open_store: Callable[..., ConversationStore]) -> None:
    with open_store() as store:
        declare(store, keep_warm=True)
        begin(store, "tea")
    with open_store() as store:
        found = store.prefixes.find("rules")
        assert found is not None
        assert (found.keep_warm, found.num_conversations) == (True, 1)


@pytest.mark.sqlite  # reads SQLite's files
def test_verify_reports_a_prefix_without_its_conversation(
    store: ConversationStore, driver: Any
) -> None:
    declare(store)
    path = store.folder.database_path
    store.close()
    conn = driver.connect(str(path))
    conn.execute("UPDATE prefixes SET conversation = 99")
    conn.commit()
    conn.close()
    assert verify(path, driver, None, "") == [
        "prefix number 99: its conversation does not exist or belongs to another tenant"
    ]
