"""The SDK.  Importing it loads neither torch nor the server."""

from pensieve.client.aio import AsyncClient
from pensieve.client.aio_conversation import AsyncConversation, AsyncTurn
from pensieve.client.client import Client
from pensieve.client.conversation import Conversation, Turn
from pensieve.client.failures import Retry
from pensieve.client.turns import SamplingOptions, SendOptions
from pensieve.client.values import (
    ConversationState,
    Delta,
    Message,
    Reply,
    Restarted,
    TokenLogprob,
    Usage,
)

__all__ = [
    "AsyncClient",
    "AsyncConversation",
    "AsyncTurn",
    "Client",
    "Conversation",
    "ConversationState",
    "Delta",
    "Message",
    "Reply",
    "Restarted",
    "Retry",
    "SamplingOptions",
    "SendOptions",
    "TokenLogprob",
    "Turn",
    "Usage",
]
