"""A conversation that begins with its first turn, before it is stored.

Whatever may refuse that turn comes first: its template, its tokens, its length.  So the turn is drafted on
the record that the conversation will have, and the conversation is stored in the job that begins the turn; a
request that is refused leaves nothing behind.  Should another one take the name meanwhile, the turn is
drafted again: that one was created at another time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from pensieve.service.draft import ConversationSettings
from pensieve.store import records
from pensieve.store.bodies import canonical_json


class Opening(NamedTuple):
    new: records.NewConversation
    conversation: records.Conversation  # as it will be read
    head: Sequence[records.Message]  # the same of its messages


def new_conversation(
    settings: ConversationSettings, fingerprint: str, created_at: float | None = None
) -> records.NewConversation:
    """The system prompt's tokens come with the first turn: templates differ in where it goes."""
    system_prompt = settings.system_prompt
    return records.NewConversation(
        settings.conversation_id,
        fingerprint,
        [records.NewMessage("system", system_prompt)] if system_prompt else [],
        list(settings.tools),
        dict(settings.template_options),
        dict(settings.metadata),
        settings.prefix_id,
        settings.tenant,
        created_at=created_at,
        pending=settings.pending,
    )


def opening(settings: ConversationSettings, fingerprint: str, now: float) -> Opening:
    new = new_conversation(settings, fingerprint, now)
    head = [
        records.Message(index, each.role, each.content, "", {}, 0, 0, 0, None, None)
        for index, each in enumerate(new.messages)
    ]
    conversation = replace(
        new.at_first(now),
        num_messages=len(head),
        tools=tuple(_as_read(new.tools)),
        template_options=_as_read(new.template_options),
        metadata=_as_read(new.metadata),
    )
    return Opening(new, conversation, head)


def _as_read(value: Any) -> Any:
    """The store sorts the names of objects, and templates write them in their order."""
    return json.loads(canonical_json(value))
