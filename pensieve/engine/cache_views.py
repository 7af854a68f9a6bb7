"""Views of the cache for operators: a row for each conversation, and pictures of its chunks.

    "d12b3-2h40c1"    12 chunks on the device, 3 on both tiers, 2 without KV, 40 on the host, 1 being copied

A picture is requested twice a second. So it shows only the conversations that were used last, and only the
last chunks of long conversations. Its cost does not grow with the size of the cache.
"""

from __future__ import annotations

import math
from heapq import nlargest, nsmallest
from itertools import islice

from pensieve.core.cache import KVCache
from pensieve.core.prefix_tree import Chunk

SHOWN_CHUNKS_MAX = 2048  # maximum for each conversation
CONSIDERED_MAX = 4096  # conversations considered for a picture


def cached(
    cache: KVCache, limit: int, least_valuable: bool, now: float
) -> tuple[tuple[str | float, ...], ...]:
    """Return a row per conversation: id, device, host and dropped tokens, idle seconds, value, running.

    Visits every cached chunk, so it must not be called often.
    """
    rows: list[tuple[str | float, ...]] = []
    size = cache.config.chunk_tokens
    for conversation in cache.conversations.values():
        tokens = {"device": 0, "device+host": 0, "host": 0, "dropped": 0}
        for chunk in conversation.chunks():
            tokens[chunk.location] += chunk.filled if chunk.resident else size
        on_device = tokens["device"] + tokens["device+host"]
        running = conversation.attempt_id is not None
        idle = 0.0 if running else now - conversation.idle_since
        value = cache.retention_value(conversation, now)
        rows.append(
            (
                conversation.conversation_id,
                on_device,
                tokens["host"],
                tokens["dropped"],
                idle,
                math.inf if value is None else value,
                float(running),
            )
        )
    if least_valuable:
        found = nsmallest(limit, rows, key=lambda row: row[5])
    else:
        found = nlargest(limit, rows, key=lambda row: float(row[1]) + float(row[2]))
    return tuple(found)


def usage(cache: KVCache, conversation_id: str, now: float) -> dict[str, float]:
    """Return whether a turn of the conversation runs, or its idle seconds; {} if it is not cached."""
    conversation = cache.conversations.get(conversation_id)
    if conversation is None:
        return {}
    if conversation.attempt_id is not None:
        return {"running": 1.0}
    return {"idle_seconds": now - conversation.idle_since}


def picture(cache: KVCache, limit: int, prefix: str) -> tuple[tuple[str | float, ...], ...]:
    """Return a row per conversation: id, tokens, 1 if a turn runs (else 0), omitted chunks, encoded chunks.

    Only ids with this `prefix` are included, and the prefix is removed.
    """
    newest = islice(reversed(cache.conversations.values()), CONSIDERED_MAX)
    conversations = [each for each in newest if _belongs_to(each.conversation_id, prefix)]
    conversations.sort(key=lambda each: (each.attempt_id is None, -each.idle_since))
    rows: list[tuple[str | float, ...]] = []
    for conversation in conversations[:limit]:
        chunks = list(conversation.chunks())
        num_omitted = max(len(chunks) - SHOWN_CHUNKS_MAX, 0)
        running = float(conversation.attempt_id is not None)
        name = conversation.conversation_id.removeprefix(prefix)
        rows.append(
            (
                name,
                conversation.num_tokens,
                running,
                num_omitted,
                encode_chunks(chunks[num_omitted:]),
            )
        )
    return tuple(rows)


def encode_chunks(chunks: list[Chunk]) -> str:
    """Return the chunks as runs: a letter for the location, and a count."""
    text, last, count = "", "", 0
    for chunk in chunks:
        letter = letter_of(chunk)
        if letter != last and count:
            text += f"{last}{count}"
            count = 0
        last = letter
        count += 1
    return f"{text}{last}{count}" if count else text


def letter_of(chunk: Chunk) -> str:
    if chunk.in_flight or chunk.swapping_in:
        return "c"
    if chunk.device_page is None:
        return "-" if chunk.host_page is None else "h"
    return "d" if chunk.host_page is None else "b"


def _belongs_to(conversation_id: str, prefix: str) -> bool:
    """Whether an id belongs to the tenant of this prefix.

    Ids are TENANT/CONVERSATION. Without a tenant, an id has no slash, and the prefix is empty.
    """
    return conversation_id.startswith(prefix) and "/" not in conversation_id[len(prefix) :]
