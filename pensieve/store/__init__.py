"""The stored history: each conversation's exact tokens, text, turns and revisions, in SQLite or PostgreSQL.

The token log is the source of truth. KV pages are derived from the log and may be lost at any time. At most
one process holds a `DataFolder`. `ConversationStore` is the public class. Its methods take and return frozen
records.
"""

from pensieve.store.conversation_store import ConversationStore
from pensieve.store.folder import DataFolder
from pensieve.store.records import (
    BeginResult,
    NewConversation,
    NewMessage,
    NewTurn,
    Page,
    Rewound,
    StoredConversation,
    StoredMessage,
    StoredTurn,
    StoredTurnState,
    TurnMessages,
)

__all__ = [
    "BeginResult",
    "ConversationStore",
    "DataFolder",
    "NewConversation",
    "NewMessage",
    "NewTurn",
    "Page",
    "Rewound",
    "StoredConversation",
    "StoredMessage",
    "StoredTurn",
    "StoredTurnState",
    "TurnMessages",
]
