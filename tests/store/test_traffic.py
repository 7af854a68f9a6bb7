"""Run random actions on the store.

After each action, verify() the store and compare it with the expected state, kept in plain Python objects.
"""

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
    NewTurn,
    StoredTurnState,
)
from tests.store.faulty import writer_of

Said = tuple[str, int, tuple[int, ...]]  # text, revision, tokens


@dataclass
class Expected:
    """The expected state of a conversation."""

    revision: int = 0
    messages: list[Said] = field(default_factory=list)
    running: int | None = None
    pending: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    request_id: str = ""
    ended: dict[str, tuple[int, str]] = field(default_factory=dict)  # request_id -> revision, reply


class Traffic:
    def __init__(self, open_store: Callable[..., ConversationStore], seed: int) -> None:
        self.rng = random.Random(seed)
        self.open_store = open_store
        self.store = open_store(compact_bytes_min=2000)
        self.expected: dict[str, Expected] = {}
        self.number = 0

    def step(self) -> None:
        actions = [self.create, self.fork, self.rewind, self.delete, self.replace, self.replay]
        self.rng.choice([*actions, *[self.begin] * 4, *[self.end] * 4, self.restart])()

    def random_name(self) -> str | None:
        return self.rng.choice(sorted(self.expected)) if self.expected else None

    def new_name(self) -> str:
        self.number += 1
        return f"n{self.number}"

    def draft(self, role: str) -> NewMessage:
        ids = tuple(self.rng.randrange(2**32) for _ in range(self.rng.choice([0, 1, 3, 40])))
        return NewMessage(role, self.new_name() * self.rng.choice([1, 20, 900]), ids)

    def create(self) -> None:
        name, head = self.new_name(), [self.draft("system")][: self.rng.randrange(2)]
        self.store.create_conversation(NewConversation(name, "f", head))
        self.expected[name] = Expected(messages=[(m.content, 0, tuple(m.token_ids)) for m in head])

    def fork(self) -> None:
        if (source := self.random_name()) is None:
            return
        expected, name = self.expected[source], self.new_name()
        revision = self.rng.choice([0, expected.revision, *[m[1] for m in expected.messages]])
        self.store.fork_conversation(source, revision, name)
        self.expected[name] = Expected(revision, [m for m in expected.messages if m[1] <= revision])

    def rewind(self) -> None:
        if (name := self.random_name()) is None:
            return
        expected = self.expected[name]
        revision = self.rng.choice([0, expected.revision, *[m[1] for m in expected.messages]])
        if expected.running is not None:
            with pytest.raises(TurnRunning):
                self.store.rewind_conversation(name, revision)
            return
        expected.messages = [m for m in expected.messages if m[1] <= revision]
        expected.revision += 1
        rewound = self.store.rewind_conversation(name, revision)
        assert rewound == (expected.revision, sum(len(m[2]) for m in expected.messages))

    def delete(self) -> None:
        if (name := self.random_name()) is None:
            return
        if self.expected[name].running is not None:
            with pytest.raises(TurnRunning):
                self.store.delete_conversation(name)
            return
        del self.expected[name]
        self.store.delete_conversation(name)
        with pytest.raises(NotFound):
            self.store.log(name)

    def replace(self) -> None:
        if (name := self.random_name()) is None or self.expected[name].running is not None:
            return
        expected = self.expected[name]
        ids = [tuple(self.draft("").token_ids) for _ in expected.messages]
        self.store.replace_log(name, self.new_name(), ids)
        expected.messages = [
            (m[0], m[1], new) for m, new in zip(expected.messages, ids, strict=True)
        ]

    def begin(self) -> None:
        if (name := self.random_name()) is None:
            return
        expected = self.expected[name]
        messages = [self.draft("user") for _ in range(self.rng.choice([1, 1, 2]))]
        request = NewTurn(self.new_name(), messages, expected_revision=expected.revision)
        if expected.running is not None:
            with pytest.raises(TurnRunning):
                self.store.begin_turn(name, request)
            return
        expected.running = self.store.begin_turn(name, request).turn.turn_id
        expected.pending = [(m.content, tuple(m.token_ids)) for m in messages]
        expected.request_id = request.request_id

    def end(self) -> None:
        running = [
            name for name in sorted(self.expected) if self.expected[name].running is not None
        ]
        if not running:
            return
        expected = self.expected[self.rng.choice(running)]
        assert expected.running is not None
        outcome = self.rng.choice(["stop", "stop", "stop", "cancelled", "fail", "interrupt"])
        if outcome == "fail":
            assert self.store.fail_turn(expected.running, "x").state is StoredTurnState.FAILED
        elif outcome == "interrupt":
            assert self.store.interrupt_turn(expected.running).state is StoredTurnState.INTERRUPTED
        else:
            answer = self.draft("assistant")
            expected.revision += 1
            revision = self.store.finish_turn(expected.running, answer, outcome, {})
            assert revision == expected.revision
            exchange = [*expected.pending, (answer.content, tuple(answer.token_ids))]
            expected.messages += [(text, revision, ids) for text, ids in exchange]
            expected.ended[expected.request_id] = revision, answer.content
        expected.running = None

    def replay(self) -> None:
        name = self.random_name()
        if name is None or not self.expected[name].ended:
            return
        request_id = self.rng.choice(sorted(self.expected[name].ended))
        turn = self.store.find_turn(name, request_id)
        assert turn is not None
        reply = self.store.turn_messages(turn.turn_id).reply
        assert reply is not None
        assert (turn.revision, reply.content) == self.expected[name].ended[request_id]

    def restart(self) -> None:
        running = {each.running for each in self.expected.values() if each.running is not None}
        is_shared = self.store.is_shared  # if so, closing interrupts running turns
        self.store.close()
        self.store = self.open_store(compact_bytes_min=2000)
        interrupted = {turn.turn_id for turn in self.store.interrupted_at_open}
        assert interrupted == (set() if is_shared else running)
        states = {self.store.get_turn(turn_id).state for turn_id in running}
        assert states <= {StoredTurnState.INTERRUPTED}
        for expected in self.expected.values():
            expected.running = None

    def check(self) -> None:
        assert self.store.verify() == []
        listed = self.store.list_conversations().conversations
        assert {c.conversation_id for c in listed} == set(self.expected)
        for conversation in listed:
            name, expected = (
                conversation.conversation_id,
                self.expected[conversation.conversation_id],
            )
            assert (conversation.revision, conversation.running_turn_id) == (
                expected.revision,
                expected.running,
            )
            messages = self.store.messages(name, include_token_ids=True)
            found = [(m.content, m.revision, tuple(m.token_ids or ())) for m in messages]
            assert found == expected.messages
            log = [token_id for m in expected.messages for token_id in m[2]]
            assert list(self.store.log(name)) == log
            assert conversation.num_tokens == len(log)


@pytest.mark.parametrize("seed", range(3))
def test_random_actions_have_the_results_that_the_model_predicts(
    open_store: Callable[..., ConversationStore], seed: int
) -> None:
    traffic = Traffic(open_store, seed)
    for _ in range(100):
        traffic.step()
        traffic.check()
    assert traffic.number > 40, seed
    assert traffic.store.integrity_check() == []
    for name in sorted(traffic.expected):
        if (running := traffic.expected[name].running) is not None:
            traffic.store.interrupt_turn(running)
        traffic.store.delete_conversation(name)
    with writer_of(traffic.store).reading() as conn:
        for table in ("conversations", "turns", "messages", "history"):
            assert conn.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)
        assert conn.execute("SELECT count(*) FROM bodies WHERE crc IS NOT NULL").fetchone() == (0,)
