"""Two clients delete or add items at once, or the daemon is killed meanwhile.

Each race is forced. The first request has read the conversation and waits before its write. Meanwhile the
second request is served completely.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pensieve.store import ConversationStore
from tests.api.http.rig_http import MODEL, Answer, HttpRig, http_rig

WRITES = ("rewind", "change_pending", "delete_last")  # jobs of the store thread


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpRig]:
    with http_rig(Path(tmp_path_factory.mktemp("races")) / "data") as found:
        yield found


class Talk:
    """A conversation over HTTP."""

    def __init__(self, server: HttpRig, *texts: str) -> None:
        self.server = server
        made = server.ask("POST", "/v1/conversations", {"items": [_user(each) for each in texts]})
        self.id = made.value["id"]
        self.path = f"/v1/conversations/{self.id}"

    def respond(self, text: str) -> Answer:
        body = {"model": MODEL, "input": text, "conversation": self.id, "max_output_tokens": 8}
        return self.server.ask("POST", "/v1/responses", body)

    def add(self, text: str) -> Answer:
        return self.server.ask("POST", f"{self.path}/items", {"items": [_user(text)]})

    def delete(self, item_id: str) -> Answer:
        return self.server.ask("DELETE", f"{self.path}/items/{item_id}")

    def items(self) -> list[tuple[str, str]]:
        """Return the ids and texts of all items."""
        found = self.server.ask("GET", f"{self.path}/items?order=asc").value["data"]
        return [(each["id"], each["content"][0]["text"]) for each in found]

    def texts(self) -> list[str]:
        return [text for _, text in self.items()]

    def last(self) -> str:
        return self.items()[-1][0]

    def stored(self) -> list[str]:
        """Return the texts in the history. All other items are pending."""
        return [each.content for each in self.server.rig.messages(self.id)]


def _user(text: str) -> Any:
    return {"type": "message", "role": "user", "content": text}


@contextmanager
def overtaken(server: HttpRig, request: Callable[[], Answer]) -> Iterator[Callable[[], Answer]]:
    """Stop a request between its read and its first write. Yield a function that continues the request."""
    threads = server.rig.daemon.threads
    in_store, is_held, may_continue = threads.in_store, threading.Event(), threading.Event()

    async def held(tenant: str, function: Any, /, *given: Any, **named: Any) -> Any:
        if function.__name__ in WRITES and not is_held.is_set():
            is_held.set()
            await asyncio.to_thread(may_continue.wait)
        return await in_store(tenant, function, *given, **named)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(threads, "in_store", held)
        answer = pool.submit(request)
        assert is_held.wait(60), "nothing was written"

        def finish() -> Answer:
            may_continue.set()
            return answer.result(60)

        try:
            yield finish
        finally:
            may_continue.set()


def test_a_reply_is_not_deleted_if_a_turn_overtakes_the_deletion(server: HttpRig) -> None:
    talk = Talk(server)
    talk.respond("One.")
    reply = talk.last()
    with overtaken(server, lambda: talk.delete(reply)) as finish_deletion:
        answered = talk.respond("Two.")
        assert answered.status == 200
        refused = finish_deletion()
    assert (refused.status, refused.error["param"]) == (400, "item_id")
    assert "only the last item" in refused.error["message"]
    assert talk.texts() == talk.stored()
    assert [text for text in talk.stored() if text in ("One.", "Two.")] == ["One.", "Two."]
    assert len(talk.stored()) == 4
    assert server.ask("GET", f"/v1/responses/{answered.value['id']}").status == 200


def test_two_concurrent_deletions_of_a_pending_item_delete_one_item(server: HttpRig) -> None:
    talk = Talk(server, "One.", "Two.", "Three.")
    last = talk.last()
    with overtaken(server, lambda: talk.delete(last)) as finish_deletion:
        assert talk.delete(last).status == 200
        assert finish_deletion().status == 404
    assert talk.texts() == ["One.", "Two."]
    assert talk.delete(last).status == 404


def test_an_item_added_during_a_deletion_is_not_deleted(server: HttpRig) -> None:
    talk = Talk(server, "One.", "Two.")
    last = talk.last()
    with overtaken(server, lambda: talk.delete(last)) as finish_deletion:
        assert talk.add("Three.").status == 200
        refused = finish_deletion()
    assert (refused.status, refused.error["param"]) == (400, "item_id")
    assert talk.texts() == ["One.", "Two.", "Three."]


def test_a_new_item_with_a_reused_id_is_not_deleted(server: HttpRig) -> None:
    talk = Talk(server, "One.", "Two.")
    last = talk.last()
    with overtaken(server, lambda: talk.delete(last)) as finish_deletion:
        assert talk.delete(last).status == 200
        assert talk.add("Three.").value["data"][0]["id"] == last
        assert finish_deletion().status == 404
    assert talk.texts() == ["One.", "Three."]


def test_a_new_reply_with_a_reused_id_is_not_deleted(server: HttpRig) -> None:
    talk = Talk(server)
    talk.respond("One.")
    (question, _), (reply, _) = talk.items()
    with overtaken(server, lambda: talk.delete(reply)) as finish_deletion:
        for each in (reply, question):
            assert talk.delete(each).status == 200
        talk.respond("One.")
        assert talk.last() == reply
        assert finish_deletion().status == 404
    assert talk.texts() == talk.stored()
    assert len(talk.stored()) == 2


def test_two_concurrent_deletions_of_a_reply_leave_its_question_pending_once(
    server: HttpRig,
) -> None:
    talk = Talk(server)
    talk.respond("One.")
    reply = talk.last()
    with overtaken(server, lambda: talk.delete(reply)) as finish_deletion:
        assert talk.delete(reply).status == 200
        assert finish_deletion().status == 404
    assert (talk.texts(), talk.stored()) == (["One."], [])
    again = talk.respond("Two.")
    assert talk.texts() == talk.stored()
    assert talk.stored()[:2] == ["One.", "Two."]
    assert again.status == 200


def test_a_pending_item_that_a_turn_stored_during_its_deletion_is_kept(server: HttpRig) -> None:
    talk = Talk(server, "One.")
    last = talk.last()
    with overtaken(server, lambda: talk.delete(last)) as finish_deletion:
        assert talk.respond("Two.").status == 200
        assert finish_deletion().status == 400
    assert talk.texts() == talk.stored()
    assert talk.stored()[:2] == ["One.", "Two."]


# -- killed --


@contextmanager
def snapshots(server: HttpRig, folder: Path) -> Iterator[list[Path]]:
    """Copy the history's files after each commit. A daemon killed then would leave these files."""
    figures, data = server.rig.daemon.store.figures, server.rig.daemon.store.folder.path
    copies: list[Path] = []

    def copy(seconds: float) -> None:
        copies.append(folder / str(len(copies)))
        copies[-1].mkdir(parents=True)
        for each in data.glob("conversations.db*"):
            if not each.name.endswith("-shm"):
                shutil.copy(each, copies[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "on_commit", copy)
        yield copies


def texts_after(copy: Path, conversation_id: str) -> list[str] | None:
    """Return the texts of all messages, also pending messages. None: there is no such conversation."""
    with ConversationStore.open(copy, "pensieve test") as store:
        assert store.verify() == []
        names = [each.conversation_id for each in store.list_conversations().conversations]
        if conversation_id not in names:
            return None
        reader = store.reader()
        try:
            pending = reader.with_pending(conversation_id)[1].messages
        finally:
            reader.close()
        messages = store.messages(conversation_id)
        return [each.content for each in messages] + [each.content for each in pending]


def test_a_crash_during_the_deletion_of_a_reply_keeps_the_question(
    server: HttpRig, tmp_path: Path
) -> None:
    talk = Talk(server)
    talk.respond("One.")
    before = talk.texts()
    with snapshots(server, tmp_path) as copies:
        assert talk.delete(talk.last()).status == 200
    seen = [texts_after(each, talk.id) for each in copies]
    assert seen
    assert all(each in (before, ["One."]) for each in seen)
    assert seen[-1] == ["One."]


def test_a_crash_leaves_a_new_conversation_complete_or_absent(
    server: HttpRig, tmp_path: Path
) -> None:
    with snapshots(server, tmp_path) as copies:
        talk = Talk(server, "One.", "Two.")
    seen = [texts_after(each, talk.id) for each in copies]
    assert seen
    assert all(each in (None, ["One.", "Two."]) for each in seen)
    assert seen[-1] == ["One.", "Two."]
