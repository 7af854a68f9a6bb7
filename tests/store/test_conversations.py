"""Conversations are created, listed, forked and rewound, and tokenized again for another fingerprint."""

from __future__ import annotations

import pytest

from pensieve.errors import (
    AlreadyExists,
    InvalidArgument,
    NotFound,
    PrefixTaken,
    StaleRevision,
    TurnRunning,
)
from pensieve.store import ConversationStore, NewConversation, NewMessage
from pensieve.store.records import PAGE_BYTES_MAX
from tests.store.faulty import writer_of
from tests.store.talk import begin, create, reply, say, user

SYSTEM = NewMessage("system", "Be brief.", (1, 2))


def two_turns(store: ConversationStore) -> None:
    """Create "tea" with two turns.

    Its five messages have the tokens 1 2 | 10 11 | 20 21 22 | 30 | 40 41, and the revisions 0, 1, 1, 2, 2.
    """
    create(store, "tea", SYSTEM)
    say(store, "tea", "r1", user("hi", 10, 11), reply("hello", 20, 21, 22))
    say(store, "tea", "r2", user("more", 30), reply("yes", 40, 41))


def test_a_new_conversation_holds_its_head_at_revision_0(store: ConversationStore) -> None:
    made = store.create_conversation(
        NewConversation(
            "tea",
            "fingerprint 1",
            [SYSTEM],
            tools=[{"name": "kettle"}],
            template_options={"enable_thinking": False},
            metadata={"topic": "tea"},
        )
    )
    assert made == store.get_conversation("tea")
    assert (made.conversation_id, made.tenant, made.revision) == ("tea", "", 0)
    assert (made.num_messages, made.num_tokens, made.fingerprint) == (1, 2, "fingerprint 1")
    assert made.tools == ({"name": "kettle"},)
    assert made.template_options == {"enable_thinking": False}
    assert made.metadata == {"topic": "tea"}
    assert (made.prefix_id, made.running_turn_id) == ("", None)
    assert (made.created_at, made.updated_at) == (made.created_at, made.created_at)
    assert list(store.log("tea")) == [1, 2]


def test_an_empty_conversation_has_an_empty_log(store: ConversationStore) -> None:
    create(store, "tea")
    assert list(store.log("tea")) == []
    assert store.messages("tea") == []
    assert store.get_conversation("tea").num_tokens == 0


def test_a_taken_id_is_refused(store: ConversationStore) -> None:
    create(store, "tea")
    with pytest.raises(AlreadyExists, match="'tea'"):
        create(store, "tea")


@pytest.mark.parametrize("name", ["", "a/b", "a b", "x" * 129, "ü", "a\n", "../etc"])
def test_an_id_outside_the_alphabet_is_refused(store: ConversationStore, name: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        create(store, name)
    assert refused.value.field == "conversation_id"


@pytest.mark.parametrize("name", ["nobody", "a\0b", "\ud800", "x" * 10_000])
def test_an_unknown_conversation_is_not_found(store: ConversationStore, name: str) -> None:
    for ask in (store.get_conversation, store.log, store.messages, store.delete_conversation):
        with pytest.raises(NotFound):
            ask(name)


def test_tenants_do_not_see_each_other(store: ConversationStore) -> None:
    store.create_conversation(NewConversation("tea", "f", [SYSTEM], tenant="a"))
    with pytest.raises(NotFound):
        store.get_conversation("tea", tenant="b")
    store.create_conversation(NewConversation("tea", "f", tenant="b"))
    assert store.get_conversation("tea", tenant="a").num_tokens == 2
    assert store.get_conversation("tea", tenant="b").num_tokens == 0
    assert [c.tenant for c in store.list_conversations(tenant="b").conversations] == ["b"]
    assert store.list_conversations().conversations == ()


def test_conversations_are_listed_newest_first_in_pages(store: ConversationStore) -> None:
    for name in "abcde":
        create(store, name)
    first = store.list_conversations(2)
    create(store, "f")
    second = store.list_conversations(2, first.next_page_token)
    third = store.list_conversations(2, second.next_page_token)
    names = [[c.conversation_id for c in page.conversations] for page in (first, second, third)]
    assert names == [["e", "d"], ["c", "b"], ["a"]]
    assert third.next_page_token == ""


def test_a_page_of_conversations_is_also_limited_in_bytes(store: ConversationStore) -> None:
    """A limit in bytes bounds the size of a response, and the memory for it."""
    for name in "abcde":
        large = {"note": "x" * (PAGE_BYTES_MAX // 2 - 1000)}
        store.create_conversation(NewConversation(name, "fingerprint 1", [], metadata=large))
    first = store.list_conversations(5)
    second = store.list_conversations(5, first.next_page_token)
    third = store.list_conversations(5, second.next_page_token)
    names = [[c.conversation_id for c in page.conversations] for page in (first, second, third)]
    assert names == [["e", "d"], ["c", "b"], ["a"]]
    assert third.next_page_token == ""


@pytest.mark.parametrize("token", ["x", "-1", "1e3", "９", "1" * 5000])
def test_an_invalid_page_token_is_refused(store: ConversationStore, token: str) -> None:
    with pytest.raises(InvalidArgument, match="page_token"):
        store.list_conversations(2, token)


@pytest.mark.parametrize("page_size", [0, -1, 1001])
def test_a_page_size_out_of_range_is_refused(store: ConversationStore, page_size: int) -> None:
    with pytest.raises(InvalidArgument, match="page_size"):
        store.list_conversations(page_size)


def test_messages_cover_the_log_without_gaps_and_have_their_revision(
    store: ConversationStore,
) -> None:
    two_turns(store)
    assert list(store.log("tea")) == [1, 2, 10, 11, 20, 21, 22, 30, 40, 41]
    messages = store.messages("tea", include_token_ids=True)
    assert [
        (m.index, m.role, m.content, m.revision, m.first_token_index, m.num_tokens, m.finish_reason)
        for m in messages
    ] == [
        (0, "system", "Be brief.", 0, 0, 2, None),
        (1, "user", "hi", 1, 2, 2, None),
        (2, "assistant", "hello", 1, 4, 3, "stop"),
        (3, "user", "more", 2, 7, 1, None),
        (4, "assistant", "yes", 2, 8, 2, "stop"),
    ]
    assert [list(m.token_ids or ()) for m in messages] == [
        [1, 2],
        [10, 11],
        [20, 21, 22],
        [30],
        [40, 41],
    ]


def test_messages_are_read_in_pages_without_token_ids_by_default(store: ConversationStore) -> None:
    two_turns(store)
    assert [(m.index, m.token_ids) for m in store.messages("tea", 1, 2)] == [(1, None), (2, None)]
    assert [m.index for m in store.messages("tea", 4, 2**63)] == [4]
    assert store.messages("tea", 5) == []
    for start, limit in ((-1, 1), (0, -1)):
        with pytest.raises(InvalidArgument):
            store.messages("tea", start, limit)


def test_every_token_id_and_character_is_stored_exactly(store: ConversationStore) -> None:
    text = "\0 \u202e ́" * 3 + "\U0001f375 <|im_end|> '; DROP TABLE turns"
    extra = {"tool_calls": [{"name": "f", "arguments": {"x": 1.5, "s": "\ud83d"}}]}
    message = NewMessage("tool", text, (0, 2**32 - 1, 7), "call-1", extra)
    store.create_conversation(NewConversation("tea", "f", [message]))
    (stored,) = store.messages("tea", include_token_ids=True)
    assert (stored.content, stored.tool_call_id, stored.extra) == (text, "call-1", extra)
    assert list(stored.token_ids or ()) == [0, 2**32 - 1, 7]


def test_text_with_a_lone_surrogate_is_refused(store: ConversationStore) -> None:
    with pytest.raises(InvalidArgument, match="surrogate"):
        create(store, "tea", user("\ud800"))
    assert store.list_conversations().conversations == ()


def test_a_fork_shares_messages_up_to_a_revision_and_then_diverges(
    store: ConversationStore,
) -> None:
    two_turns(store)
    fork = store.fork_conversation("tea", 1, "cup", metadata={"topic": "cups"})
    assert (fork.revision, fork.num_messages, fork.num_tokens) == (1, 3, 7)
    assert (fork.fingerprint, fork.metadata) == ("fingerprint 1", {"topic": "cups"})
    assert list(store.log("cup")) == [1, 2, 10, 11, 20, 21, 22]
    assert say(store, "cup", "r2", user("other", 31), reply("no", 50)) == 2
    assert list(store.log("cup")) == [1, 2, 10, 11, 20, 21, 22, 31, 50]
    assert list(store.log("tea")) == [1, 2, 10, 11, 20, 21, 22, 30, 40, 41]
    assert store.verify() == []


def test_a_fork_copies_no_text_and_no_token(store: ConversationStore) -> None:
    two_turns(store)
    with writer_of(store).reading() as conn:
        (before,) = conn.execute("SELECT count(*) FROM messages").fetchone()
    store.fork_conversation("tea", 2, "cup")
    with writer_of(store).reading() as conn:
        assert conn.execute("SELECT count(*) FROM messages").fetchone() == (before,)


def test_a_fork_at_revision_0_has_only_the_head(store: ConversationStore) -> None:
    two_turns(store)
    assert store.fork_conversation("tea", 0, "cup").num_tokens == 2
    assert list(store.log("cup")) == [1, 2]


def test_a_fork_needs_an_existing_revision_and_a_free_id(
    store: ConversationStore,
) -> None:
    two_turns(store)
    for revision in (3, -1, 2**62):
        with pytest.raises(NotFound, match=f"revision {revision}"):
            store.fork_conversation("tea", revision, "cup")
    with pytest.raises(AlreadyExists):
        store.fork_conversation("tea", 1, "tea")
    with pytest.raises(InvalidArgument):
        store.fork_conversation("tea", 1, "a/b")
    with pytest.raises(NotFound):
        store.fork_conversation("nobody", 0, "cup")


def test_a_rewind_removes_later_messages_and_increments_the_revision(
    store: ConversationStore,
) -> None:
    two_turns(store)
    assert store.rewind_conversation("tea", 1) == (3, 7)
    assert list(store.log("tea")) == [1, 2, 10, 11, 20, 21, 22]
    assert [m.revision for m in store.messages("tea")] == [0, 1, 1]
    assert say(store, "tea", "r3", user("again", 33), reply("ok", 60)) == 4
    assert [m.revision for m in store.messages("tea")] == [0, 1, 1, 4, 4]
    assert store.verify() == []


def test_a_rewind_with_a_stale_expected_revision_is_refused(store: ConversationStore) -> None:
    two_turns(store)
    with pytest.raises(StaleRevision) as stale:
        store.rewind_conversation("tea", 0, expected_revision=1)
    assert (stale.value.expected, stale.value.actual) == (1, 2)
    assert store.get_conversation("tea").revision == 2
    store.rewind_conversation("tea", 0, expected_revision=2)
    assert store.get_conversation("tea").revision == 3


def test_a_revision_that_a_rewind_removed_is_no_target_of_a_rewind_or_fork(
    store: ConversationStore,
) -> None:
    two_turns(store)
    store.rewind_conversation("tea", 1)
    for revision in (2, 4):
        with pytest.raises(NotFound):
            store.rewind_conversation("tea", revision)
        with pytest.raises(NotFound):
            store.fork_conversation("tea", revision, "cup")
    assert store.fork_conversation("tea", 3, "cup").num_tokens == 7  # a fork at the present end


def test_a_rewind_to_revision_0_keeps_the_head(store: ConversationStore) -> None:
    two_turns(store)
    assert store.rewind_conversation("tea", 0) == (3, 2)
    assert list(store.log("tea")) == [1, 2]


def test_a_fork_keeps_its_messages_if_its_source_is_rewound_or_deleted(
    store: ConversationStore,
) -> None:
    two_turns(store)
    store.fork_conversation("tea", 2, "cup")
    store.rewind_conversation("tea", 0)
    assert list(store.log("cup")) == [1, 2, 10, 11, 20, 21, 22, 30, 40, 41]
    store.delete_conversation("tea")
    assert list(store.log("cup")) == [1, 2, 10, 11, 20, 21, 22, 30, 40, 41]
    assert store.verify() == []


def test_a_fork_is_the_only_change_allowed_while_a_turn_runs(store: ConversationStore) -> None:
    two_turns(store)
    turn_id = begin(store, "tea", "r3", "wait", 50)
    assert store.get_conversation("tea").running_turn_id == turn_id
    assert store.fork_conversation("tea", 2, "cup").num_tokens == 10
    assert store.get_conversation("cup").running_turn_id is None
    for refused in (
        lambda: store.rewind_conversation("tea", 0),
        lambda: store.delete_conversation("tea"),
        lambda: store.replace_log("tea", "f2", [[]] * 5),
        lambda: begin(store, "tea", "r4", "me too", 60),
    ):
        with pytest.raises(TurnRunning) as running:
            refused()
        assert running.value.turn_id == str(turn_id)
    assert len(store.log("tea")) == 10


def test_a_replaced_log_keeps_text_and_revisions(store: ConversationStore) -> None:
    two_turns(store)
    replaced = store.replace_log("tea", "fingerprint 2", [[9], [8, 7], [], [6], [5, 4, 3]])
    assert (replaced.fingerprint, replaced.revision, replaced.num_tokens) == ("fingerprint 2", 2, 7)
    assert list(store.log("tea")) == [9, 8, 7, 6, 5, 4, 3]
    assert [
        (m.content, m.revision, m.first_token_index, m.finish_reason) for m in store.messages("tea")
    ] == [
        ("Be brief.", 0, 0, None),
        ("hi", 1, 1, None),
        ("hello", 1, 3, "stop"),
        ("more", 2, 3, None),
        ("yes", 2, 4, "stop"),
    ]
    assert store.verify() == []
    assert store.rewind_conversation("tea", 1) == (3, 3)


def test_a_fork_keeps_its_tokens_when_the_log_of_its_source_is_replaced(
    store: ConversationStore,
) -> None:
    two_turns(store)
    store.fork_conversation("tea", 1, "cup")
    store.replace_log("tea", "fingerprint 2", [[9], [8], [7], [6], [5]])
    assert list(store.log("cup")) == [1, 2, 10, 11, 20, 21, 22]
    assert store.get_conversation("cup").fingerprint == "fingerprint 1"
    store.replace_log("cup", "fingerprint 2", [[1], [2], [3]])
    assert list(store.log("cup")) == [1, 2, 3]
    assert store.verify() == []


def test_a_replaced_log_needs_tokens_for_every_message(store: ConversationStore) -> None:
    two_turns(store)
    with pytest.raises(InvalidArgument, match="4 sequences for 5 messages"):
        store.replace_log("tea", "fingerprint 2", [[1]] * 4)
    assert store.get_conversation("tea").fingerprint == "fingerprint 1"


def test_conversations_with_one_prefix_share_its_messages(store: ConversationStore) -> None:
    tools = [{"name": "kettle"}]
    for name in ("a", "b"):
        store.create_conversation(
            NewConversation(name, "f", [SYSTEM], tools=tools, prefix_id="bot")
        )
        assert list(store.log(name)) == [1, 2]
    with writer_of(store).reading() as conn:
        assert conn.execute("SELECT count(*) FROM messages").fetchone() == (1,)
    store.delete_conversation("a")
    assert list(store.log("b")) == [1, 2]
    assert store.verify() == []


def test_a_different_head_under_a_known_prefix_id_is_refused(store: ConversationStore) -> None:
    store.create_conversation(NewConversation("a", "f", [SYSTEM], prefix_id="bot"))
    loud = NewMessage("system", "Be loud.", (1, 2))
    for new in (
        NewConversation("b", "f", [loud], prefix_id="bot"),
        NewConversation("b", "f", [], prefix_id="bot"),
        NewConversation("b", "f", [SYSTEM], tools=[{"name": "cup"}], prefix_id="bot"),
    ):
        with pytest.raises(PrefixTaken) as refused:
            store.create_conversation(new)
        assert refused.value.grpc_status == "FAILED_PRECONDITION"
    store.create_conversation(NewConversation("b", "f", [loud], prefix_id="bot", tenant="x"))


def test_conversations_with_different_tokens_of_a_prefix_do_not_share_it(
    store: ConversationStore,
) -> None:
    store.create_conversation(NewConversation("a", "f1", [SYSTEM], prefix_id="bot"))
    again = NewMessage("system", "Be brief.", (3,))
    store.create_conversation(NewConversation("b", "f2", [again], prefix_id="bot"))
    assert (list(store.log("a")), list(store.log("b"))) == ([1, 2], [3])
    assert store.verify() == []


def test_a_prefix_is_not_shared_between_fingerprints_even_with_equal_tokens(
    store: ConversationStore,
) -> None:
    """KV of one model is useless for another model."""
    for name, fingerprint in (("a", "f1"), ("b", "f2"), ("c", "f1")):
        store.create_conversation(NewConversation(name, fingerprint, [SYSTEM], prefix_id="bot"))
    with writer_of(store).reading() as conn:
        assert conn.execute("SELECT count(*) FROM messages").fetchone() == (2,)
    assert [list(store.log(name)) for name in "abc"] == [[1, 2]] * 3
    assert store.verify() == []
