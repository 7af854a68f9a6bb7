"""End a turn for its client, and tell the client how the turn ended.

    keep_tokens      what is kept of the reply
    not given        all that the readers were sent until now
    n > 0            the first n tokens: those that the client has received
    0                nothing; the same request_id would begin the turn again

The answer comes when the store has the end of the turn. If the end was already on its way to the store, the
turn ends as planned, and the answer says how. A client may name the request instead of the turn; a request
that is about to begin its turn is waited for. Repeating a cancel is harmless: the store knows how a turn
ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pensieve.conversations.conversations import Conversations
from pensieve.conversations.live_turn import LiveTurn
from pensieve.conversations.threads import Threads
from pensieve.errors import StoreError, StoreUnavailable
from pensieve.store.history_reader import HistoryReader


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """Which turn to end: by its id, by its request's, or (neither given) the one that runs."""

    conversation_id: str
    turn_id: str = ""
    request_id: str = ""
    keep_tokens: int | None = None
    attempt: int = 0  # that keep_tokens counts in; 0 is any
    tenant: str = ""


class CancelResult(NamedTuple):
    was_running: bool
    finish_reason: str  # of the reply that is in the history; empty: nothing of the turn is


async def cancel_turn(
    conversations: Conversations | None,
    reader: HistoryReader,
    threads: Threads,
    cancel: CancelRequest,
) -> CancelResult:
    """End a turn; returns when it has ended.  NotFound if there is no such conversation.

    `conversations` is None while no turn may run yet.
    """
    if conversations is None:
        return CancelResult(False, await _stored_finish(reader, threads, cancel))
    names = cancel.tenant, cancel.conversation_id, cancel.request_id
    await conversations.arriving.until_begun(*names)
    live = _live(conversations, cancel)
    if live is None:
        return CancelResult(False, await _stored_finish(reader, threads, cancel))
    keep = cancel.keep_tokens
    if cancel.attempt not in (0, live.attempt):
        keep = 0
    conversations.ends.stop(live, keep)
    await conversations.followers.until_ended(live)
    if isinstance(live.failure, StoreError | StoreUnavailable):
        raise live.failure  # whether it is in the history is not known
    kept = live.finish is not None and live.failure is None
    return CancelResult(True, live.finish.value if kept and live.finish else "")


def _live(conversations: Conversations, cancel: CancelRequest) -> LiveTurn | None:
    turns = conversations.turns
    if cancel.request_id:
        return turns.of_request_id(cancel.tenant, cancel.conversation_id, cancel.request_id)
    live = turns.of_conversation(cancel.conversation_id, cancel.tenant)
    if live is None or cancel.turn_id not in ("", str(live.turn_id)):
        return None
    return live


async def _stored_finish(reader: HistoryReader, threads: Threads, cancel: CancelRequest) -> str:
    """Why the reply of a turn that does not run ended, if it is in the history."""
    tenant, conversation_id = cancel.tenant, cancel.conversation_id
    await threads.in_reader(tenant, reader.get_conversation, conversation_id, tenant=tenant)
    if not cancel.turn_id and not cancel.request_id:
        return ""
    named = conversation_id, cancel.turn_id, cancel.request_id
    turn = await threads.in_reader(tenant, reader.find_turn, *named, tenant=tenant)
    return turn.finish_reason or "" if turn is not None else ""
