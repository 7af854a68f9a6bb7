"""Several answers to one question, and a turn that is taken back; nothing is copied or computed twice."""

import sys

from pensieve.client import Client

with Client(*sys.argv[1:2]) as client:
    tale = client.conversation()
    start = tale.ask("Write the beginning of a tale about a lighthouse.", max_tokens=60)

    # Three alternatives: each in a fork, which has the hitale up to here.
    endings = []
    for seed in (1, 2, 3):
        branch = tale.fork()
        reply = branch.ask("How does it end?", temperature=1.0, seed=seed, max_tokens=60)
        print(f"{seed}: {reply.text}  ({reply.usage.new_tokens} new tokens)")
        endings.append(branch)
    chosen, *others = endings
    for branch in others:
        branch.delete()

    # Undo: back to what was there before the last turn.
    chosen.rewind(to_revision=start.revision)
    print(chosen.ask("Does it end well?", max_tokens=60))
    print(
        f"the tale itself has {tale.get().num_messages} messages, the branch {chosen.get().num_messages}"
    )
