"""A daemon that stores no request of the HTTP APIs unless the request says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pensieve.conversations.daemon_config import DaemonConfig
from pensieve.v1 import conversation_pb2 as pb
from tests.api.http.rig_http import MODEL, HttpRig, http_rig

SECRET = "my secret word"
USER: Any = {"role": "user", "content": SECRET}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HttpRig]:
    config = DaemonConfig(grace_seconds=0.2, store_default=False)
    with http_rig(tmp_path / "data", config=config) as found:
        yield found


def num_conversations(server: HttpRig) -> int:
    found = server.rig.stub.ListConversations(pb.ListConversationsRequest(page_size=100))
    return len(found.conversations)


def ask(server: HttpRig, path: str, **members: Any) -> Any:
    answer = server.ask("POST", path, {"model": MODEL, **members})
    assert answer.status == 200, answer.body
    return answer


def test_nothing_is_stored_unless_the_request_says_so(server: HttpRig, tmp_path: Path) -> None:
    chat = ask(server, "/v1/chat/completions", messages=[USER], max_tokens=4)
    response = ask(server, "/v1/responses", input=SECRET, max_output_tokens=4)
    message = ask(server, "/v1/messages", messages=[USER], max_tokens=4)
    assert all("x-pensieve-conversation-id" not in each.headers for each in (chat, message))
    assert response.value["store"] is False
    assert server.ask("GET", f"/v1/responses/{response.value['id']}").status == 404
    assert num_conversations(server) == 0
    held = [path for path in (tmp_path / "data").rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in path.read_bytes() for path in held)
    ask(server, "/v1/chat/completions", messages=[USER], max_tokens=4, store=True)
    kept = ask(server, "/v1/responses", input=SECRET, max_output_tokens=4, store=True).value
    assert kept["store"] is True
    assert server.ask("GET", f"/v1/responses/{kept['id']}").status == 200
    assert num_conversations(server) == 2


def test_a_named_conversation_is_stored(server: HttpRig) -> None:
    made = server.ask("POST", "/v1/conversations", {}).value["id"]
    ask(server, "/v1/responses", input="Hello", max_output_tokens=4, conversation=made)
    items = server.ask("GET", f"/v1/conversations/{made}/items").value["data"]
    assert [each["role"] for each in items] == ["assistant", "user"]
