"""Shortcuts to run turns, for tests whose subject is something else."""

from __future__ import annotations

import importlib.util

from pensieve.store import ConversationStore, NewConversation, NewMessage, NewTurn

DRIVERS = [name for name in ("pysqlite3", "sqlite3") if importlib.util.find_spec(name)]


def user(text: str, *token_ids: int) -> NewMessage:
    return NewMessage("user", text, token_ids)


def reply(text: str, *token_ids: int, logprobs: bytes = b"") -> NewMessage:
    return NewMessage("assistant", text, token_ids, logprobs=logprobs)


def create(store: ConversationStore, name: str, *head: NewMessage) -> None:
    store.create_conversation(NewConversation(name, "fingerprint 1", head))


def begin(store: ConversationStore, name: str, request_id: str, text: str, *ids: int) -> int:
    begun = store.begin_turn(name, NewTurn(request_id, [user(text, *ids)]))
    assert begun.must_run
    return begun.turn.turn_id


def say(
    store: ConversationStore, name: str, request_id: str, question: NewMessage, answer: NewMessage
) -> int:
    """Run one complete turn and return its revision."""
    begun = store.begin_turn(name, NewTurn(request_id, [question]))
    assert begun.must_run
    return store.finish_turn(begun.turn.turn_id, answer, "stop", {"output_tokens": 2})
