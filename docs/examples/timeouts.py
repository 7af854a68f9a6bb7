"""Leaving a reply before its end, what stays of it then, and how long a server is waited for."""

import sys

from pensieve.client import Client, Retry, SamplingOptions
from pensieve.errors import DeadlineExceeded, Unavailable

LONG: SamplingOptions = {"max_tokens": 3000, "ignore_eos": True}

# For a server that is out of reach, 12 tries in 31 to 63 s; while it loads its model, half an hour.
patient = Retry(retries=12, loading_seconds=1800)

with Client(*sys.argv[1:2], timeout=60, retry=patient) as client:
    talk = client.conversation()

    # `ask` keeps nothing of a reply that came to no end, so the same may be asked again.
    try:
        talk.ask("Tell me everything.", timeout=0.5, **LONG)
    except DeadlineExceeded as error:
        print(f"asked: {error}")
    talk.ask("In one sentence?", max_tokens=30)
    print([message.text for message in talk.messages() if message.role == "user"])

    # `send` keeps what was delivered.
    for number, piece in enumerate(talk.send("Tell me everything.", **LONG)):
        print(piece, end="", flush=True)
        if number == 5:
            break
    last = list(talk.messages())[-1]
    print(f"\nkept: {last.text!r}, {last.finish_reason}")

    # `keep_partial` says otherwise, for both.
    with talk.send("Never mind.", keep_partial=False, **LONG) as turn:
        next(turn)
    print(f"{talk.get().num_messages} messages, as before")

# Who cannot wait is told at once.
with Client("127.0.0.1:1", retry=Retry(retries=0)) as nobody:
    try:
        nobody.conversation().ask("Is anybody there?")
    except Unavailable as error:
        print(f"nobody: {error}")
