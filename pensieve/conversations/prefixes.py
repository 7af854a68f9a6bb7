"""Find a conversation with the same prefix_id whose KV a new conversation can share. Thread-safe.

A template may mix the system prompt with the messages, so two conversations share exactly the first tokens
that are equal in both logs. For each prefix_id of a tenant, this module remembers the conversation that
finished a turn last, with the beginning of its log. It forgets the conversation when the conversation is
rewound or deleted.
"""

from __future__ import annotations

import threading
import zlib
from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from pensieve.store.records import StoredConversation

PREFIXES_MAX = 256
TOKENS_MAX = 16_384  # remembered of a log
CUT_COUNTS = 1024


class SharedPrefix(NamedTuple):
    conversation_id: str
    num_tokens: int


class LogBeginning(NamedTuple):
    """The first tokens of a running turn's conversation, to be shared once the turn is committed."""

    conversation: StoredConversation
    tokens: array[int]


class SharedPrefixes:
    def __init__(self, prefixes_max: int = PREFIXES_MAX) -> None:
        self._prefixes_max = prefixes_max
        self._lock = threading.Lock()
        self._latest: OrderedDict[tuple[str, str], tuple[str, array[int]]] = OrderedDict()

    def remember(self, tenant: str, prefix_id: str, conversation_id: str, log: array[int]) -> None:
        key = (tenant, prefix_id)
        with self._lock:
            self._latest[key] = (conversation_id, log[:TOKENS_MAX])
            self._latest.move_to_end(key)
            if len(self._latest) > self._prefixes_max:
                self._latest.popitem(last=False)

    def forget(self, tenant: str, conversation_id: str) -> None:
        with self._lock:
            gone = [
                key
                for key, (holder, _) in self._latest.items()
                if key[0] == tenant and holder == conversation_id
            ]
            for key in gone:
                del self._latest[key]

    def shared(self, tenant: str, prefix_id: str, tokens: array[int]) -> SharedPrefix | None:
        """Return the conversation to share with, and how many first tokens of `tokens` it has; never all."""
        found = self._latest.get((tenant, prefix_id))
        if found is None:
            return None
        conversation_id, log = found
        num_tokens = common(log, tokens[: len(tokens) - 1])
        return SharedPrefix(conversation_id, num_tokens) if num_tokens else None


def common(one: array[int], other: array[int]) -> int:
    """Return the length of the longest common beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class LogCuts:
    """Count the cuts of logs, so that a turn can tell whether a log that it shares was cut.

    Another thread may rewind or delete a conversation while a turn that shares its KV begins. The count
    changes before the cut is committed, and the engine is told of the cut after the commit. So a turn that is
    submitted while the count is unchanged reaches the engine before the cut. To save memory, several
    conversations have a common count.
    """

    def __init__(self) -> None:
        self._counts = array("Q", bytes(8 * CUT_COUNTS))
        self._lock = threading.Lock()

    def count(self, key: str) -> None:
        """Call this before the log of a conversation is cut; `key` is its `cache_key`."""
        with self._lock:
            self._counts[_place(key)] += 1

    def since(self) -> Callable[[str], bool]:
        """Return a function that tells whether a conversation's log was cut since this call."""
        with self._lock:
            before = self._counts[:]
        return lambda key: self._counts[_place(key)] != before[_place(key)]


def _place(key: str) -> int:
    return zlib.crc32(key.encode()) % CUT_COUNTS


class SharedPrompt:
    """The prompt that the choices of one request share. Each choice is a turn in a new conversation.

    The later turns use the KV of the first turn, as far as their tokens are equal. (Tokens may differ if the
    template writes the time.) Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lender, self._tokens = "", array("I")

    def begin(self, key: str, tokens: array[int]) -> tuple[str, int] | None:
        """Return the key of the first conversation, and how many of its first tokens `tokens` shares.

        Returns None for the first conversation itself.
        """
        with self._lock:
            if not self._lender:
                self._lender, self._tokens = key, tokens
                return None
        return self._lender, common(self._tokens, tokens)
