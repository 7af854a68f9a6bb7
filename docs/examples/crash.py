"""A program that may crash at any moment, and still asks once: run it again, and it goes on.

The name of the message, its request_id, is written down before it is sent.  Said again under this name it is
answered with the same turn: with its pieces from the first one on while it runs, with the stored reply later.
A crash of the daemon needs nothing of this: the SDK says the message again by itself.
"""

import json
import sys
import uuid
from pathlib import Path

from pensieve.client import Client

note = Path(sys.argv[2] if sys.argv[2:] else "question.json")
if not note.exists():
    asked = {
        "conversation_id": "report",
        "request_id": uuid.uuid4().hex,
        "text": "Sum up the year.",
    }
    note.write_text(json.dumps(asked))
asked = json.loads(note.read_text())

with Client(*sys.argv[1:2]) as client:
    report = client.conversation(asked["conversation_id"])
    turn = report.send(
        asked["text"], request_id=asked["request_id"], max_tokens=400, ignore_eos=True
    )
    for piece in turn:
        print(piece, end="", flush=True)
    print(f"\n{'was there already' if turn.reply.replayed else 'computed now'}")
