import secrets
from dataclasses import dataclass, field
from typing import NamedTuple, Any
from pensieve.service.draft import Ask


@dataclass(frozen=True, slots=True)
class Chat:
    messages: Any
    tools: Any
    template_options: Any
    options: Any
    tenant: str
    session_key: str = ""
    request_id: str = ""
    given_sampling: Any = None
    metadata: Any = None
    num_choices: int = 1


class Bound(NamedTuple):
    live: Any
    conversation_id: str
    how: str
    num_known_messages: int


class Binder:
    def __init__(self, daemon):
        self.daemon = daemon

    async def begin(self, chat, seconds_left=None):
        found = []
        for _ in range(chat.num_choices):
            i = "chat-" + secrets.token_hex(8)
            live = await self.daemon.begin(
                Ask(i, chat.messages, chat.options, chat.tenant, create_if_missing=True),
                seconds_left,
            )
            found.append(Bound(live, i, "new", 0))
        return found
