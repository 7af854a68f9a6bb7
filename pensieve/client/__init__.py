"""The SDK.  Importing it loads neither torch nor the server."""

from pensieve.client.aio import AsyncClient, AsyncConversation, AsyncTurn
from pensieve.client.client import Client, Conversation, Turn
from pensieve.client.failures import Retry
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
    "TokenLogprob",
    "Turn",
    "Usage",
]
