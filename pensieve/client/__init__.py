"""The Python SDK: `Client` for threads and `AsyncClient` for asyncio.

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

The SDK imports neither torch nor the server. Threads may share a `Client`. An `AsyncClient` belongs to the
event loop of its first call; the tasks of that loop may share it.

**Retries.** Each message has a request_id, so the server adds a repeated message only once. After a broken
connection or a restart, the client sends the request again. The turn then continues where it was, or a
`Restarted` event says that the reply begins again. By default, the client retries an unreachable daemon for
11 to 23 seconds, and waits up to ten minutes for a daemon that is loading its model. `Retry` changes these
times. A `timeout` limits the whole call, retries included.

    Client("127.0.0.1:50051", timeout=120, retry=Retry(retries=12))  # retries for 31 to 63 s

**Several daemons** that share one history can be given together. A hash of the conversation's id chooses the
address for its requests. While this address is down, the client uses another one. `client.addresses` shows
the state of each address.

    Client("gpu1:50051,gpu2:50051,gpu3:50051")  # or a list

**Stopping a turn early.** All of these stop a turn at once: a timeout, `close`, the end of a `with` block, a
`break`, an exception, a cancelled task, Ctrl-C, and the end of the client or the program. You can then send
the next message. If you stop a `send`, the history keeps the text that was already delivered. If you stop an
`ask`, the history keeps nothing, and you can retry it. `keep_partial` overrides both defaults.

    try:
        reply = trip.ask("Tell me everything.", timeout=10)
    except DeadlineExceeded:
        reply = trip.ask("In one sentence?", timeout=10)  # the first message is not in the history

    for delta in trip.send("Tell me everything."):
        if enough(delta):
            break  # the history keeps the delivered pieces, with the finish reason "cancelled"

Close an `AsyncClient` (`async with`) before its event loop ends. Afterwards, it cannot tell the server to
stop a turn. The server then stops the turn a few seconds later, as after a broken connection.

`cancel` also stops a turn, but keeps all generated text. The loop over the turn then reads the rest of this
text.

**One turn at a time.** A message to a conversation with a running turn raises TurnRunning, which names the
running turn. The client does not retry the message, because the running turn may take long. There is one
exception: if this client is already stopping the running turn, the client first waits up to two seconds for
the end of that turn.

**Ctrl-C.** A KeyboardInterrupt may be raised while gRPC holds an internal lock, which then stays locked. The
program can still end, but it cannot use the connection again. To keep the connection, install a SIGINT
handler that starts a thread, and call `turn.cancel()` in this thread.
"""

from pensieve.client.addresses import AddressState
from pensieve.client.aio import AsyncClient, AsyncConversation, AsyncPrefix, AsyncTurn
from pensieve.client.aio_jobs import AsyncJobs
from pensieve.client.client import Client, Conversation, Prefix, Turn
from pensieve.client.jobs import Jobs
from pensieve.client.requests import SendOptions
from pensieve.client.retry import Retry
from pensieve.client.values import (
    ConversationState,
    Delta,
    Job,
    Message,
    PrefixState,
    Reply,
    Restarted,
    ServerInfo,
    TokenLogprob,
    Usage,
)
from pensieve.sampling import SamplingOptions

__all__ = [
    "AddressState",
    "AsyncClient",
    "AsyncConversation",
    "AsyncJobs",
    "AsyncPrefix",
    "AsyncTurn",
    "Client",
    "Conversation",
    "ConversationState",
    "Delta",
    "Job",
    "Jobs",
    "Message",
    "Prefix",
    "PrefixState",
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
