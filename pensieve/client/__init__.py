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
the turn continues where it was, or a `Restarted` says that its reply begins again.  `Retry` says how often
and how long: by default a daemon that cannot be reached is tried for 11 to 23 seconds, and one that is
loading its model is waited for, up to ten minutes.  A `timeout` ends both.

    Client("127.0.0.1:50051", timeout=120, retry=Retry(retries=12))  # out of reach: tried for 31 to 63 s

**Several daemons** that have one history may be named together.  Each conversation goes to the address that
its id hashes to, and to the next one while that is away; `client.addresses` shows what is known of them.

    Client("gpu1:50051,gpu2:50051,gpu3:50051")  # or a list

**Ending a turn early.**  Who leaves a turn on purpose ends it, at once: by a `timeout`, `close`, the end of
its `with`, a `break`, an exception in the loop, a cancelled task, Ctrl-C, or the end of the client or of the
program.  The next message may follow directly.  The history then is what the caller has seen: of `send`, the
pieces that were given out; of `ask`, nothing, so that the same may be asked again.  `keep_partial` says
otherwise.  An `AsyncClient` must be closed (`async with`) before its event loop ends, for nobody could tell
the server afterwards; what was left without that ends by the server's grace.

    try:
        reply = trip.ask("Tell me everything.", timeout=10)
    except DeadlineExceeded:
        reply = trip.ask("In one sentence?", timeout=10)  # the first message is not in the history

    for delta in trip.send("Tell me everything."):
        if enough(delta):
            break  # the pieces so far are in the history, as a reply that was "cancelled"

Only a turn whose connection broke goes on without a reader, for the server's grace of a few seconds.
`cancel` ends a turn too, keeps all that was generated, and lets the loop read that to its end.

**One turn at a time.**  A message that comes while a turn of its conversation runs raises TurnRunning at
once, naming the turn; it is not retried, since nobody knows how long that turn will take.  What this same
client is about to end is waited for instead, two seconds at most.

**Ctrl-C.**  A KeyboardInterrupt may strike while gRPC holds one of its own locks, which then stays locked:
good enough to end a program, but not to go on with the connection.  To survive it, let the handler of SIGINT
start a thread that calls `turn.cancel()`.
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
