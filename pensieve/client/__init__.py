"""The Python SDK: `Client` and, for asyncio, `AsyncClient`.

    with Client("127.0.0.1:50051") as client:
        trip = client.conversation("trip-42")
        for delta in trip.send("Where shall we go?"):
            print(delta, end="", flush=True)
        print(trip.ask("Why there?"))

    async with AsyncClient("127.0.0.1:50051") as client:
        trip = client.conversation("trip-42")
        async for delta in trip.send("Where shall we go?"):
            print(delta, end="", flush=True)
        print(await trip.ask("Why there?"))

Importing it loads neither torch nor the server.  Threads may share a `Client`; the tasks of one event loop
may share an `AsyncClient`, whose connection belongs to the loop of its first call.

**Lost connections.**  Each message carries a request_id.  After a broken connection, or a restart of the
daemon or its engine, the client sends the same request again, and the server adds the message only once:
the turn continues where it was, or a `Restarted` says that its reply begins again.

**Ending a turn early.**  A reader that stops for good abandons the turn: by `close`, at the end of a
`with`, or by dropping it, as a `for` over `send(...)` does when it is left.  The server stops an abandoned
turn after a few seconds and keeps nothing of it.  `cancel` ends a turn and keeps what it has generated.
A loop that an exception ended may go on if the turn is still held: the next step attaches to it again.
So may a task that was cancelled while it read.

**Ctrl-C.**  To survive it, let the handler of SIGINT start a thread that calls `turn.cancel()`.  A
KeyboardInterrupt may strike while gRPC holds one of its own locks, which then stays locked: good enough to
end a program, but not to go on with the connection.
"""

from pensieve.client.aio import AsyncClient, AsyncConversation, AsyncTurn
from pensieve.client.client import Client, Conversation, Turn
from pensieve.client.requests import SamplingOptions, SendOptions
from pensieve.client.retry import Retry
from pensieve.client.values import (
    ConversationState,
    Delta,
    Message,
    Reply,
    Restarted,
    ServerInfo,
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
    "ServerInfo",
    "TokenLogprob",
    "Turn",
    "Usage",
]
