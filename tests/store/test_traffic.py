"""Random traffic against a model of a few lines; verify() after every step."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from pensieve.errors import NotFound, TurnRunning
from pensieve.store import (
    ConversationStore,
    NewConversation,
    NewMessage,
    TurnRequest,
    TurnState,
)

Said = tuple[str, int, tuple[int, ...]]  # text, revision, tokens


@dataclass
class Told:
    """What a conversation should hold."""

    revision: int = 0
    messages: list[Said] = field(default_factory=list)
    running: int | None = None
    pending: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    request_id: str = ""
    ended: dict[str, tuple[int, str]] = field(default_factory=dict)  # request_id: revision, reply


class Traffic:
    def __init__(self, open_store: Callable[..., ConversationStore], seed: int) -> None:
        self.rng = random.Random(seed)
        self.open_store = open_store
        self.store = open_store(compact_bytes_min=2000)
        self.told: dict[str, Told] = {}
        self.number = 0

    def step(self) -> None:
        acts = [self.create, self.fork, self.rewind, self.delete, self.replace, self.replay]
        self.rng.choice([*acts, *[self.begin] * 4, *[self.end] * 4, self.restart])()

    def some(self) -> str | None:
        return self.rng.choice(sorted(self.told)) if self.told else None

    def fresh(self) -> str:
        self.number += 1
        return f"n{self.number}"

    def draft(self, role: str) -> NewMessage:
        ids = tuple(self.rng.randrange(2**32) for _ in range(self.rng.choice([0, 1, 3, 40])))
        return NewMessage(role, self.fresh() * self.rng.choice([1, 20, 900]), ids)

    def create(self) -> None:
        name, head = self.fresh(), [self.draft("system")][: self.rng.randrange(2)]
        self.store.create_conversation(NewConversation(name, "f", head))
        self.told[name] = Told(messages=[(m.content, 0, tuple(m.token_ids)) for m in head])

    def fork(self) -> None:
        if (source := self.some()) is None:
            return
        told, name = self.told[source], self.fresh()
        revision = self.rng.choice([0, told.revision, *[m[1] for m in told.messages]])
        self.store.fork_conversation(source, revision, name)
        self.told[name] = Told(revision, [m for m in told.messages if m[1] <= revision])

    def rewind(self) -> None:
        if (name := self.some()) is None:
            return
        told = self.told[name]
        revision = self.rng.choice([0, told.revision, *[m[1] for m in told.messages]])
        if told.running is not None:
            with pytest.raises(TurnRunning):
                self.store.rewind_conversation(name, revision)
            return
        told.messages = [m for m in told.messages if m[1] <= revision]
        told.revision += 1
        rewound = self.store.rewind_conversation(name, revision)
        assert rewound == (told.revision, sum(len(m[2]) for m in told.messages))

    def delete(self) -> None:
        if (name := self.some()) is None:
            return
        if self.told[name].running is not None:
            with pytest.raises(TurnRunning):
                self.store.delete_conversation(name)
            return
        del self.told[name]
        self.store.delete_conversation(name)
        with pytest.raises(NotFound):
            self.store.log(name)

    def replace(self) -> None:
        if (name := self.some()) is None or self.told[name].running is not None:
            return
        told = self.told[name]
        ids = [tuple(self.draft("").token_ids) for _ in told.messages]
        self.store.replace_log(name, self.fresh(), ids)
        told.messages = [(m[0], m[1], new) for m, new in zip(told.messages, ids, strict=True)]

    def begin(self) -> None:
        if (name := self.some()) is None:
            return
        told = self.told[name]
        messages = [self.draft("user") for _ in range(self.rng.choice([1, 1, 2]))]
        request = TurnRequest(self.fresh(), messages, expected_revision=told.revision)
        if told.running is not None:
            with pytest.raises(TurnRunning):
                self.store.begin_turn(name, request)
            return
        told.running = self.store.begin_turn(name, request).turn.turn_id
        told.pending = [(m.content, tuple(m.token_ids)) for m in messages]
        told.request_id = request.request_id

    def end(self) -> None:
        running = [name for name in sorted(self.told) if self.told[name].running is not None]
        if not running:
            return
        told = self.told[self.rng.choice(running)]
        assert told.running is not None
        way = self.rng.choice(["stop", "stop", "stop", "cancelled", "fail", "interrupt"])
        if way == "fail":
            assert self.store.fail_turn(told.running, "x").state is TurnState.FAILED
        elif way == "interrupt":
            assert self.store.interrupt_turn(told.running).state is TurnState.INTERRUPTED
        else:
            answer = self.draft("assistant")
            told.revision += 1
            revision = self.store.finish_turn(told.running, answer, way, {})
            assert revision == told.revision
            said = [*told.pending, (answer.content, tuple(answer.token_ids))]
            told.messages += [(text, revision, ids) for text, ids in said]
            told.ended[told.request_id] = revision, answer.content
        told.running = None

    def replay(self) -> None:
        name = self.some()
        if name is None or not self.told[name].ended:
            return
        request_id = self.rng.choice(sorted(self.told[name].ended))
        turn = self.store.find_turn(name, request_id)
        assert turn is not None
        reply = self.store.turn_messages(turn.turn_id).reply
        assert reply is not None
        assert (turn.revision, reply.content) == self.told[name].ended[request_id]

    def restart(self) -> None:
        self.store.close()
        self.store = self.open_store(compact_bytes_min=2000)
        running = {told.running for told in self.told.values()} - {None}
        assert {turn.turn_id for turn in self.store.interrupted_at_open} == running
        for told in self.told.values():
            told.running = None

    def check(self) -> None:
        assert self.store.verify() == []
        listed = self.store.list_conversations().conversations
        assert {c.conversation_id for c in listed} == set(self.told)
        for conversation in listed:
            name, told = conversation.conversation_id, self.told[conversation.conversation_id]
            assert (conversation.revision, conversation.running_turn_id) == (
                told.revision,
                told.running,
            )
            messages = self.store.messages(name, include_token_ids=True)
            said = [(m.content, m.revision, tuple(m.token_ids or ())) for m in messages]
            assert said == told.messages
            log = [token_id for m in told.messages for token_id in m[2]]
            assert list(self.store.log(name)) == log
            assert conversation.num_tokens == len(log)


@pytest.mark.parametrize("seed", range(3))
def test_the_store_does_what_the_model_says(
    open_store: Callable[..., ConversationStore], seed: int
) -> None:
    traffic = Traffic(open_store, seed)
    for _ in range(100):
        traffic.step()
        traffic.check()
    assert traffic.number > 40, seed
    assert traffic.store.integrity_check() == []
    for name in sorted(traffic.told):
        if (running := traffic.told[name].running) is not None:
            traffic.store.interrupt_turn(running)
        traffic.store.delete_conversation(name)
    with traffic.store._writer.reading() as conn:
        for table in ("conversations", "turns", "messages", "history"):
            assert conn.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)
        assert conn.execute("SELECT count(*) FROM bodies WHERE crc IS NOT NULL").fetchone() == (0,)
