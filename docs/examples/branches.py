"""Ask a question in three forks of a conversation, then undo a turn. The shared history is computed once."""

import sys

from pensieve.client import Client

with Client(*sys.argv[1:2]) as client:
    tale = client.conversation()
    start = tale.ask("Write the beginning of a tale about a lighthouse.", max_tokens=60)

    # Get three answers, each in a fork of the tale.
    endings = []
    for seed in (1, 2, 3):
        branch = tale.fork()
        reply = branch.ask("How does it end?", temperature=1.0, seed=seed, max_tokens=60)
        print(f"{seed}: {reply.text}  ({reply.usage.new_tokens} new tokens)")
        endings.append(branch)
    chosen, *others = endings
    for branch in others:
        branch.delete()

    # Undo the last turn of the chosen fork.
    chosen.rewind(to_revision=start.revision)
    print(chosen.ask("Does it end well?", max_tokens=60))
    print(f"the tale has {tale.get().num_messages} messages, the fork {chosen.get().num_messages}")
