"""Long idle conversations of all tenants are found. Declared prefixes are not."""

from __future__ import annotations

import pytest

from pensieve.store import ConversationStore, NewConversation, NewTurn, conversation_rows
from pensieve.store.records import NewPrefix
from tests.store.talk import create, reply, say, user


def idle(store: ConversationStore, before: float) -> list[tuple[str, str]]:
    """Return (tenant, id) of all idle conversations, from repeated reads."""
    found, after, reader = list[tuple[str, str]](), 0, store.reader()
    while True:
        page, last = reader.idle_conversations(before, after)
        found += [(each.tenant, each.conversation_id) for each in page]
        if last is None:
            reader.close()
            return found
        assert last > after
        after = last


def test_idle_conversations_are_found_in_pages(
    store: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation_rows, "SCANNED_ROWS", 3)
    monkeypatch.setattr(conversation_rows, "IDLE_AT_ONCE", 2)
    for number in range(8):
        tenant = "red" if number % 2 else ""
        store.create_conversation(NewConversation(f"c{number}", "f", tenant=tenant))
    say(store, "c0", "r1", user("hi", 10), reply("hello", 20))
    between = store.get_conversation("c0").updated_at
    say(store, "c2", "r1", user("hi", 10), reply("hello", 20))
    names = [("red" if number % 2 else "", f"c{number}") for number in range(8)]
    assert idle(store, 1e12) == names
    assert idle(store, between) == [each for each in names if each[1] not in ("c0", "c2")]
    assert idle(store, 0.0) == []


def test_prefixes_and_conversations_with_a_running_turn_are_not_idle(
    store: ConversationStore,
) -> None:
    store.prefixes.declare(NewPrefix("p", "f", [user("Be brief.", 1)], [], {}, False, 0.0, ""))
    create(store, "busy")
    create(store, "idle")
    store.begin_turn("busy", NewTurn("r1", [user("hi", 10)]))
    assert idle(store, 1e12) == [("", "idle")]
