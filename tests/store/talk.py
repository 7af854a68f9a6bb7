"""Shortcuts to run turns, for tests whose subject is something else."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

from pensieve.store import ConversationStore, NewConversation, NewMessage, NewTurn
from pensieve.store.records import StoredTurn, StoredTurnState

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


def stored_turn(turn_id: int, **changes: Any) -> StoredTurn:
    """Return the record of a running turn of the conversation `c`, or with other values."""
    running = StoredTurn(
        turn_id=turn_id,
        conversation_id="c",
        tenant="",
        request_id="r",
        state=StoredTurnState.RUNNING,
        attempts=1,
        sampling={},
        seed=1,
        finish_reason=None,
        failure=None,
        usage={},
        revision=None,
        created_at=0.0,
        finished_at=None,
    )
    return replace(running, **changes)
