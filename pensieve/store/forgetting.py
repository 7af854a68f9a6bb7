"""Forget the request_ids of turns that ended long ago, in steps of a few milliseconds.

A forgotten turn can no longer be replayed or begun again by its request_id. A request with that id then
counts as new. A history holds either all messages of a turn or none. So there are two cases:

* If a history holds the messages, the turn stays, with a key that no request has. Its logprobs and the
  details of its request are deleted.
* If no history holds the messages (the turn was interrupted, failed, or removed by a rewind), the turn is
  deleted with its messages.

A pass visits the turns, oldest first, up to the first turn that is too young. A step is one transaction if
there is something to forget, otherwise one read. The next pass starts at the oldest turn that is not
forgotten yet. The position is kept only in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pensieve.store.bodies import shorten_body, wipe_bodies
from pensieve.store.conversation_rows import KEY_BYTES
from pensieve.store.housekeeper import Housekeeper
from pensieve.store.transactions import StoreTransactions, repeated
from pensieve.store.turn_rows import wipe_logprobs

if TYPE_CHECKING:
    from sqlite3 import Connection

TURNS_PER_STEP = 4096
FORGOTTEN_AT_ONCE = 64
FORGOTTEN_BYTES = 2**20  # limit for logprobs per step; a single turn may exceed it
CLEARED_DETAILS = {"request_id": "", "sampling": {}, "content_hash": ""}  # of a forgotten request


class Forgetting:
    """Call `step` outside of transactions."""

    def __init__(self, transactions: StoreTransactions, housekeeper: Housekeeper) -> None:
        self._transactions = transactions
        self._housekeeper = housekeeper
        self._first = 0  # all turns up to this one are forgotten
        self._after = 0  # the last turn that this pass has visited
        self._has_gap = False  # this pass has met a turn that cannot be forgotten yet

    @repeated
    def step(self, before: float) -> bool:
        """Forget some turns that ended before the time `before`. Return whether the pass continues.

        Does nothing if another daemon is the housekeeper.
        """
        if not self._housekeeper.is_ours:
            return False
        may_go_on = self._housekeeper.fence()
        with self._transactions.reading() as conn:
            rows = conn.execute(
                "SELECT turn_id, body, length(request_key) = ?, created_at,"
                " state <> 'running' AND coalesce(finished_at, created_at) < ?,"
                " (SELECT length(tokens) FROM bodies b WHERE b.body = turns.logprobs) FROM turns"
                " WHERE turn_id > ? ORDER BY turn_id LIMIT ?",
                (KEY_BYTES, before, self._after, TURNS_PER_STEP),
            ).fetchall()
        old: list[tuple[int, int]] = []
        after, first, has_gap = self._after, self._first, self._has_gap
        goes_on = len(rows) == TURNS_PER_STEP
        num_bytes = 0
        for turn_id, body, is_known, created_at, has_ended, logprobs_bytes in rows:
            if created_at >= before:
                goes_on = False
                break
            if len(old) == FORGOTTEN_AT_ONCE:
                goes_on = True
                break
            if is_known and has_ended:
                num_bytes += logprobs_bytes or 0
                if old and num_bytes > FORGOTTEN_BYTES:
                    goes_on = True
                    break
                old.append((turn_id, body))
            has_gap = has_gap or (is_known and not has_ended)
            after, first = turn_id, first if has_gap else turn_id
        if old:
            with self._transactions.writing(is_serializable=True) as conn:
                if not may_go_on(conn):
                    return False
                for turn_id, body in old:
                    _forget(conn, turn_id, body)
        self._first = first
        self._after, self._has_gap = (after, has_gap) if goes_on else (first, False)
        return goes_on


def _forget(conn: Connection, turn_id: int, body: int) -> None:
    found = conn.execute(
        "SELECT tenant FROM conversations JOIN turns USING (conversation)"
        " WHERE turn_id = ? AND turns.body = ? AND state <> 'running'",
        (turn_id, body),
    ).fetchone()
    if found is None:  # meanwhile, another daemon has deleted the turn or begun it again
        return
    (tenant,) = found
    wipe_logprobs(conn, tenant, turn_id)
    is_held = conn.execute(
        "SELECT 1 FROM messages JOIN history USING (message) WHERE turn_id = ? LIMIT 1", (turn_id,)
    ).fetchone()
    if is_held:
        key = turn_id.to_bytes(KEY_BYTES // 2)
        conn.execute(
            "UPDATE turns SET request_key = ?, idempotency_key = NULL WHERE turn_id = ?",
            (key, turn_id),
        )
        shorten_body(conn, tenant, body, CLEARED_DETAILS)
        return
    bodies = conn.execute("SELECT body FROM messages WHERE turn_id = ?", (turn_id,)).fetchall()
    wipe_bodies(conn, tenant, (body, *(each for (each,) in bodies)))
    conn.execute("DELETE FROM messages WHERE turn_id = ?", (turn_id,))
    conn.execute("DELETE FROM turns WHERE turn_id = ?", (turn_id,))
