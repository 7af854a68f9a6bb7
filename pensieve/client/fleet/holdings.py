"""Find the replicas that hold KV of a conversation, and the replica that owns the conversation.

The owner serves the conversation. After the conversation has moved, its previous owner may still hold KV.
This KV is stale: it uses memory until it is evicted, but is never read. If the previous owner becomes the
owner again, it drops this KV first. All this applies to replicas that share a history. In separate histories,
the same id means different conversations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pensieve.client.fleet.asking import ReplicaAnswer
from pensieve.errors import NotFound
from pensieve.v1 import admin_pb2 as pb


@dataclass(frozen=True)
class HeldConversation:
    """The KV that one replica holds of one conversation."""

    replica: str
    conversation: pb.CachedConversation
    also_on: tuple[str, ...] = ()  # other replicas with KV of this conversation


def held_of(
    found: Sequence[ReplicaAnswer[pb.ListCachedConversationsResponse]],
    least_valuable: bool,
    limit: int,
) -> list[HeldConversation]:
    """Merge the lists of all replicas and return the first `limit` conversations.

    With `least_valuable`, the lowest retention value comes first; otherwise, the largest conversation.
    """
    holders: dict[tuple[str, str, str], list[str]] = {}
    listed = []
    for answer in found:
        if answer.value is None:
            continue
        name = answer.replica.name
        for each in answer.value.conversations:
            key = (answer.value.history or f"of {name}", each.tenant, each.conversation_id)
            holders.setdefault(key, []).append(name)
            listed.append((key, name, each))
    rows = [
        HeldConversation(name, each, tuple(other for other in holders[key] if other != name))
        for key, name, each in listed
    ]
    if least_valuable:
        rows.sort(key=lambda row: row.conversation.retention_value)
    else:
        rows.sort(key=lambda row: -(row.conversation.device_tokens + row.conversation.host_tokens))
    return rows[:limit]


class KnownBy(StrEnum):
    """How the owner of a conversation is known."""

    HISTORY = "the history's table of owners"
    RUNNING = "a turn of the conversation runs there"
    ONLY = "no other replica knows it"
    LATEST = "its latest turn was there"


@dataclass(frozen=True)
class ServingReplica:
    """The replica that serves a conversation."""

    name: str
    known_by: KnownBy


Explanation = ReplicaAnswer[pb.ExplainConversationResponse]


def owner_of(found: Sequence[Explanation]) -> ServingReplica | None:
    """Return the conversation's owner. If the owner did not answer, the other replicas name it.

    None if no replica knows the owner, or if several histories have a conversation with this id.
    """
    if num_histories(found) > 1:
        return None
    known = {each.replica.name: each.value for each in found if each.value is not None}
    named = [name for name, value in known.items() if value.owned]
    named += [value.owner for value in known.values() if value.owner]
    if named:
        return ServingReplica(named[0], KnownBy.HISTORY)
    running = [name for name, value in known.items() if value.running]
    if running:
        return ServingReplica(running[0], KnownBy.RUNNING) if len(running) == 1 else None
    others_deny = all(isinstance(each.error, NotFound) for each in found if each.value is None)
    if len(known) == 1 and others_deny:
        return ServingReplica(next(iter(known)), KnownBy.ONLY)
    idle = {
        name: value.idle_seconds
        for name, value in known.items()
        if value.HasField("idle_seconds") and holds_kv(value)
    }
    return ServingReplica(min(idle, key=lambda name: idle[name]), KnownBy.LATEST) if idle else None


def num_histories(found: Sequence[Explanation]) -> int:
    """Return how many histories have a conversation with this id."""
    return len(
        {
            each.value.history or f"of {each.replica.name}"
            for each in found
            if each.value is not None
        }
    )


def holds_kv(value: pb.ExplainConversationResponse) -> bool:
    return any(run.place != "dropped" for run in value.runs)
