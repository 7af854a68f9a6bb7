"""Print a reply while it is generated, then print how much of the context was cached."""

import sys

from pensieve.client import Client, Restarted

with Client(*sys.argv[1:2]) as client:
    trip = client.conversation()
    for question in ("My name is Ada and I live in Oslo.", "What is my name?"):
        print(f"> {question}")
        turn = trip.send(question, max_tokens=60)
        for piece in turn:
            if isinstance(piece, Restarted):  # the server generates the reply again
                print("\n(the reply begins again)")
            print(piece, end="", flush=True)
        reply, usage = turn.reply, turn.reply.usage
        print(
            f"\n({usage.new_tokens} new tokens, {usage.device_tokens} cached, {reply.finish_reason},"
        )
        print(f" first token after {usage.first_token_seconds:.3f} s)")
