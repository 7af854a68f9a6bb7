"""At most as many threads as there are lanes may use the store at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable

from pensieve.store import ConversationStore
from tests.store.faulty import writer_of
from tests.store.talk import create, user


def test_more_threads_than_lanes_raise_a_runtime_error(
    open_store: Callable[..., ConversationStore],
) -> None:
    store = open_store(num_lanes=1, busy_timeout_seconds=0.05)
    create(store, "tea")
    raised: list[RuntimeError] = []

    def ask() -> None:
        try:
            store.get_conversation("tea")
        except RuntimeError as error:
            raised.append(error)

    with writer_of(store).reading():
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert [str(error) for error in raised] == ["the history is being used by another thread"]


def test_another_thread_may_use_the_store_next_and_verify_it_at_any_time(
    store: ConversationStore,
) -> None:
    create(store, "tea", user("hi", 1))
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(list(store.log("tea"))))
    thread.start()
    thread.join()
    with writer_of(store).writing():
        thread = threading.Thread(
            target=lambda: found.append((store.verify(), store.integrity_check()))
        )
        thread.start()
        thread.join()
    assert found == [[1], ([], [])]
