"""By which the history that a client sends is found again: a digest of it, for each reply that was stored.

A client without a conversation's id sends all that was said, each time.  Who knows how to compare that
(service/binding/chain.py) makes a digest of it; with each reply the store keeps the digest of the history
up to it, a *state*:

    chains     key        a digest of tenant and state
               message    the reply that ends this history
               session    a digest of the client's own name for the conversation; empty: none

A state belongs to its reply, and not to a conversation: all who hold the message have come by this point of
the same history, forks as well.  So a fork needs no rows of its own, a rewind deletes none (a history that
was cut does not hold the message), and what a fork has is found when the original is deleted.  When nothing
holds the message it is deleted, and its states go with it (ON DELETE CASCADE), whoever deletes it.

A keyed request (with an Idempotency-Key) has a row, too, from the beginning of its turn on: the key is a
digest of tenant and request, and the message is the first that the request brought.  So a retry finds its
turn in any conversation, and the same key with another body is noticed.

A row holds digests and numbers, no text.  Rows grow old: those from before some time are deleted, a few in a
transaction; a history that was last continued before that is new to us when it comes again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from pensieve.store import chain_rows, conversation_rows
from pensieve.store.backend import Transactions
from pensieve.store.records import ChainMatch, ChainRequest
from pensieve.store.running_rows import RunningRows

if TYPE_CHECKING:
    from sqlite3 import Connection

FORGOTTEN_AT_ONCE = 256


class _Found(NamedTuple):
    digest: bytes
    messages: list[int]  # that end a history with it
    is_of_session: bool


class Chains:
    """Used outside of transactions, in the thread of the store."""

    def __init__(self, writer: Transactions, running: RunningRows) -> None:
        self._writer = writer
        self._running = running

    def longest(
        self, digests: Sequence[bytes], session: bytes, *, tenant: str = ""
    ) -> ChainMatch | None:
        """The conversation to go on from; None if no history begins like this.

        `digests` are those of the beginnings of a client's history, from the longest on.  Of conversations at
        the same point one is preferred that the turn may be appended to.
        """
        with self._writer.reading() as conn:
            if (found := _longest(conn, digests, session, tenant)) is None:
                return None
            holder, may_append = self._best(conn, found.messages, found.is_of_session)
            conversation = conversation_rows.conversation_numbered(conn, holder.conversation)
        return ChainMatch(
            found.digest,
            conversation.conversation_id,
            holder.revision,
            conversation.revision,
            may_append,
        )

    def request(self, request_id: str, *, tenant: str = "") -> ChainRequest | None:
        """Return the turn that a keyed request began, if the turn runs or has its reply."""
        with self._writer.reading() as conn:
            turn = chain_rows.turn_of_request(conn, tenant, request_id)
            if turn is None:
                return None
            conversation = conversation_rows.conversation_numbered(conn, turn.conversation)
        return ChainRequest(conversation.conversation_id, turn.num_messages)

    def forget(self, before: float) -> bool:
        """Delete some of the states from before that time; whether there may be more."""
        with self._writer.reading() as conn:
            old, goes_on = chain_rows.oldest_states(conn, before, FORGOTTEN_AT_ONCE)
        if old:
            with self._running.writing() as conn:
                chain_rows.delete_states(conn, old)
        return goes_on

    def _best(
        self, conn: Connection, messages: Sequence[int], is_of_session: bool
    ) -> tuple[chain_rows.Holder, bool]:
        """Who has one of these messages, and whether the turn may be appended there."""
        others = []
        for message in messages:
            for holder in chain_rows.holders(conn, message):
                turn_id = holder.running_turn_id
                is_idle = turn_id is None or self._running.is_dead(turn_id)
                if is_of_session and holder.is_head and is_idle:
                    return holder, True
                others.append(holder)
        return others[0], False  # some history has the messages


def _longest(
    conn: Connection, digests: Sequence[bytes], session: bytes, tenant: str
) -> _Found | None:
    for digest in digests:
        key = chain_rows.chain_key(tenant, digest)
        messages, is_of_session = chain_rows.states(conn, key, session)
        if messages:
            return _Found(digest, messages, is_of_session)
    return None
