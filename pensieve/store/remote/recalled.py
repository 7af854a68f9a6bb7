"""What a call did that was carried out and whose answer is not at hand: read from the store.

A call that comes again after the history service itself was killed is known by its number (calls.py).
Nothing here writes what was not written, and a turn is looked at only: it may have begun again since.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pensieve.errors import NotFound
from pensieve.store.conversation_changes import LastDeleted
from pensieve.store.conversation_store import ConversationStore
from pensieve.store.records import BeginResult, Conversation, Rewound, StoredTurn, StoredTurnState
from pensieve.store.remote.methods import METHODS
from pensieve.store.responses import Removed


def _begun(store: ConversationStore, given: Mapping[str, Any]) -> BeginResult:
    request = given["request"]
    turn = store.find_turn(
        given["conversation_id"], request.request_id, tenant=given.get("tenant", "")
    )
    if turn is None:
        raise NotFound(f"there is no conversation {given['conversation_id']!r}")
    return BeginResult(turn, must_run=turn.state is StoredTurnState.RUNNING)


def _turn(store: ConversationStore, given: Mapping[str, Any]) -> StoredTurn:
    return store.get_turn(given["turn_id"])


def _conversation(name: str) -> Callable[[ConversationStore, Mapping[str, Any]], Conversation]:
    return lambda store, given: store.get_conversation(given[name], tenant=given.get("tenant", ""))


def _new(store: ConversationStore, given: Mapping[str, Any]) -> Conversation:
    return store.get_conversation(given["new"].conversation_id, tenant=given["new"].tenant)


def _rewound(store: ConversationStore, given: Mapping[str, Any]) -> Rewound:
    found = _conversation("conversation_id")(store, given)
    return Rewound(found.revision, found.num_tokens)


def _last_deleted(store: ConversationStore, given: Mapping[str, Any]) -> LastDeleted:
    found = _conversation("conversation_id")(store, given)
    return LastDeleted(found, is_rewound=not given["pending"])


def _as_before(name: str) -> Callable[[ConversationStore, Mapping[str, Any]], Any]:
    """Of what changes nothing when it is done twice."""
    return lambda store, given: METHODS[name].run_on(store, given)


RECALLED: Mapping[str, Callable[[ConversationStore, Mapping[str, Any]], Any]] = {
    "begin_turn": _begun,
    "finish_turn": _as_before("finish_turn"),
    "fail_turn": _turn,  # which may have begun again since, as another one's
    "interrupt_turn": _turn,
    "create_conversation": _new,
    "prefixes.begin": _new,
    "fork_conversation": _conversation("new_id"),
    "rewind_conversation": _rewound,
    "replace_log": _conversation("conversation_id"),
    "changes.set_metadata": _conversation("conversation_id"),
    "changes.begin_with": _conversation("conversation_id"),
    "changes.delete_last": _last_deleted,
    "replace_pending": _as_before("replace_pending"),
    "responses.save": _as_before("responses.save"),
    "responses.delete": lambda store, given: Removed(),
    "prefixes.declare": lambda store, given: store.prefixes.find(
        given["new"].prefix_id, tenant=given["new"].tenant
    ),
}
