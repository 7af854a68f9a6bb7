"""Declare a prefix that many conversations share. The daemon computes the KV of the prefix once."""

import contextlib
import sys

from pensieve.client import Client
from pensieve.errors import NotFound

with Client(*sys.argv[1:2]) as client:
    guide = client.prefix("guide")
    with contextlib.suppress(NotFound):  # the prefix exists if this program ran before
        guide.delete()
    declared = guide.create(
        system_prompt="You are a guide in a harbour town. Answer in one sentence.",
        messages=[
            {"role": "user", "content": "Where is the lighthouse?"},
            {"role": "assistant", "content": "At the end of the long pier."},
        ],
        keep_warm=True,  # compute the KV now, and recompute lost KV
    )
    print(f"{declared.num_messages} messages, {declared.num_tokens} tokens")

    for question in ("Where is the market?", "When does the ferry leave?"):
        talk = client.conversation()
        talk.create(prefix_id="guide")
        reply = talk.ask(question, max_tokens=40)
        usage = reply.usage
        print(
            f"{reply.text}  ({usage.shared_tokens} tokens from {usage.shared_from}, {usage.new_tokens} new)"
        )

    guide.delete()  # conversations under the prefix keep its messages
    print(f"the last conversation has {talk.get().num_messages} messages")
