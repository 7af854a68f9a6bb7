"""Stop replies in three ways, print what the history keeps of them, and choose how long to retry."""

import sys

from pensieve.client import Client, Retry, SamplingOptions
from pensieve.errors import DeadlineExceeded, Unavailable

LONG: SamplingOptions = {"max_tokens": 3000, "ignore_eos": True}

# Retry an unreachable server 12 times, in 31 to 63 s, and a server that loads its model for half an hour.
patient = Retry(retries=12, loading_seconds=1800)

with Client(*sys.argv[1:2], timeout=60, retry=patient) as client:
    talk = client.conversation()

    # `ask` keeps nothing of an incomplete reply, so you can ask again.
    try:
        talk.ask("Tell me everything.", timeout=0.5, **LONG)
    except DeadlineExceeded as error:
        print(f"timeout: {error}")
    talk.ask("In one sentence?", max_tokens=30)
    print([message.text for message in talk.messages() if message.role == "user"])

    # `send` keeps the delivered part.
    for number, piece in enumerate(talk.send("Tell me everything.", **LONG)):
        print(piece, end="", flush=True)
        if number == 5:
            break
    last = list(talk.messages())[-1]
    print(f"\nkept: {last.text!r}, {last.finish_reason}")

    # `keep_partial` overrides either.
    with talk.send("Never mind.", keep_partial=False, **LONG) as turn:
        next(turn)
    print(f"{talk.get().num_messages} messages, as before")

# Without retries, the first error is raised.
with Client("127.0.0.1:1", retry=Retry(retries=0)) as nobody:
    try:
        nobody.conversation().ask("Is anybody there?")
    except Unavailable as error:
        print(f"unavailable: {error}")
