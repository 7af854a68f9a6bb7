"""The history on disk: every conversation's exact tokens, text, turns and revisions, in SQLite.

The token log is the truth; KV pages are derived from it and may vanish at any time.  A `DataFolder` is
held by one process, a `Writer` is its only read-write connection, and a `ConversationStore` takes and
returns frozen records.
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
