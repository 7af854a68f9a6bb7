"""Decide which daemon may write to which conversation.

A daemon that opens the history gets a *session*: a row with the daemon's name, addresses and lease. A
conversation has an *owner* and an *epoch*. The owner is the session of the daemon whose engine keeps the
conversation's KV. Each claim changes the owner and sets a new epoch:

    none ──created by A──> A, epoch 7 ──claimed by B──> B, epoch 12
                                        only if A's session has ended, or A's lease has expired,
                                        or A drains and runs no turn of the conversation

Rules:

* A daemon claims a conversation (`hold`) in the transaction that writes to it. If the claim is not allowed,
  the transaction fails with OwnedElsewhere and writes nothing.
* Epochs are never reused, so no two claims have the same epoch.
* A new conversation belongs to the daemon that created it. So if a conversation is deleted and created again
  by another daemon, the new one is never mistaken for the old one.
* A claim interrupts the running turn of the previous owner. The previous owner can no longer end that turn
  (`StoreTransactions.may_end`).
* If the previous owner was another session, the claim calls `on_stale` before its commit, because the local
  engine's KV may be outdated. If the commit fails, the engine has dropped KV that it could have kept. The
  call cannot wait for the commit, because a commit that reports an error may still take effect.

A session ends when its row is deleted. A daemon deletes its own row when it closes the history. A daemon that
opens the history (`open_session`) deletes these rows, and interrupts the turns of the ended sessions:

    all rows, if it opens the history exclusively
    rows of earlier sessions from its own data folder
    rows whose lease expired FORGOTTEN_AFTER_SECONDS ago
    rows without a lease. These are exclusive sessions. The process of an exclusive session holds the lock on
    the history while it is alive. So if another daemon can open the history, that process is dead.

A daemon with an expired lease continues to serve its conversations until another daemon claims them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from pensieve.errors import OwnedElsewhere, StoreCorrupt
from pensieve.store import conversation_rows, turn_rows
from pensieve.store.backend import ServerSession, database_clock
from pensieve.store.records import PREFIX_MARK, StoredConversation
from pensieve.store.transactions import StoreTransactions, repeated

if TYPE_CHECKING:
    from sqlite3 import Connection

LEASE_SECONDS = 10.0
# `open_session` ends a session this long after its lease expired
FORGOTTEN_AFTER_SECONDS = 86_400.0
KV_SOURCES_MAX = 20_000  # limit for remembered addresses of previous owners
# differs from the key of the database lock (postgres/connection.py)
EPOCHS_LOCK_KEY = 0x50656E7300000002
DECLARED_MAX = 20_000  # limit for remembered declarations of prefixes


@dataclass(frozen=True, slots=True)
class Opening:
    """How a process opens the history."""

    replica: str = ""  # the daemon's name
    folder: str = ""  # identity of its data folder; earlier sessions of the same folder end
    lease_seconds: float | None = None  # None: exclusive


class Session(NamedTuple):
    """A daemon that has the history open."""

    number: int
    replica: str
    address: str  # gRPC address
    http_address: str
    metrics_address: str
    is_draining: bool
    is_alive: bool  # its lease has not expired


class Owner(NamedTuple):
    """The owner of a conversation."""

    session: int
    epoch: int
    replica: str = ""  # set if the session has not ended
    address: str = ""
    is_alive: bool = False  # the session has not ended, and its lease has not expired
    is_ours: bool = False


class Owners:
    """Used in the store's threads, which also call `on_stale`."""

    def __init__(self, transactions: StoreTransactions, now: Callable[[], float]) -> None:
        self._transactions = transactions
        self._now = now
        self.on_stale: Callable[[str, str], None] = lambda tenant, conversation_id: None
        # Addresses of daemons that may still have KV of a conversation, by (tenant, conversation_id).
        self.kv_sources: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._declared: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._lock = threading.Lock()  # guards both dicts
        self._opening = Opening()
        self._addresses = ("", "", "")

    @property
    def session(self) -> int:
        """The number of this daemon's session."""
        return self._transactions.session

    @property
    def lease_seconds(self) -> float:
        return self._opening.lease_seconds or 0.0

    # -- sessions --

    @repeated
    def open_session(self, opening: Opening) -> list[int]:
        """Open this daemon's session. Return the turns of ended sessions that were interrupted."""
        with self._transactions.opening() as conn:
            clock = database_clock(conn)
            _begin_epochs(conn, round(1_000_000 * self._now()))
            if opening.lease_seconds is None:
                conn.execute("DELETE FROM sessions")
            else:
                conn.execute(
                    "DELETE FROM sessions WHERE lease_until IS NULL OR folder = ?"
                    f" OR lease_until < {clock} - ?",
                    (opening.folder, FORGOTTEN_AFTER_SECONDS),
                )
            interrupted = sorted(turn for (turn,) in conn.execute(ABANDONED_TURNS).fetchall())
            for turn_id in interrupted:
                turn_rows.interrupt_turn(conn, turn_id, self._now())
            session = next_number(conn)
            self._opening = opening
            self._insert(conn, session)
        self._transactions.session = session
        return interrupted

    def renew(self, conn: Connection) -> None:
        """Renew this daemon's lease, in a transaction of the lease thread.

        If another daemon has deleted the row of this session, insert the row again. Conversations that other
        daemons claimed meanwhile stay with their new owners.
        """
        renewed = conn.execute(
            f"UPDATE sessions SET lease_until = {database_clock(conn)} + ? WHERE session = ?"
            " RETURNING 1",
            (self._opening.lease_seconds, self.session),
        ).fetchall()
        if not renewed:
            self._insert(conn, self.session)

    def _insert(self, conn: Connection, session: int) -> None:
        opening = self._opening
        conn.execute(
            "INSERT INTO sessions (session, replica, folder, address, http_address, metrics_address,"
            " is_draining, opened_at, lease_until)"
            f" VALUES (?, ?, ?, ?, ?, ?, 0, ?, {database_clock(conn)} + ?)",
            (
                *(session, opening.replica, opening.folder, *self._addresses),
                *(self._now(), opening.lease_seconds),
            ),
        )

    @property
    def address(self) -> str:
        """The address where other daemons reach this daemon; empty until `announce`."""
        return self._addresses[0]

    @property
    def folder(self) -> str:
        """The identity of this daemon's data folder; empty if the history is opened exclusively."""
        return self._opening.folder

    @property
    def replica(self) -> str:
        return self._opening.replica

    @repeated
    def announce(self, address: str, http_address: str, metrics_address: str) -> None:
        """Tell the other daemons where this daemon can be reached."""
        self._addresses = address, http_address, metrics_address
        with self._transactions.writing() as conn:
            conn.execute(
                "UPDATE sessions SET address = ?, http_address = ?, metrics_address = ?"
                " WHERE session = ?",
                (*self._addresses, self._transactions.session),
            )

    @repeated
    def drain(self) -> None:
        """Let other daemons claim each conversation of this daemon once it has no running turn."""
        with self._transactions.writing() as conn:
            conn.execute(
                "UPDATE sessions SET is_draining = 1 WHERE session = ?",
                (self._transactions.session,),
            )

    @repeated
    def end(self) -> None:
        """End this daemon's session and interrupt its running turns."""
        session = self._transactions.session
        with self._transactions.writing() as conn:
            conn.execute("DELETE FROM sessions WHERE session = ?", (session,))
            for turn_id in turn_rows.running_turns(conn, session):
                turn_rows.interrupt_turn(conn, turn_id, self._now())

    # -- conversations, in transactions of their callers --

    def hold(
        self,
        conn: Connection,
        number: int,
        conversation: StoredConversation,
        owner: int | None = None,
        *,
        from_live_owner: bool = False,
    ) -> StoredConversation:
        """Claim the conversation for this daemon. Return the conversation as it is after the claim.

        The claim interrupts a turn that was running. `owner` is the owner's session, if the caller has read
        it. With `from_live_owner`, a conversation without a running turn is also taken from a live daemon.
        For a declared prefix, which has no owner, nothing happens.

        Raises:
            OwnedElsewhere: another daemon has the conversation.
        """
        ours = self._transactions.session
        if conversation.conversation_id.startswith(PREFIX_MARK):
            return conversation
        if owner is None:
            owner = _owner_number(conn, number)
        if owner == ours:
            lock_owner(conn, number)
            return conversation
        address = ""
        if owner is not None:
            address = self._refuse_owned(conn, owner, conversation, from_live_owner)
        running = conversation.running_turn_id
        if running is not None:
            turn_rows.interrupt_turn(conn, running, self._now())
        self._own(conn, number)
        key = conversation.tenant, conversation.conversation_id
        self.kv_sources.pop(key, None)
        if owner is not None:
            self.on_stale(*key)
        if address:
            with self._lock:
                self.kv_sources[key] = address
                if len(self.kv_sources) > KV_SOURCES_MAX:
                    self.kv_sources.popitem(last=False)
        return conversation if running is None else replace(conversation, running_turn_id=None)

    def block_turns(self, conn: Connection, number: int, conversation: StoredConversation) -> None:
        """Prevent a concurrent transaction from beginning a turn of the conversation.

        With PostgreSQL, this also claims the conversation if it has no owner. With SQLite, it does nothing,
        because only one transaction writes at a time.
        """
        if isinstance(conn, ServerSession) and _owner_number(conn, number) is None:
            self.hold(conn, number, conversation)
        else:
            lock_owner(conn, number)

    def own_new(self, conn: Connection, number: int, conversation: StoredConversation) -> None:
        """Make this daemon the owner of a new conversation. KV under its id is dropped as outdated.

        The caller has read the conversation after inserting it. So no concurrent transaction has created a
        conversation with the same id.
        """
        self._own(conn, number)
        self.drop_kv(conversation)

    def drop_kv(self, conversation: StoredConversation) -> None:
        """Drop the engine's KV under this conversation's id."""
        key = conversation.tenant, conversation.conversation_id
        self.kv_sources.pop(key, None)
        self.on_stale(*key)

    def drop_stale_source(self, conn: Connection, number: int, source: StoredConversation) -> None:
        """Before a fork, drop the engine's KV of the source if this daemon does not own the source."""
        ours = self._transactions.session
        if _owner_number(conn, number) != ours:
            self.on_stale(source.tenant, source.conversation_id)

    def drop_stale_prefix(self, prefix: StoredConversation) -> None:
        """Before a prefix's KV is used, drop the KV if another daemon has declared the prefix again."""
        key = prefix.tenant, prefix.conversation_id
        outdated = []
        with self._lock:
            if self._declared.get(key, prefix.created_at) != prefix.created_at:
                outdated.append(key)
            self._declared[key] = prefix.created_at
            if len(self._declared) > DECLARED_MAX:
                outdated.append(self._declared.popitem(last=False)[0])
        for each in outdated:
            self.on_stale(*each)

    def _refuse_owned(
        self, conn: Connection, owner: int, conversation: StoredConversation, from_live_owner: bool
    ) -> str:
        """Raise OwnedElsewhere unless the conversation may be claimed. Return the address of a live owner."""
        row = conn.execute(
            f"SELECT s.replica, s.address, s.is_draining, {alive_condition(conn)} FROM sessions s"
            " WHERE s.session = ?",
            (owner,),
        ).fetchone()
        if row is None:
            return ""
        replica, address, is_draining, alive = row
        if not alive:
            return ""
        if conversation.running_turn_id is not None or not (is_draining or from_live_owner):
            raise OwnedElsewhere(conversation.conversation_id, replica, address)
        return str(address)

    def _own(self, conn: Connection, number: int) -> None:
        values: tuple[int, ...] = number, self._transactions.session
        # The server computes the epoch, so that this statement need not wait for a query.
        epoch = "nextval('epoch_numbers')"
        if not isinstance(conn, ServerSession):
            epoch, values = "?", (*values, next_number(conn))
        conn.execute(
            f"INSERT INTO owners (conversation, session, epoch) VALUES (?, ?, {epoch})"
            " ON CONFLICT (conversation) DO UPDATE"
            " SET session = excluded.session, epoch = excluded.epoch",
            values,
        )

    # -- calls --

    @repeated
    def claim(
        self, conversation_id: str, *, tenant: str = "", from_live_owner: bool = False
    ) -> None:
        """Claim a conversation for work that does not write to the history. See `hold`.

        Does nothing if the conversation does not exist.
        """
        owner = self.owner(conversation_id, tenant=tenant)
        if owner is not None and owner.is_ours:
            return
        with self._transactions.writing() as conn:
            found = conversation_rows.find_conversation(conn, conversation_id, tenant)
            if found is not None:
                self.hold(conn, *found, from_live_owner=from_live_owner)

    def owner(self, conversation_id: str, *, tenant: str = "") -> Owner | None:
        """Return the owner of a conversation, or None if it has no owner or does not exist."""
        with self._transactions.reading() as conn:
            return owner_of(conn, conversation_id, tenant, self._transactions.session)


ABANDONED_TURNS = """
    SELECT t.turn_id FROM turns t WHERE t.state = 'running' AND NOT EXISTS (
        SELECT 1 FROM owners o JOIN sessions s USING (session)
        WHERE o.conversation = t.conversation)
"""


def alive_condition(conn: Connection) -> str:
    """Return an SQL condition that is true if the lease of session `s` has not expired."""
    return f"(s.lease_until IS NULL OR s.lease_until > {database_clock(conn)})"


def owner_of(conn: Connection, conversation_id: str, tenant: str, ours: int) -> Owner | None:
    row = conn.execute(
        f"SELECT o.session, o.epoch, s.replica, s.address, {alive_condition(conn)}"
        " FROM conversations c JOIN owners o USING (conversation)"
        " LEFT JOIN sessions s ON s.session = o.session WHERE c.key = ?",
        (conversation_rows.conversation_key(conversation_id, tenant),),
    ).fetchone()
    if row is None:
        return None
    session, epoch, replica, address, alive = row
    if replica is None:
        return Owner(session, epoch, is_ours=session == ours)
    return Owner(session, epoch, replica, address, bool(alive), session == ours)


def sessions(conn: Connection) -> list[Session]:
    """Return the sessions that have not ended, oldest first."""
    rows = conn.execute(
        "SELECT s.session, s.replica, s.address, s.http_address, s.metrics_address, s.is_draining,"
        f" {alive_condition(conn)} FROM sessions s ORDER BY s.session"
    ).fetchall()
    return [_session(*row) for row in rows]


def _session(number: int, *row: Any) -> Session:
    replica, address, http_address, metrics_address, is_draining, alive = row
    places = replica, address, http_address, metrics_address
    return Session(number, *places, is_draining=bool(is_draining), is_alive=bool(alive))


def lock_owner(conn: Connection, number: int) -> None:
    """Prevent a concurrent claim of the conversation, even from a transaction with an older snapshot.

    This also prevents turns from beginning, because `begin_turn` calls `hold`, which changes the same row.
    """
    if isinstance(conn, ServerSession):
        conn.execute("UPDATE owners SET epoch = epoch WHERE conversation = ?", (number,))


def _owner_number(conn: Connection, number: int) -> int | None:
    row = conn.execute("SELECT session FROM owners WHERE conversation = ?", (number,)).fetchone()
    return None if row is None else int(row[0])


def next_number(conn: Connection) -> int:
    """Return a number that no session and no epoch has used."""
    statement = "UPDATE epochs SET last = last + 1 RETURNING last"
    if isinstance(conn, ServerSession):
        statement = "SELECT nextval('epoch_numbers')"
    ((number,),) = conn.execute(statement).fetchall()
    return int(number)


def _begin_epochs(conn: Connection, at_least: int) -> None:
    """Make sure that new numbers are higher than all used ones, even after a restore from a backup.

    `at_least` is the current time in microseconds. No history has used that many numbers.

    Raises:
        StoreCorrupt: the row of `epochs` is damaged.
    """
    if isinstance(conn, ServerSession):
        # Only one process at a time, because a concurrent process could set the sequence back.
        conn.execute("SELECT pg_advisory_xact_lock(?::bigint)", (EPOCHS_LOCK_KEY,))
        conn.execute(
            "SELECT setval('epoch_numbers', ?::bigint) FROM epoch_numbers WHERE last_value < ?::bigint",
            (at_least, at_least),
        )
        return
    last = [last for (last,) in conn.execute("SELECT last FROM epochs").fetchall()]
    if len(last) != 1 or not isinstance(last[0], int):
        raise StoreCorrupt("the history is damaged: its last epoch cannot be read")
    conn.execute("UPDATE epochs SET last = max(last, ?)", (at_least,))
