"""KV is handed over between engines in messages. Replies are right, whatever happens between two messages."""

from __future__ import annotations

import io
import random
import struct
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pensieve.core.adoption import KvPlace
from pensieve.engine import codec
from pensieve.engine.engine import Engine
from pensieve.engine.hand_over import IMPORTS_MAX, HandOver, digest_of, verified
from pensieve.engine.journal import replay
from pensieve.engine.messages import (
    TOKEN_BYTES,
    Answer,
    CancelTurn,
    DeleteConversation,
    EngineMessage,
    EvictConversation,
    ExportKv,
    ForkConversation,
    GetStats,
    ImportKv,
    KvExported,
    OpenImport,
    RewindConversation,
    SubmitTurn,
)
from pensieve.engine.pipe import events_of, message_of, pack_events, pack_message, unpack
from tests.engine.rig import CACHE, Rig, packed, submit
from tests.fakes import LedgerExecutor, reply_to

SLOT = struct.Struct("<qq")  # prefix and turn, as in the ledger
SIZE = CACHE.chunk_tokens


class LedgerPages:
    """The contents of the ledger's pages, as bytes."""

    slot_bytes = SLOT.size

    def __init__(self, executor: LedgerExecutor) -> None:
        self._executor = executor
        self.changed: set[int] = set()  # host pages that differ from what was copied to them

    def read(self, places: Sequence[KvPlace]) -> bytearray:
        body = bytearray()
        for on_host, page, num_slots in places:
            slots = (self._executor.host if on_host else self._executor.device)[page][:num_slots]
            for slot in slots:
                assert slot is not None, "KV is exported that was never written"
                body += SLOT.pack(slot[0], 0)
        return body

    def is_intact(self, place: KvPlace, crc: int) -> bool:
        return not place.on_host or place.page not in self.changed

    def write(self, host_page: int, num_slots: int, data: memoryview, crc: int) -> None:
        assert len(data) == num_slots * SLOT.size
        slots = self._executor.host[host_page] = [None] * SIZE
        for index, slot in enumerate(SLOT.iter_unpack(data)):
            slots[index] = (slot[0], slot[1])


class HandOverEngine(Rig):
    """An engine that hands over KV. It also keeps the logs of conversations, like a store."""

    def __init__(self, seed: int = 0, journal: io.StringIO | None = None, **options: Any) -> None:
        super().__init__(seed, journal, **options)
        self.pages = LedgerPages(self.executor)
        self.engine.hand_over = HandOver(self.scheduler.cache, self.pages)
        self.num_turns = 0

    def say(self, name: str, log: list[int], prompt: list[int], reply: int = 6) -> list[int]:
        """Run a whole turn and return the log after it."""
        attempt_id = self.put(name, log, prompt, reply)
        self.run()
        return self.end_of(attempt_id, log + prompt)

    def put(self, name: str, log: list[int], prompt: list[int], reply: int = 6) -> int:
        self.num_turns += 1
        self.mailbox.put(submit(self.num_turns, name, log, prompt, reply))
        return self.num_turns

    def end_of(self, attempt_id: int, context: list[int]) -> list[int]:
        said = self.sink.reply_of(attempt_id)
        assert said == reply_to(context, len(context) + len(said))
        return context + said

    def recomputed(self) -> int:
        return self.sink.ends()[self.num_turns].usage.recomputed_tokens

    def ask(self, message: EngineMessage) -> Any:
        """Return the direct answer to a message, as it arrives over a pipe."""
        (event,) = send_through_pipe(self.engine, message)
        return event


def send_through_pipe(engine: Engine, message: EngineMessage) -> list[Any]:
    """Send a message through the pipe's codec, and the answers back through it."""
    frame = pack_message(message)
    num_head, num_body = struct.unpack("<II", frame[:8])
    head, body = frame[8 : 8 + num_head], frame[8 + num_head :]
    assert len(body) == num_body
    events: list[Any] = []
    before = engine.sink
    engine.sink = Collecting(events)
    try:
        engine._receive(message_of(unpack(head, body)))
    finally:
        engine.sink = before
    packed_events = pack_events(events)
    again: list[Any] = []
    while packed_events:
        num_head, num_body = struct.unpack("<II", packed_events[:8])
        end = 8 + num_head + num_body
        again += events_of(
            unpack(packed_events[8 : 8 + num_head], packed_events[8 + num_head : end])
        )
        packed_events = packed_events[end:]
    assert again == events
    return events


class Collecting:
    def __init__(self, events: list[Any]) -> None:
        self._events = events

    def publish(self, events: Sequence[Any]) -> None:
        self._events.extend(events)


def export(
    side: HandOverEngine, name: str, num_tokens: int, num_bytes_max: int = 1
) -> list[KvExported]:
    """Export a conversation. Return all parts, from its end to its start."""
    parts: list[KvExported] = []
    before = 0
    while True:
        part = side.ask(ExportKv(7, name, num_tokens, before, num_bytes_max))
        assert isinstance(part, KvExported)
        if part.slots:
            parts.append(part)
        before = part.next_before
        if not before:
            return parts


def import_of(name: str, log: list[int], part: KvExported, is_first: bool) -> ImportKv:
    """Return the message by which the service forwards a part."""
    assert part.digest == digest_of(array("I", log[: part.num_tokens]))
    log_bytes = packed(log) if is_first else b""
    return ImportKv(
        9,
        name,
        part.first_chunk,
        part.slots,
        part.crcs,
        len(log_bytes) // TOKEN_BYTES,
        log_bytes + part.body,
    )


def adopt(side: HandOverEngine, message: ImportKv) -> int:
    answer = side.ask(message)
    assert isinstance(answer, Answer)
    side.scheduler.check(side.clock.now())
    return int(answer.figures["chunks"])


def open_import(side: HandOverEngine, name: str) -> None:
    assert send_through_pipe(side.engine, OpenImport(name)) == []


def hand_over(
    source: HandOverEngine,
    target: HandOverEngine,
    name: str,
    log: list[int],
    num_bytes_max: int = 1,
) -> list[int]:
    """Hand over a conversation. Return the number of adopted chunks of each part."""
    open_import(target, name)
    parts = export(source, name, len(log), num_bytes_max)
    return [
        adopt(target, import_of(name, log, part, index == 0)) for index, part in enumerate(parts)
    ]


def test_a_conversation_continues_on_another_engine_without_recomputing() -> None:
    source, target = HandOverEngine(), HandOverEngine()
    log = source.say("a", [], list(range(1, 15)))
    assert hand_over(source, target, "a", log, 3 * SIZE * SLOT.size) == [
        3,
        -(-len(log) // SIZE) - 3,
    ]
    assert target.say("a", log, [5, 6]) == source.say("a", log, [5, 6])
    assert target.recomputed() == source.recomputed() == 0
    figures = target.engine.take(GetStats(1), target.clock.now())[0].figures  # type: ignore[union-attr]
    assert figures["chunks_adopted"] == -(-len(log) // SIZE)


def test_host_chunks_are_exported_too_and_the_log_with_them() -> None:
    source, target = HandOverEngine(), HandOverEngine()
    log = source.say("a", [], list(range(1, 15)))
    source.mailbox.put(EvictConversation("a", to_host=True))
    source.run()
    hand_over(source, target, "a", log)
    attempt_id = target.put("a", log, [5])
    message = target.mailbox.drain()[0]
    assert isinstance(message, SubmitTurn)
    without = replace(message, tokens=packed([5]), first_position=len(log))
    assert not any(
        type(each).__name__ == "LogNeeded" for each in send_through_pipe(target.engine, without)
    )
    target.run()
    target.end_of(attempt_id, [*log, 5])
    assert target.recomputed() == 0


def test_a_part_has_the_wanted_size_but_at_least_one_chunk() -> None:
    source = HandOverEngine()
    log = source.say("a", [], list(range(1, 15)))
    chunk_bytes = SIZE * SLOT.size
    assert {len(part.slots) for part in export(source, "a", 16, 1)} == {1}
    assert [len(part.slots) for part in export(source, "a", 16, 2 * chunk_bytes)] == [2, 2]
    assert [part.num_tokens for part in export(source, "a", 7, chunk_bytes)] == [7, 4]
    assert sum(sum(part.slots) for part in export(source, "a", 999)) == len(log) - 1


def test_running_and_missing_conversations_are_not_exported() -> None:
    source = HandOverEngine()
    log = source.say("a", [], [1, 2, 3])
    assert source.ask(ExportKv(1, "b", 9, 0, 1)).refusal == "NOT_HERE"
    source.put("a", log, [4, 5], 6)
    source.engine.step()
    assert source.ask(ExportKv(2, "a", 9, 0, 1)).refusal == "RUNS"
    source.run()
    assert source.ask(ExportKv(3, "a", 9, 0, 1)).refusal == ""
    source.engine.hand_over = HandOver(source.scheduler.cache, None)
    assert source.ask(ExportKv(4, "a", 9, 0, 1)).refusal == "NO_PAGES"


def test_chunks_that_a_running_turn_may_still_discard_are_not_exported() -> None:
    """Pages that a running turn of a fork holds are exported only from the host."""
    source = HandOverEngine()
    log = source.say("a", [], list(range(1, 10)))
    source.mailbox.put(ForkConversation("a", 8, "b"))
    source.put("b", log[:8], [7], 30)
    source.engine.step()
    parts = export(source, "a", len(log))
    assert all(part.first_chunk >= 2 for part in parts)
    source.run()


def test_a_corrupted_host_page_is_not_exported() -> None:
    source, target = HandOverEngine(), HandOverEngine()
    log = source.say("a", [], list(range(1, 15)))
    source.mailbox.put(EvictConversation("a", to_host=True))
    source.run()
    (conversation,) = source.scheduler.cache.conversations.values()
    second = conversation.chunks()[1].host_page
    assert second is not None
    source.pages.changed.add(second)
    num_chunks = len(conversation.chunks())
    assert hand_over(source, target, "a", log, 99 * SIZE * SLOT.size) == [num_chunks - 2, 1]
    target.say("a", log, [5])
    assert target.recomputed() == SIZE


@pytest.mark.parametrize("where", ["first byte", "last byte", "length", "log"])
def test_bytes_corrupted_in_transfer_are_not_adopted(where: str) -> None:
    source, target = HandOverEngine(), HandOverEngine()
    log = source.say("a", [], list(range(1, 15)))
    (part,) = export(source, "a", len(log), 99 * SIZE * SLOT.size)
    message = import_of("a", log, part, True)
    body, start = bytearray(message.body), len(log) * TOKEN_BYTES
    if where == "first byte":
        body[start] ^= 1
    elif where == "last byte":
        body[-1] ^= 128
    elif where == "length":
        del body[-1]
    else:
        message = replace(message, num_log_tokens=len(log) - 1)
    open_import(target, "a")
    num_chunks = len(part.slots)
    expected = num_chunks - 1 if where.endswith("byte") else 0
    assert adopt(target, replace(message, body=bytes(body))) == expected
    target.say("a", log, [5])
    assert (target.recomputed() == len(log) - 1) == (expected == 0)


def test_a_part_without_an_open_import_is_not_adopted() -> None:
    source, target = HandOverEngine(), HandOverEngine()
    log = source.say("a", [], list(range(1, 15)))
    first, *_ = export(source, "a", len(log))
    assert adopt(target, import_of("a", log, first, True)) == 0


@pytest.mark.parametrize(
    "message",
    [
        submit(1, "a", [1], [2], 1),
        RewindConversation("a", 3),
        DeleteConversation("a"),
        ForkConversation("b", 3, "a"),
    ],
    ids=lambda each: type(each).__name__,
)
@pytest.mark.parametrize("has_begun", [False, True])
def test_any_use_or_change_of_a_conversation_ends_its_import(
    message: EngineMessage, has_begun: bool
) -> None:
    source, target = HandOverEngine(), HandOverEngine()
    log = source.say("a", [], list(range(1, 15)))
    parts = export(source, "a", len(log))
    open_import(target, "a")
    if has_begun:
        assert adopt(target, import_of("a", log, parts[0], True)) == 1
    target.mailbox.put(message)
    target.run()
    assert adopt(target, import_of("a", log, parts[1], not has_begun)) == 0


def test_no_import_is_opened_while_a_turn_runs_or_kv_exists() -> None:
    source, target = HandOverEngine(), HandOverEngine()
    log = source.say("a", [], list(range(1, 15)))
    parts = export(source, "a", len(log))
    target.put("a", [], log, 30)
    target.engine.step()
    open_import(target, "a")
    target.mailbox.put(CancelTurn(1, 0))
    target.run()
    assert "a" not in target.scheduler.cache.conversations
    assert adopt(target, import_of("a", log, parts[0], True)) == 0
    target.say("a", [], log, 1)
    open_import(target, "a")
    assert adopt(target, import_of("a", log, parts[0], True)) == 0


def test_an_eviction_between_two_parts_ends_the_import() -> None:
    source, target = HandOverEngine(), HandOverEngine()
    log = source.say("a", [], list(range(1, 15)))
    parts = export(source, "a", len(log))
    open_import(target, "a")
    assert adopt(target, import_of("a", log, parts[0], True)) == 1
    target.mailbox.put(EvictConversation("a"))
    target.run()
    assert adopt(target, import_of("a", log, parts[1], False)) == 0
    assert adopt(target, import_of("a", log, parts[0], True)) == 0  # this import is closed


def test_the_oldest_of_too_many_imports_is_closed() -> None:
    source, target = HandOverEngine(), HandOverEngine()
    log = source.say("a", [], list(range(1, 15)))
    parts = export(source, "a", len(log))
    open_import(target, "a")
    for number in range(IMPORTS_MAX):
        open_import(target, f"b{number}")
    assert adopt(target, import_of("a", log, parts[0], True)) == 0


def test_parts_with_invalid_slot_counts_are_refused() -> None:
    target = HandOverEngine()
    for first, slots, log in ((0, (SIZE + 1,), 9), (2, (1,), 8), (0, (SIZE, 0), 3), (0, (), 3)):
        open_import(target, "a")
        body = packed(list(range(log))) + bytes(sum(slots) * SLOT.size)
        message = ImportKv(1, "a", first, slots, (0,) * len(slots), log, body, (), True)
        assert adopt(target, message) == 0
    assert not target.scheduler.cache.conversations


def test_the_result_of_the_checksums_is_kept_in_the_journal() -> None:
    message = ImportKv(1, "a", 0, (2,), (0,), 0, bytes(32))
    judged = verified(message, SLOT.size)
    assert (judged.damaged, judged.is_verified) == ((0,), True)
    items, _ = codec.encode(judged)
    again = codec.decode_named(items[0], codec.named(items))
    assert (again.damaged, again.is_verified) == ((0,), True)


class RandomEvents(random.Random):
    """Random events between two messages."""

    def damage(self, message: ImportKv) -> ImportKv | None:
        """Return the message, a damaged message, or None."""
        roll = self.random()
        if roll < 0.7:
            return message
        if roll < 0.8:
            return None
        body = bytearray(message.body)
        start = message.num_log_tokens * TOKEN_BYTES
        if roll < 0.9:
            body[self.randrange(start, len(body))] ^= 1 << self.randrange(8)
        else:
            del body[self.randrange(start, len(body)) :]
        return replace(message, body=bytes(body))


@pytest.mark.parametrize("first_seed", range(0, 60, 20))
def test_replies_and_replays_are_correct_despite_random_events_between_messages(
    first_seed: int,
) -> None:
    """Two engines have their own traffic. Conversations move back and forth, with faults."""
    total_adopted = 0
    for seed in range(first_seed, first_seed + 20):
        choose, journals = RandomEvents(seed), (io.StringIO(), io.StringIO())
        depth = 1 + seed % 2
        sides = [HandOverEngine(seed + i, journals[i], depth=depth) for i in range(2)]
        logs: dict[str, list[int]] = {}
        owner: dict[str, int] = {}
        for _ in range(12):
            name = f"c{choose.randrange(5)}"
            log, at = logs.get(name, []), owner.get(name, choose.randrange(2))
            if log and choose.random() < 0.6:
                source, at = sides[at], 1 - at
                target = sides[at]
                target.mailbox.put(DeleteConversation(name))
                target.run()
                open_import(target, name)
                has_begun = False
                for part in export(source, name, len(log), choose.choice((1, 200, 10_000))):
                    act = choose.random()
                    if act < 0.1:
                        target.mailbox.put(EvictConversation(name))
                    elif act < 0.15:
                        break
                    elif act < 0.3:
                        other = f"x{choose.randrange(3)}"
                        target.put(other, [], [choose.randrange(500) for _ in range(9)], 4)
                    for _ in range(choose.randrange(3)):
                        target.engine.step()
                        target.clock.advance(choose.choice((0.01, 5.0)))
                    message = choose.damage(import_of(name, log, part, not has_begun))
                    if message is not None:
                        count = adopt(target, message)
                        has_begun |= count > 0
                        total_adopted += count
            owner[name] = at
            prompt = [choose.randrange(500) for _ in range(choose.randint(1, 6))]
            if len(log) + len(prompt) + 8 < CACHE.device_tokens_max:
                logs[name] = sides[at].say(name, log, prompt, choose.randint(1, 6))
        for side, journal in zip(sides, journals, strict=True):
            side.run()
            assert replay(io.StringIO(journal.getvalue())) > 0
    assert total_adopted > 20
