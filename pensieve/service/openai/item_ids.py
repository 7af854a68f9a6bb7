"""Ids of the items of a conversation: which message of it, and which part of that.

    msg_1f0c53a9d2b7e684-3-1     the second part of the fourth message of the conversation with this tag

A message that a client sent is one item; a reply may be several: what it thought, its text, its calls.  An
id stays what it is as long as the message has its place.  Number 0 is kept for the instructions, which a
conversation may get when it has items already.  The tag keeps items of different conversations apart.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from pensieve.service.openai.tool_call_items import call_id

PATTERN = re.compile(r"(?:msg|rs|fc|fco)_([0-9a-f]{16})-([0-9]{1,9})-([0-9]{1,6})")


@dataclass(frozen=True, slots=True)
class Place:
    """A message of a conversation, by its number."""

    tag: str
    number: int

    def item_id(self, prefix: str, part: int = 0) -> str:
        return f"{prefix}_{self.tag}-{self.number}-{part}"

    def call_id(self, number: int) -> str:
        """Of the calls of a reply."""
        return call_id(f"{self.tag}-{self.number}", 0, number)


def tag_of(tenant: str, conversation_id: str) -> str:
    words = f"{tenant}/{conversation_id}".encode()
    return hashlib.blake2b(words, digest_size=8).hexdigest()


def place_of(item_id: str) -> tuple[Place, int] | None:
    """Of an item: its message, and which part of it; None if this is no id of one."""
    found = PATTERN.fullmatch(item_id)
    if found is None:
        return None
    return Place(found[1], int(found[2])), int(found[3])
