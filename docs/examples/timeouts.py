"""Stop replies in three ways, print which parts stay in the history, and set how long the client retries."""

import sys

from pensieve.client import Client, Retry, SamplingOptions
from pensieve.errors import DeadlineExceeded, Unavailable

LONG: SamplingOptions = {"max_tokens": 3000, "ignore_eos": True}

# Retry an unreachable server 12 times (31 to 63 s). Retry for 30 minutes while the server loads its model.
patient = Retry(retries=12, loading_seconds=1800)

with Client(*sys.argv[1:2], timeout=60, retry=patient) as client:
    talk = client.conversation()

    # An incomplete `ask` leaves nothing in the history, so you can ask again.
    try:
        talk.ask("Tell me everything.", timeout=0.5, **LONG)
    except DeadlineExceeded as error:
        print(f"timeout: {error}")
    talk.ask("In one sentence?", max_tokens=30)
    print([message.text for message in talk.messages() if message.role == "user"])

    # An incomplete `send` leaves the delivered part in the history.
    for number, piece in enumerate(talk.send("Tell me everything.", **LONG)):
        print(piece, end="", flush=True)
        if number == 5:
            break
    last = list(talk.messages())[-1]
    print(f"\nkept: {last.text!r}, {last.finish_reason}")

    # `keep_partial` overrides the default of `ask` and `send`.
    with talk.send("Never mind.", keep_partial=False, **LONG) as turn:
        next(turn)
    print(f"{talk.get().num_messages} messages, as before")

# Without retries, the first error is raised.
with Client("127.0.0.1:1", retry=Retry(retries=0)) as nobody:
    try:
        nobody.conversation().ask("Is anybody there?")
    except Unavailable as error:
        print(f"unavailable: {error}")
