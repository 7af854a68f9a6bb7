"""Titles of conversations come from their metadata, or else from the first words of the user."""

from __future__ import annotations

import pytest

from pensieve.store import ConversationStore, NewConversation, NewMessage
from pensieve.store.records import NewPrefix
from pensieve.store.titles import TITLE_CHARACTERS_MAX, title_of
from tests.store.talk import begin, create, reply, say, user


def titles(store: ConversationStore, tenant: str = "") -> dict[str, str]:
    page = store.list_conversations(tenant=tenant).conversations
    return {each.conversation_id: each.title for each in page}


def test_the_first_words_of_a_user_are_the_title(store: ConversationStore) -> None:
    create(store, "empty")
    create(store, "tea", NewMessage("system", "Be brief.", (1,)))
    say(store, "tea", "r1", user("  How do I\n\tbrew tea?", 1), reply("Boil.", 2))
    say(store, "tea", "r2", user("And coffee?", 1), reply("Boil.", 2))
    create(store, "given", user("From a history", 1), reply("yes", 2))
    assert titles(store) == {"empty": "", "tea": "How do I brew tea?", "given": "From a history"}
    reader = store.reader()
    assert reader.conversation_with_title("tea").title == "How do I brew tea?"
    reader.close()


def test_a_title_in_metadata_is_preferred_and_not_copied_to_forks(store: ConversationStore) -> None:
    store.create_conversation(NewConversation("named", "f", metadata={"title": "My talk"}))
    store.create_conversation(NewConversation("odd", "f", metadata={"title": 7}))
    for name in ("named", "odd"):
        say(store, name, "r1", user("hello", 1), reply("hi", 2))
    store.fork_conversation("named", 1, "fork")
    assert titles(store) == {"named": "My talk", "odd": "hello", "fork": "hello"}


def test_a_running_first_turn_gives_a_title(store: ConversationStore) -> None:
    create(store, "tea")
    turn_id = begin(store, "tea", "r1", "How long?", 1)
    assert titles(store) == {"tea": "How long?"}
    store.interrupt_turn(turn_id)
    assert titles(store) == {"tea": ""}


def test_examples_of_a_declared_prefix_are_not_used_as_title(store: ConversationStore) -> None:
    shots = [user("2 + 2?", 1), reply("4", 2)]
    store.prefixes.declare(NewPrefix("shots", "f", shots))
    store.prefixes.begin(NewConversation("sum", "", prefix_id="shots"))
    assert titles(store) == {"sum": ""}
    say(store, "sum", "r1", user("3 + 3?", 3), reply("6", 2))
    assert titles(store) == {"sum": "3 + 3?"}


def test_a_rewind_or_deletion_removes_the_title(store: ConversationStore) -> None:
    create(store, "tea")
    say(store, "tea", "r1", user("secret", 1), reply("yes", 2))
    store.rewind_conversation("tea", 0)
    assert titles(store) == {"tea": ""}
    store.delete_conversation("tea")
    assert titles(store) == {}


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("", ""),
        (" \n ", ""),
        ("a\x1b[31mred\u202e", "a [31mred"),
        ('He said "no" \\ \u00fc \U0001f600', 'He said "no" \\ \u00fc \U0001f600'),
        ("word " * 1000, "word " * 15 + "word…"),
        ("x" * 5000, "x" * (TITLE_CHARACTERS_MAX - 1) + "…"),
        ("\U0001f600" * 5000, "\U0001f600" * (TITLE_CHARACTERS_MAX - 1) + "…"),
        ("\n" * 100 + "late", "late"),
    ],
)
def test_titles_are_cleaned_and_shortened(store: ConversationStore, text: str, title: str) -> None:
    create(store, "tea")
    say(store, "tea", "r1", user(text, 1), reply("yes", 2))
    assert titles(store) == {"tea": title}
    assert title_of(text) == title
