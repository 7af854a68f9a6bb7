"""A beginning that many conversations share: declared once, tokenized once, computed once."""

import contextlib
import sys

from pensieve.client import Client
from pensieve.errors import NotFound

with Client(*sys.argv[1:2]) as client:
    guide = client.prefix("guide")
    with contextlib.suppress(NotFound):  # of an earlier run
        guide.delete()
    declared = guide.create(
        system_prompt="You are a guide in a harbour town. Answer in one sentence.",
        messages=[
            {"role": "user", "content": "Where is the lighthouse?"},
            {"role": "assistant", "content": "At the end of the long pier."},
        ],
        keep_warm=True,  # its KV is computed now, and again should it be lost
    )
    print(f"{declared.num_messages} messages, {declared.num_tokens} tokens")

    for question in ("Where is the market?", "When does the ferry leave?"):
        talk = client.conversation()
        talk.create(prefix_id="guide")
        reply = talk.ask(question, max_tokens=40)
        usage = reply.usage
        print(
            f"{reply.text}  ({usage.shared_tokens} tokens of {usage.shared_from}, {usage.new_tokens} new)"
        )

    guide.delete()  # conversations that began under it stay whole
    print(f"the last one has {talk.get().num_messages} messages")
