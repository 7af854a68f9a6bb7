"""A reply as it is generated, and where the tokens of its conversation came from."""

import sys

from pensieve.client import Client, Restarted

with Client(*sys.argv[1:2]) as client:
    trip = client.conversation()
    for question in ("My name is Ada and I live in Oslo.", "What is my name?"):
        print(f"> {question}")
        turn = trip.send(question, max_tokens=60)
        for piece in turn:
            if isinstance(piece, Restarted):  # the server has lost it, and begins again
                print("\n(again, from the beginning)")
            print(piece, end="", flush=True)
        usage = turn.reply.usage
        print(
            f"\n(read {usage.prompt_tokens} tokens: {usage.new_tokens} new, {usage.device_tokens} kept;"
        )
        print(
            f" {turn.reply.finish_reason}, the first token after {usage.first_token_seconds:.3f} s)"
        )
