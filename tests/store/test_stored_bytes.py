"""Each tenant's size is updated in the transactions that change it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from pensieve.errors import PensieveError
from pensieve.store import ConversationStore, NewConversation, NewMessage, NewTurn
from pensieve.store.backend import ServerSession
from pensieve.store.bodies import ROW_BYTES
from tests.scale import SCALE
from tests.store.faulty import writer_of
from tests.store.talk import create, reply, say, user

Open = Callable[..., ConversationStore]


def test_each_stored_object_counts_once_until_its_deletion(
    store: ConversationStore,
) -> None:
    assert store.stored_bytes() == 0
    create(store, "tea")
    empty = store.stored_bytes()
    assert empty > ROW_BYTES
    say(store, "tea", "r1", user("x" * 1000, *range(50)), reply("y" * 500, *range(20)))
    said = store.stored_bytes() - empty
    assert 1500 + 4 * 70 + 3 * ROW_BYTES <= said <= 1500 + 4 * 70 + 3 * ROW_BYTES + 500
    store.fork_conversation("tea", 1, "fork")
    assert store.stored_bytes() - empty - said < 2 * empty, "a fork shares its messages"
    store.delete_conversation("tea")
    assert store.stored_bytes() > said - 500, "the fork still holds the messages"
    store.delete_conversation("fork")
    assert store.stored_bytes() == 0
    assert store.stored_bytes("nobody") == 0


def test_stored_bytes_are_counted_for_each_tenant(store: ConversationStore) -> None:
    for tenant, size in (("a", 10), ("b", 5000)):
        head = [NewMessage("system", "x" * size)]
        store.create_conversation(NewConversation("tea", "f", head, tenant=tenant))
    reader = store.reader()
    found = reader.stored_bytes()
    reader.close()
    assert found == {"a": store.stored_bytes("a"), "b": store.stored_bytes("b")}
    assert found["b"] - found["a"] == 4990
    store.delete_conversation("tea", tenant="b")
    assert store.stored_bytes("b") == 0
    assert store.stored_bytes("a") == found["a"]


@pytest.mark.parametrize("seed", range(6 * SCALE))
def test_stored_bytes_equal_the_sum_of_the_records_after_random_actions(
    open_store: Open, seed: int
) -> None:
    rng, store, number = random.Random(seed), open_store(), 0
    names: list[tuple[str, str]] = []
    for _ in range(150):
        number += 1
        action, tenant = rng.choice(ACTIONS), rng.choice(("", "a", "b"))
        try:
            if action == "create" or not names:
                head = [NewMessage("system", "s" * rng.randint(0, 9000), [1])]
                new = NewConversation(f"c{number}", "f", head, prefix_id="p", tenant=tenant)
                store.create_conversation(new)
                names.append((new.conversation_id, tenant))
            else:
                run_action(store, action, rng, names, number)
        except PensieveError:
            continue  # a turn runs, or a revision does not exist: nothing was changed
    assert store.verify() == []
    for name, tenant in names:
        running = store.get_conversation(name, tenant=tenant).running_turn_id
        if running is not None:
            store.interrupt_turn(running)
        store.delete_conversation(name, tenant=tenant)
    assert [store.stored_bytes(each) for each in ("", "a", "b")] == [0, 0, 0]


ACTIONS = ("create", "turn", "turn", "turn", "again", "fork", "rewind", "retokenize", "delete")


def run_action(
    store: ConversationStore,
    action: str,
    rng: random.Random,
    names: list[tuple[str, str]],
    number: int,
) -> None:
    name, tenant = rng.choice(names)
    if action in ("turn", "again"):
        question = user("q" * rng.randint(0, 5000), *range(rng.randint(1, 99)))
        request = f"r{number}" if action == "turn" else "the same"
        begun = store.begin_turn(name, NewTurn(request, [question]), tenant=tenant)
        end = rng.choice(("finish", "finish", "interrupt", "fail", "go on"))
        if end == "finish":
            answer = reply("a" * rng.randint(0, 5000), *range(rng.randint(1, 99)))
            store.finish_turn(begun.turn.turn_id, answer, "stop", {})
        elif end == "interrupt":
            store.interrupt_turn(begun.turn.turn_id)
        elif end == "fail":
            store.fail_turn(begun.turn.turn_id, "NAN")
    elif action == "fork":
        revision = store.get_conversation(name, tenant=tenant).revision
        store.fork_conversation(name, revision, f"f{number}", tenant=tenant)
        names.append((f"f{number}", tenant))
    elif action == "rewind":
        revision = store.get_conversation(name, tenant=tenant).revision
        store.rewind_conversation(name, rng.randint(0, revision), tenant=tenant)
    elif action == "retokenize":
        num_messages = store.get_conversation(name, tenant=tenant).num_messages
        tokens = [range(rng.randint(1, 200)) for _ in range(num_messages)]
        store.replace_log(name, f"f{number}", tokens, tenant=tenant)
    else:
        store.delete_conversation(name, tenant=tenant)
        names.remove((name, tenant))


def test_verify_reports_a_wrong_byte_count(store: ConversationStore) -> None:
    create(store, "tea")
    with writer_of(store).writing() as conn:
        table = "tenant_bytes" if isinstance(conn, ServerSession) else "tenants"
        conn.execute(f"UPDATE {table} SET stored_bytes = stored_bytes + 1")
    (problem,) = store.verify()
    assert problem.startswith("tenant '': its conversations take")
