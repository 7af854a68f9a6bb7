"""Derive the titles of conversations for lists.

A title is the string `title` of the metadata, or else the first words of the first user message. Titles are
not stored. They are computed for each page of a list, with at most three more statements.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pensieve.store.records import StoredConversation

if TYPE_CHECKING:
    from sqlite3 import Connection

TITLE_CHARACTERS_MAX = 80
POSITIONS_MAX = 200  # only this many messages are searched for the first user message
BEGINNING_BYTES = 2048  # how much of a message's JSON is read; a character takes up to twelve bytes
TEXT_CHARACTERS_MAX = 2048  # how much of a text is used; it may begin with white space
CONTENT = re.compile(rb'\{"content":"((?:[^"\\]|\\u[0-9a-f]{4}|\\[^u])*)')

# longer messages give no title, because SQLite would read them completely
MESSAGE_BYTES_MAX = 1 << 20
BEGINNING = (
    f"CASE WHEN length(b.private) <= {MESSAGE_BYTES_MAX}"
    f" THEN substr(b.private, 1, {BEGINNING_BYTES}) END"
)

FIRST_OF_HISTORY = """
    SELECT c.conversation, (SELECT {beginning}
        FROM history h JOIN messages m USING (message) JOIN bodies b USING (body)
        WHERE h.conversation = c.conversation AND h.position < {positions}
            AND h.revision >= {revision} AND m.role = 'user'
        ORDER BY h.position LIMIT 1)
    FROM conversations c WHERE c.conversation IN ({numbers})
"""
FIRST_OF_RUNNING_TURN = """
    SELECT t.conversation, (SELECT {beginning}
        FROM messages m JOIN bodies b USING (body)
        WHERE m.turn_id = t.turn_id AND m.role = 'user' ORDER BY m.message LIMIT 1)
    FROM turns t WHERE t.turn_id IN ({numbers})
"""


def with_titles(
    conn: Connection, page: Sequence[tuple[int, StoredConversation]]
) -> list[StoredConversation]:
    """Return the conversations of a page with their titles. `page` has their row numbers, too."""
    titles = {number: _given_title(each) for number, each in page}
    unnamed = [(number, each) for number, each in page if not titles[number]]
    # Messages of a declared prefix give no title, because many conversations begin with them.
    for revision, numbers in (
        (0, [number for number, each in unnamed if not each.prefix_id]),
        (1, [number for number, each in unnamed if each.prefix_id]),
    ):
        titles |= _titles_from_messages(conn, FIRST_OF_HISTORY, numbers, revision)
    # The first turn's message joins the history only when that turn ends.
    running = [
        each.running_turn_id
        for number, each in unnamed
        if each.running_turn_id is not None and not titles[number]
    ]
    titles |= _titles_from_messages(conn, FIRST_OF_RUNNING_TURN, running)
    return [replace(each, title=titles[number]) for number, each in page]


def title_of(text: str) -> str:
    """Return the first words of a text as one line without control characters."""
    beginning = text[:TEXT_CHARACTERS_MAX]
    line = " ".join("".join(each if each.isprintable() else " " for each in beginning).split())
    if len(line) <= TITLE_CHARACTERS_MAX:
        return line
    words = line[:TITLE_CHARACTERS_MAX].rpartition(" ")[0]
    if len(words) <= TITLE_CHARACTERS_MAX // 2:  # a language without spaces, or a very long word
        words = line[: TITLE_CHARACTERS_MAX - 1]
    return words + "…"


def _given_title(conversation: StoredConversation) -> str:
    given = conversation.metadata.get("title")
    return title_of(given) if isinstance(given, str) else ""


def _titles_from_messages(
    conn: Connection, statement: str, numbers: Iterable[int], revision: int = 0
) -> dict[int, str]:
    """Return titles by row number of the conversation. `numbers` are the statement's parameters."""
    joined = ",".join(map(str, numbers))
    if not joined:
        return {}
    rows = conn.execute(
        statement.format(
            beginning=BEGINNING, positions=POSITIONS_MAX, revision=revision, numbers=joined
        )
    )
    return {number: _title_of_body(bytes(beginning or b"")) for number, beginning in rows}


def _title_of_body(beginning: bytes) -> str:
    """Return the title of a message, from the first bytes of its JSON; empty if they are damaged."""
    found = CONTENT.match(beginning)
    return "" if found is None else title_of(json.loads(b'"' + found[1] + b'"'))
