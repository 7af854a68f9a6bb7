"""The mailbox is bounded, and a writer waits while the outbox is full."""

from __future__ import annotations

import threading

import pytest

from pensieve.engine.mailbox import Mailbox, Outbox
from pensieve.engine.messages import (
    Answer,
    CancelTurn,
    DeleteConversation,
    GetStats,
)
from pensieve.errors import QueueFull, Unavailable


def test_a_full_mailbox_accepts_only_messages_that_free_resources() -> None:
    box = Mailbox(messages_max=2)
    box.put(GetStats(1))
    box.put(GetStats(2))
    with pytest.raises(QueueFull):
        box.put(GetStats(3))
    box.put(CancelTurn(1, 0))
    box.put(DeleteConversation("a"))
    assert len(box.drain()) == 4
    box.close("bye")
    with pytest.raises(Unavailable, match="bye"):
        box.put(GetStats(4))


def test_a_full_outbox_makes_its_writer_wait() -> None:
    outbox = Outbox(events_max=1)
    outbox.publish([Answer(1)])
    writer = threading.Thread(target=outbox.publish, args=([Answer(2)],))
    writer.start()
    writer.join(0.05)
    assert writer.is_alive()
    assert outbox.get() == Answer(1)
    writer.join(60.0)
    assert outbox.get(60.0) == Answer(2)
    outbox.close()
    assert outbox.get() is None
