"""After a power loss at any moment, acknowledged data is present and deleted data is gone."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pensieve.errors import PensieveError
from pensieve.store import ConversationStore, StoredTurnState
from tests.scale import SCALE
from tests.store.power import NOTE, Event, files_after, recorder, run_recorded

NUM_SEEDS = 150 * SCALE

# Runs turns on four conversations, and between them deletions and compaction. Notes each promise.
# The log is checkpointed often, and the process ends without closing, as if it were killed.
CHILD = """
import importlib, json, os, random, sys
from pathlib import Path
from pensieve.store import ConversationStore
from tests.store.faulty import writer_of
from tests.scale import SCALE
from tests.store.power import note
from tests.store.talk import create, reply, say, user

def tell(what, *words):
    note(json.dumps([what, *words]).encode())

driver = importlib.import_module(sys.argv[2])
store = ConversationStore.open(Path(sys.argv[1]), "test", driver=driver, compact_bytes_min=1)
with writer_of(store).reading() as conn:
    conn.execute("PRAGMA wal_autocheckpoint = 30")
    if sys.argv[3]:
        conn.execute(f"PRAGMA synchronous = {sys.argv[3]}")
rng = random.Random(4)
names = []
for number in range(60):
    if len(names) < 4:
        names.append(f"c{number}")
        create(store, names[-1])
    name = rng.choice(names)
    text = f"mark-{number:04d}" + "x" * rng.choice([5, 300, 3000, 12000])
    say(store, name, f"r{number}", user(text, number), reply(text, number))
    tell("said", name, f"r{number}", text)
    store.erasure.step()
    if rng.random() < 0.15:
        names.remove(name)
        tell("deleting", name)
        store.delete_conversation(name)
        tell("deleted", name)
os._exit(0)
"""


@pytest.fixture(scope="module")
def library() -> Path:
    library = recorder()
    if library is None:
        pytest.skip("it takes Linux and a C++ compiler to record writes")
    return library


def record(library: Path, folder: Path, driver: Any, synchronous: str = "") -> list[Event]:
    folder.mkdir()
    return run_recorded(library, folder, ["-c", CHILD, str(folder), driver.__name__, synchronous])


def promised(events: Sequence[Event]) -> tuple[dict[str, dict[str, str]], set[str]]:
    """Return the texts of acknowledged turns by conversation and request_id, and the deleted texts."""
    turns: dict[str, dict[str, str]] = {}
    last: dict[str, dict[str, str]] = {}
    gone: set[str] = set()
    for event in events:
        if event.what != NOTE:
            continue
        what, name, *rest = json.loads(event.content)
        if what == "said":
            request_id, text = rest
            turns.setdefault(name, {})[request_id] = text
        elif what == "deleting":  # from now on, the text may be present or not
            last[name] = turns.pop(name)
        else:
            gone |= set(last[name].values())
    return turns, gone


def broken_promises(folder: Path, events: Sequence[Event], driver: Any) -> list[str]:
    """Return the promises that a history breaks after a power loss that follows these events."""
    turns, gone = promised(events)
    wrong = []
    try:
        with ConversationStore.open(folder, "test", driver=driver) as store:
            wrong += store.integrity_check() + store.verify()
            for name, texts in turns.items():
                for request_id, text in texts.items():
                    turn = store.find_turn(name, request_id)
                    if turn is None or turn.state is not StoredTurnState.COMPLETED:
                        wrong.append(f"{name} {request_id} is lost")
                        continue
                    (prompt,), reply = store.turn_messages(turn.turn_id)
                    if reply is None or (prompt.content, reply.content) != (text, text):
                        wrong.append(f"{name} {request_id} has other messages")
            left = b"".join(path.read_bytes() for path in folder.iterdir())
            wrong += [f"{text[:9]} was deleted" for text in gone if text[:9].encode() in left]
    except PensieveError as error:
        wrong.append(str(error))
    return wrong


def problems_after_losses(
    events: Sequence[Event], folder: Path, driver: Any, num_seeds: int
) -> list[str]:
    """Return the problems after power losses at several moments. Half of them come right after a promise."""
    notes = [at for at, event in enumerate(events) if event.what == NOTE]
    found = []
    for seed in range(num_seeds):
        rng = random.Random(seed)
        at = rng.choice(notes) if seed % 2 else rng.randrange(notes[0], len(events))
        place = folder / str(seed)
        place.mkdir(parents=True)
        for name, content in files_after(events[: at + 1], rng).items():
            (place / name).write_bytes(content)
        found += [
            f"seed {seed}: {each}" for each in broken_promises(place, events[: at + 1], driver)
        ]
    return found


def test_a_power_loss_loses_no_acknowledged_turn(
    library: Path, tmp_path: Path, driver: Any
) -> None:
    events = record(library, tmp_path / "data", driver)
    assert sum(event.what == NOTE for event in events) > 60
    assert sum(event.name.endswith("-wal") for event in events) > 500
    assert problems_after_losses(events, tmp_path / "after", driver, NUM_SEEDS) == []


@pytest.mark.parametrize("synchronous", ["NORMAL", "OFF"])
def test_without_a_sync_at_each_commit_acknowledged_turns_would_be_lost(
    library: Path, tmp_path: Path, driver: Any, synchronous: str
) -> None:
    """This shows that the simulated power loss of the test above can lose data."""
    events = record(library, tmp_path / "data", driver, synchronous)
    found = problems_after_losses(events, tmp_path / "after", driver, 12)
    assert any("is lost" in each for each in found)
