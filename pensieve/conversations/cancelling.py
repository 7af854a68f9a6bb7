"""End a turn for its client, and tell the client how the turn ended.

    keep_tokens      part of the reply that is kept
    not given        everything that was sent to the followers until now
    n > 0            the first n tokens, which the client has received
    0                nothing; a retry with the same request_id begins the turn again

The call returns when the end of the turn is stored. If the turn was already ending by itself, the cancel has
no effect, and the result says how the turn ended. A client may name the request instead of the turn. If that
request is about to begin its turn, the cancel waits until the turn has begun. Repeating a cancel is harmless,
because the store knows how each turn ended.
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
    """The turn to end: by turn_id, by request_id, or (neither given) the running turn."""

    conversation_id: str
    turn_id: str = ""
    request_id: str = ""
    keep_tokens: int | None = None
    attempt: int = 0  # the attempt whose tokens keep_tokens counts; 0: any attempt
    tenant: str = ""


class CancelResult(NamedTuple):
    was_running: bool
    finish_reason: str  # of the reply in the history; empty: the history has no reply


async def cancel_turn(
    conversations: Conversations | None,
    reader: HistoryReader,
    threads: Threads,
    cancel: CancelRequest,
) -> CancelResult:
    """End a turn and return when it has ended. Raises NotFound if there is no such conversation.

    `conversations` is None while the model is loading.
    """
    if conversations is None:
        return CancelResult(False, await _stored_finish(reader, threads, cancel))
    names = cancel.tenant, cancel.conversation_id, cancel.request_id
    await conversations.arriving.until_begun(*names)
    live = _find_live(conversations, cancel)
    if live is None:
        return CancelResult(False, await _stored_finish(reader, threads, cancel))
    keep = cancel.keep_tokens
    if cancel.attempt not in (0, live.attempt):
        keep = 0
    conversations.ends.stop(live, keep)
    await conversations.followers.until_ended(live)
    if isinstance(live.failure, StoreError | StoreUnavailable):
        raise live.failure  # it is unknown whether the history has the reply
    has_reply = live.finish is not None and live.failure is None
    return CancelResult(True, live.finish.value if has_reply and live.finish else "")


def _find_live(conversations: Conversations, cancel: CancelRequest) -> LiveTurn | None:
    turns = conversations.turns
    if cancel.request_id:
        return turns.of_request_id(cancel.tenant, cancel.conversation_id, cancel.request_id)
    live = turns.of_conversation(cancel.conversation_id, cancel.tenant)
    if live is None or cancel.turn_id not in ("", str(live.turn_id)):
        return None
    return live


async def _stored_finish(reader: HistoryReader, threads: Threads, cancel: CancelRequest) -> str:
    """Return the finish reason of a turn that does not run; empty if the history has no reply."""
    tenant, conversation_id = cancel.tenant, cancel.conversation_id
    await threads.in_read_thread(tenant, reader.get_conversation, conversation_id, tenant=tenant)
    if not cancel.turn_id and not cancel.request_id:
        return ""
    arguments = conversation_id, cancel.turn_id, cancel.request_id
    turn = await threads.in_read_thread(tenant, reader.find_turn, *arguments, tenant=tenant)
    return turn.finish_reason or "" if turn is not None else ""
