"""Ask a question exactly once, even if this program is killed and started again.

The program stores the request_id before it sends the message. A retry with the same request_id attaches to
the running turn, or returns the stored reply. If only the daemon crashes, the SDK retries by itself.
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
    print(f"\n{'stored earlier' if turn.reply.replayed else 'computed now'}")
