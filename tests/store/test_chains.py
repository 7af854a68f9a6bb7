"""Histories are found by digests, after forks, rewinds and deletions, and with other tokenizers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pensieve.store import ConversationStore, NewTurn, chains
from pensieve.store.conversation_rows import tenant_key
from pensieve.store.records import ChainMatch, ChainState
from tests.store.faulty import writer_of
from tests.store.talk import create, reply, user

Open = Callable[..., ConversationStore]


def digest(name: str) -> bytes:
    return name.encode().ljust(16, b".")


def say(
    store: ConversationStore, name: str, state: str, session: bytes = b"", tenant: str = ""
) -> int:
    """Run one turn, whose reply ends with this chain state."""
    request = NewTurn(f"r-{state}", [user("hi", 1)])
    turn = store.begin_turn(name, request, tenant=tenant).turn
    chain_state = ChainState(digest(state), session)
    return store.finish_turn(turn.turn_id, reply("hello", 2), "stop", {}, chain_state)


def match(
    store: ConversationStore, *states: str, session: bytes = b"", tenant: str = ""
) -> ChainMatch | None:
    return store.chains.longest([digest(each) for each in states], session, tenant=tenant)


def found(store: ConversationStore, *states: str, session: bytes = b"") -> tuple[str, int, bool]:
    got = match(store, *states, session=session)
    assert got is not None
    return got.conversation_id, got.revision, got.may_append


def num_rows(store: ConversationStore) -> int:
    with writer_of(store).reading() as conn:
        count: int = conn.execute("SELECT count(*) FROM chains").fetchone()[0]
        return count


def test_match_finds_the_longest_known_prefix(store: ConversationStore) -> None:
    create(store, "tea")
    say(store, "tea", "a")
    say(store, "tea", "ab")
    assert match(store, "ab", "a") == ChainMatch(digest("ab"), "tea", 2, 2, True)
    assert match(store, "abc", "a") == ChainMatch(digest("a"), "tea", 1, 2, False)
    assert match(store, "x") is None
    assert match(store) is None
    assert match(store, "ab", tenant="another") is None
    assert store.verify() == store.integrity_check() == []


def test_match_prefers_the_same_session_and_never_appends_to_another_session(
    store: ConversationStore,
) -> None:
    for name, session in (("one", b"1"), ("two", b"2"), ("three", b"1")):
        create(store, name)
        say(store, name, "a", session)
    assert found(store, "a", session=b"2") == ("two", 1, True)
    assert found(store, "a", session=b"1")[0] in ("one", "three")
    assert found(store, "a", session=b"")[2] is False
    assert found(store, "a", session=b"3")[2] is False


def test_no_append_if_a_turn_runs_or_later_messages_exist(
    store: ConversationStore,
) -> None:
    create(store, "tea")
    say(store, "tea", "a")
    turn = store.begin_turn("tea", NewTurn("r2", [user("more", 3)])).turn
    assert found(store, "a") == ("tea", 1, False)
    store.interrupt_turn(turn.turn_id)
    assert found(store, "a") == ("tea", 1, True)
    say(store, "tea", "ab")
    assert found(store, "a") == ("tea", 1, False)


def test_match_allows_an_append_after_a_restart_interrupted_the_turn(open_store: Open) -> None:
    store = open_store()
    create(store, "tea")
    say(store, "tea", "a")
    store.begin_turn("tea", NewTurn("r2", [user("more", 3)]))
    store.close()
    assert found(open_store(), "a") == ("tea", 1, True)


def test_match_prefers_a_conversation_that_ends_at_the_match(
    store: ConversationStore,
) -> None:
    create(store, "tea")
    say(store, "tea", "a")
    store.fork_conversation("tea", 1, "cup")
    assert found(store, "a") == ("tea", 1, True)
    say(store, "tea", "ab")
    assert found(store, "a") == ("cup", 1, True)
    say(store, "cup", "ac")
    assert found(store, "a") == ("tea", 1, False)
    assert found(store, "ac", "a") == ("cup", 2, True)


def test_rewind_removes_chain_states_but_forks_keep_theirs(store: ConversationStore) -> None:
    create(store, "tea")
    say(store, "tea", "a")
    say(store, "tea", "ab")
    store.rewind_conversation("tea", 1)
    assert match(store, "ab", "a") == ChainMatch(digest("a"), "tea", 1, 3, True)
    say(store, "tea", "ac")
    assert found(store, "ac", "a") == ("tea", 4, True)
    store.fork_conversation("tea", 4, "cup")
    store.rewind_conversation("tea", 0)
    assert found(store, "ac", "a") == ("cup", 4, True)


@pytest.mark.sqlite  # reads SQLite's files
def test_deletion_keeps_only_the_chain_states_of_a_fork(store: ConversationStore) -> None:
    create(store, "tea")
    say(store, "tea", "a")
    say(store, "tea", "ab")
    store.fork_conversation("tea", 1, "cup")
    store.delete_conversation("tea")
    assert num_rows(store) == 1
    assert found(store, "ab", "a") == ("cup", 1, True)
    store.delete_conversation("cup")
    assert num_rows(store) == 0
    raw = store.folder.database_path.read_bytes()
    assert tenant_key("", digest("a")) not in raw
    assert tenant_key("", digest("ab")) not in raw
    assert store.verify() == store.integrity_check() == []


def test_states_cut_by_a_rewind_are_deleted_when_the_request_is_forgotten(
    store: ConversationStore,
) -> None:
    create(store, "tea")
    say(store, "tea", "a")
    store.rewind_conversation("tea", 0)
    assert num_rows(store) == 1  # kept, because its request may still be repeated
    while store.forgetting.step(1e9):
        pass
    assert num_rows(store) == 0


def test_replacing_the_tokens_of_a_log_keeps_its_chain_states(store: ConversationStore) -> None:
    create(store, "tea")
    say(store, "tea", "a")
    store.fork_conversation("tea", 1, "cup")
    store.replace_log("tea", "fingerprint 2", [[5], [6, 7]])
    assert num_rows(store) == 2
    store.delete_conversation("cup")
    assert num_rows(store) == 1
    assert found(store, "a") == ("tea", 1, True)
    assert store.verify() == store.integrity_check() == []


def test_a_failed_turn_has_no_chain_state(store: ConversationStore) -> None:
    create(store, "tea")
    turn = store.begin_turn("tea", NewTurn("r1", [user("hi", 1)])).turn
    store.fail_turn(turn.turn_id, "NAN_LOGITS")
    assert num_rows(store) == 0
    assert match(store, "a") is None


def test_finishing_a_turn_twice_adds_one_state(store: ConversationStore) -> None:
    create(store, "tea")
    turn = store.begin_turn("tea", NewTurn("r1", [user("hi", 1)])).turn
    for _ in range(2):
        chain_state = ChainState(digest("a"), b"")
        assert store.finish_turn(turn.turn_id, reply("x", 2), "stop", {}, chain_state) == 1
    assert num_rows(store) == 1


def test_old_chain_states_are_forgotten_a_few_at_a_time(
    store: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chains, "FORGOTTEN_AT_ONCE", 2)
    create(store, "tea")
    for state in ("a", "ab", "abc"):
        say(store, "tea", state)
    with writer_of(store).reading() as conn:
        times = [at for (at,) in conn.execute("SELECT at FROM chains ORDER BY chain")]
    assert store.chains.forget(times[0]) is False
    assert num_rows(store) == 3  # no row is older than the first
    assert store.chains.forget(times[2]) is True
    assert store.chains.forget(times[2]) is False
    assert num_rows(store) == 1
    assert found(store, "abc", "ab", "a") == ("tea", 3, True)
    assert store.chains.forget(1e9) is False
    assert match(store, "abc", "ab", "a") is None
    assert store.verify() == []


def test_match_reads_a_bounded_number_of_conversations_with_the_same_history(
    store: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chains, "STATES_MAX", 2)
    monkeypatch.setattr(chains, "HOLDERS_MAX", 2)
    for number in range(5):
        create(store, f"c{number}")
        say(store, f"c{number}", "a")
    assert found(store, "a") == ("c4", 1, True)
    for number in (3, 4):
        say(store, f"c{number}", f"a{number}")
    # The two conversations that are read have both continued, so the client must fork.
    assert found(store, "a")[2] is False


def test_verify_reports_a_chain_state_whose_message_is_not_a_reply(
    store: ConversationStore,
) -> None:
    create(store, "tea")
    say(store, "tea", "a")
    with writer_of(store).writing() as conn:
        conn.execute("UPDATE chains SET message = 1")  # a message of the user
    assert store.verify() == ["chain 1: its message is not a reply"]
