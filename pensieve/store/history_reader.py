"""Read the history on a separate connection, while the store threads use theirs.

A read sees the state that was committed when the read began. Readers and writers do not wait for each other.
Each read closes its snapshot at its end, because an open snapshot would keep deleted text in the write-ahead
log. While deleted text waits to be erased, some reads are delayed a little. Without these delays,
back-to-back reads could block the erasure. One thread reads at a time.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pensieve.errors import InvalidArgument
from pensieve.store import (
    conversation_rows,
    declared_prefixes,
    message_rows,
    owners,
    responses,
    turn_rows,
)
from pensieve.store.backend import Reads
from pensieve.store.bodies import bytes_by_tenant
from pensieve.store.conversation_changes import Pending, with_pending
from pensieve.store.conversation_rows import require_conversation
from pensieve.store.owners import Owner, Session
from pensieve.store.records import (
    PAGE_SIZE_MAX,
    MessagePage,
    Page,
    PrefixPage,
    StoredConversation,
    StoredMessage,
    StoredPrefix,
    StoredTurn,
)
from pensieve.store.responses import StoredResponse
from pensieve.store.titles import with_titles
from pensieve.store.transactions import StoreTransactions

if TYPE_CHECKING:
    from sqlite3 import Connection

ERASURE_PAUSE_SECONDS = 0.1
# at most one read in this time is delayed, because another program may block the erasure for long
ERASURE_PAUSE_EVERY_SECONDS = 1.0
TURN_ID_PATTERN = re.compile("[0-9]{1,18}")
PAGE_TOKEN_PATTERN = re.compile("[0-9]{1,18}")


class HistoryReader:
    def __init__(
        self, snapshots: Reads, transactions: StoreTransactions, is_pending: Callable[[], bool]
    ) -> None:
        """`is_pending` returns whether deleted text is not yet erased.

        The text can be erased only while no snapshot is open.
        """
        self._snapshots = snapshots
        self._is_pending = is_pending
        self._transactions = transactions
        self._next_pause_at = 0.0  # the next time a read may be delayed

    def get_conversation(self, conversation_id: str, *, tenant: str = "") -> StoredConversation:
        with self._snapshot() as conn:
            found = require_conversation(conn, conversation_id, tenant)[1]
            return self._transactions.as_read(conn, found)

    def conversation_with_title(
        self, conversation_id: str, *, tenant: str = ""
    ) -> StoredConversation:
        """Return a conversation with its title, as in a list."""
        with self._snapshot() as conn:
            number, found = require_conversation(conn, conversation_id, tenant)
            return with_titles(conn, [(number, self._transactions.as_read(conn, found))])[0]

    def find_turn(
        self, conversation_id: str, turn_id: str, request_id: str, *, tenant: str = ""
    ) -> StoredTurn | None:
        """Return a turn of this conversation, by its request_id if given, else by its turn id."""
        with self._snapshot() as conn:
            if request_id:
                key = conversation_rows.conversation_key(conversation_id, tenant)
                found = turn_rows.find_turn_of_request(conn, key, request_id)
            elif TURN_ID_PATTERN.fullmatch(turn_id):
                found = turn_rows.find_turn_numbered(conn, int(turn_id))
            else:
                return None
            if found is None:
                return None
            turn = self._transactions.turn_as_read(conn, found.turn)
        is_in_conversation = (turn.conversation_id, turn.tenant) == (conversation_id, tenant)
        return turn if is_in_conversation else None

    def owner(self, conversation_id: str, *, tenant: str = "") -> Owner | None:
        """Return the owner of a conversation, or None if it has no owner or does not exist."""
        with self._snapshot() as conn:
            return owners.owner_of(conn, conversation_id, tenant, self._transactions.session)

    def sessions(self) -> list[Session]:
        """Return the daemons that have the history open, oldest first."""
        with self._snapshot() as conn:
            return owners.sessions(conn)

    def num_conversations(self) -> int:
        with self._snapshot() as conn:
            return conversation_rows.num_conversations(conn)

    def stored_bytes(self) -> dict[str, int]:
        """Return the size of each tenant's conversations."""
        with self._snapshot() as conn:
            return bytes_by_tenant(conn)

    def tenants_of(self, conversation_id: str) -> list[str]:
        """Return the tenants that have a conversation with this id, sorted by name."""
        with self._snapshot() as conn:
            tenants = sorted(bytes_by_tenant(conn))
            return conversation_rows.tenants_of(conn, conversation_id, tenants)

    def list_conversations(
        self, page_size: int = 100, page_token: str = "", *, tenant: str = ""
    ) -> Page:
        """Return a page of conversations, newest first. New conversations do not shift later pages."""
        with self._snapshot() as conn:
            return page_of_conversations(conn, self._transactions, page_size, page_token, tenant)

    def idle_conversations(
        self, before: float, after: int = 0
    ) -> tuple[list[StoredConversation], int | None]:
        """Return some conversations that last changed before the time `before`, and the next `after`.

        The next `after` is None at the end. Conversations with a running turn are left out.
        """
        with self._snapshot() as conn:
            found, last = conversation_rows.idle_conversations(conn, before, after)
            found = [self._transactions.as_read(conn, each) for each in found]
        return [each for each in found if each.running_turn_id is None], last

    def prefix(
        self, prefix_id: str, *, tenant: str = ""
    ) -> tuple[StoredPrefix, list[StoredMessage]]:
        """Return a declared prefix and its messages."""
        with self._snapshot() as conn:
            found = declared_prefixes.require(conn, prefix_id, tenant)
            stored_id = declared_prefixes.stored_id(prefix_id)
            return found, some_messages(conn, stored_id, 0, None, False, tenant)

    def prefixes(
        self, page_size: int = 100, page_token: str = "", *, tenant: str = ""
    ) -> PrefixPage:
        """Return a page of a tenant's prefixes, oldest first."""
        _check_page(page_size, page_token)
        with self._snapshot() as conn:
            after = int(page_token or 0)
            page, more = declared_prefixes.page_of_tenant(conn, tenant, after, page_size)
        return PrefixPage(tuple(each for _, each in page), str(page[-1][0]) if more else "")

    def all_prefixes(self) -> list[StoredPrefix]:
        with self._snapshot() as conn:
            return declared_prefixes.all_prefixes(conn)

    def num_prefixes(self) -> dict[str, int]:
        with self._snapshot() as conn:
            return declared_prefixes.num_by_tenant(conn)

    def response(self, response_id: str, *, tenant: str = "") -> StoredResponse | None:
        with self._snapshot() as conn:
            return responses.find(conn, response_id, tenant)

    def with_pending(
        self, conversation_id: str, *, tenant: str = ""
    ) -> tuple[StoredConversation, Pending]:
        """Return a conversation and the pending messages of its next turn."""
        with self._snapshot() as conn:
            found, pending = with_pending(conn, conversation_id, tenant)
            return self._transactions.as_read(conn, found), pending

    def message_page(
        self,
        conversation_id: str,
        start: int,
        size: int,
        *,
        include_token_ids: bool = False,
        tenant: str = "",
    ) -> MessagePage:
        """Return `size` messages from position `start` on, or fewer if they are long."""
        with self._snapshot() as conn:
            found = require_conversation(conn, conversation_id, tenant)
            return message_rows.read_page(conn, *found, start, start + size, include_token_ids)

    def close(self) -> None:
        self._snapshots.close()

    def _pause_for_erasure(self) -> None:
        """If an erasure is pending, wait a moment without a snapshot, so that the erasure can finish."""
        now = time.monotonic()
        if not self._is_pending() or now < self._next_pause_at:
            return
        self._next_pause_at = now + ERASURE_PAUSE_EVERY_SECONDS
        end = now + ERASURE_PAUSE_SECONDS
        while self._is_pending() and time.monotonic() < end:
            time.sleep(0.002)

    @contextlib.contextmanager
    def _snapshot(self) -> Iterator[Connection]:
        self._pause_for_erasure()
        with self._snapshots.snapshot() as conn:
            yield conn


def page_of_conversations(
    conn: Connection, transactions: StoreTransactions, page_size: int, page_token: str, tenant: str
) -> Page:
    _check_page(page_size, page_token)
    before = int(page_token) if page_token else 2**63 - 1
    page, more = conversation_rows.conversations_before(conn, tenant, before, page_size)
    read = [(number, transactions.as_read(conn, each)) for number, each in page]
    conversations = tuple(with_titles(conn, read))
    tokens = tuple(str(number) for number, _ in page)
    return Page(conversations, tokens[-1] if more else "", tokens)


def _check_page(page_size: int, page_token: str) -> None:
    if not 1 <= page_size <= PAGE_SIZE_MAX:
        raise InvalidArgument("page_size", f"must lie in 1..{PAGE_SIZE_MAX}")
    if page_token and not PAGE_TOKEN_PATTERN.fullmatch(page_token):
        raise InvalidArgument("page_token", "is not a token from an earlier page")


def some_messages(
    conn: Connection,
    conversation_id: str,
    start: int,
    limit: int | None,
    include_token_ids: bool,
    tenant: str,
) -> list[StoredMessage]:
    if start < 0 or (limit is not None and limit < 0):
        raise InvalidArgument("start" if start < 0 else "limit", "must not be negative")
    number, conversation = require_conversation(conn, conversation_id, tenant)
    end = conversation.num_messages
    stop = end if limit is None else min(start + limit, end)
    return message_rows.read_messages(conn, number, conversation, start, stop, include_token_ids)
