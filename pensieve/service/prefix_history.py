"""The store thread's part of declared prefixes: what is shared, and by whom.

The engine knows a prefix by the `cache_key` of the conversation that it is stored as.  Its KV comes to the
engine in one of two ways: the prefix is warmed, or the first turn of a conversation under it has computed
that anyway, and is then lent (`ended`): the prefix becomes a fork of it, unless it is there already.

Every message to the engine that names a prefix follows a job here that has found both to hold the same
messages, in the order in which the store did it; so the engine never shares tokens of another one that has
had the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from pensieve.engine.messages import ForkConversation
from pensieve.errors import PrefixTaken, StorageFull
from pensieve.service.draft import ConversationSettings, Outdated, stored_messages
from pensieve.service.heads import STAND_IN, PrefixSettings, all_messages
from pensieve.service.live_turn import cache_key
from pensieve.store import records
from pensieve.store.declared_prefixes import stored_id
from pensieve.store.remote.remote_store import Store


class PrefixHistory:
    def __init__(
        self,
        store: Store,
        fingerprint: str,
        outdated: Callable[[records.Conversation], Outdated],
        check_storage: Callable[[str], None],
    ) -> None:
        self._store = store
        self._check_storage = check_storage
        self._fingerprint = fingerprint
        self._outdated = outdated
        self._first_turns: dict[int, records.Conversation] = {}  # by turn id, while the turn runs

    def declare(
        self,
        settings: PrefixSettings,
        tokens: Sequence[Sequence[int]],
        template_time: float,
        prefixes_max: int,
    ) -> records.Prefix:
        """Store a prefix with the tokens of each of its messages; StorageFull if there are too many."""
        self._check_storage(settings.tenant)
        given = all_messages(settings)
        messages = (
            stored_messages(given, tokens) if given else [replace(STAND_IN, token_ids=tokens[0])]
        )
        if self._store.prefixes.num_of(settings.tenant) >= prefixes_max:
            raise StorageFull(f"this token may have {prefixes_max} prefixes; delete some")
        return self._store.prefixes.declare(
            records.NewPrefix(
                settings.prefix_id,
                self._fingerprint,
                messages,
                list(settings.tools),
                dict(settings.template_options),
                settings.keep_warm,
                template_time,
                settings.tenant,
            )
        )

    def begin(self, settings: ConversationSettings) -> records.Conversation | Outdated | None:
        """A conversation under its declared prefix; None if no such prefix is declared.

        Outdated if the prefix has tokens of another tokenizer or template.
        """
        found = self._store.prefixes.find(settings.prefix_id, tenant=settings.tenant)
        if found is None:
            return None
        if settings.system_prompt or settings.tools or settings.template_options:
            raise PrefixTaken(
                f"prefix {settings.prefix_id!r} was declared with its own system prompt, tools and options"
            )
        if found.conversation.fingerprint != self._fingerprint:
            return self._outdated(found.conversation)
        return self._store.prefixes.begin(
            records.NewConversation(
                settings.conversation_id,
                self._fingerprint,
                metadata=dict(settings.metadata),
                prefix_id=settings.prefix_id,
                tenant=settings.tenant,
                pending=settings.pending,
            )
        )

    def begin_with_history(
        self,
        settings: ConversationSettings,
        tokens: Sequence[Sequence[int]],
        template_time: float,
    ) -> records.Conversation:
        """A conversation that begins with the messages of its settings, which have these tokens."""
        self._check_storage(settings.tenant)
        return self._store.create_conversation(
            records.NewConversation(
                settings.conversation_id,
                self._fingerprint,
                stored_messages(all_messages(settings), tokens),
                list(settings.tools),
                dict(settings.template_options),
                dict(settings.metadata),
                tenant=settings.tenant,
                began_at=template_time,
                pending=settings.pending,
            )
        )

    def to_keep_warm(self) -> list[tuple[str, str]]:
        """(tenant, id) of the prefixes that are to be kept warm."""
        return self._store.prefixes.to_keep_warm()

    def shared(self, conversation: records.Conversation) -> tuple[str, int]:
        """The key of its prefix, and how many tokens the conversation has in common with that; none: 0."""
        if conversation.began_at is None or not conversation.prefix_id:
            return "", 0
        num_tokens = self._store.prefixes.num_shared_tokens(conversation)
        return self._key(conversation) if num_tokens else "", num_tokens

    def has_turns(self, conversation: records.Conversation) -> bool:
        """Whether its history has more than what it began with."""
        if conversation.began_at is None:  # then that has no tokens
            return conversation.num_tokens > 0
        return self._store.prefixes.has_turns(conversation)

    def begun(self, turn_id: int, conversation: records.Conversation) -> None:
        """The first turn of a conversation under a prefix runs."""
        self._first_turns[turn_id] = conversation

    def forget(self, turn_id: int) -> None:
        """It has computed nothing that is in a history."""
        self._first_turns.pop(turn_id, None)

    def ended(self, turn_id: int) -> ForkConversation | None:
        """What lends the prefix the KV that this turn has computed of it, if it was such a turn."""
        conversation = self._first_turns.pop(turn_id, None)
        if conversation is None:
            return None
        key, num_tokens = self.shared(conversation)
        if not num_tokens:
            return None
        source = cache_key(conversation.tenant, conversation.conversation_id)
        return ForkConversation(source, num_tokens, key)

    @staticmethod
    def _key(conversation: records.Conversation) -> str:
        return cache_key(conversation.tenant, stored_id(conversation.prefix_id))
