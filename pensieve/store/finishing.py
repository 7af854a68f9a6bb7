"""The end of a turn that becomes a part of the history: its messages, its reply and what belongs to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pensieve.errors import NotFound
from pensieve.store import conversation_rows, message_rows, turn_rows
from pensieve.store.chain_rows import insert_state
from pensieve.store.logprob_rows import insert_logprobs
from pensieve.store.records import ChainState, NewMessage, TurnState
from pensieve.store.responses import StoredResponse, put_response

if TYPE_CHECKING:
    from sqlite3 import Connection

CANCELLED = "cancelled"  # the finish_reason that makes a turn's state `cancelled`


def append_reply(
    conn: Connection,
    turn_id: int,
    reply: NewMessage,
    finish_reason: str,
    usage: Mapping[str, Any],
    chain_state: ChainState | None,
    response: StoredResponse | None,
    now: float,
) -> int:
    """Returns the revision that the turn made, here or when this was done before."""
    state = TurnState.CANCELLED if finish_reason == CANCELLED else TurnState.COMPLETED
    progress = turn_rows.require_progress(conn, turn_id)
    number, found, made, revision, tenant, end, messages = progress
    if found is state and made is not None:
        return made
    if found is not TurnState.RUNNING:
        raise NotFound(f"turn {turn_id} no longer runs, it is {found}")
    revision += 1
    links = [message_rows.Link(each, revision, length) for each, length in messages]
    message = message_rows.insert_message(conn, tenant, reply, turn_id, finish_reason)
    links.append(message_rows.Link(message, revision, len(reply.token_ids)))
    message_rows.append_history(conn, number, links, end)
    insert_logprobs(conn, tenant, turn_id, reply.logprobs)
    if chain_state is not None:
        insert_state(conn, tenant, chain_state, message, now)
    if response is not None:
        put_response(conn, number, replace(response, revision=revision))
    conversation_rows.set_revision(conn, number, revision, now)
    turn_rows.finish_turn(conn, turn_id, state, finish_reason, usage, revision, now)
    return revision
