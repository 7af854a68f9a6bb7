"""`cache_salt`: requests with different salts share neither KV nor conversations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.api.http.rig_http import MODEL, HttpRig, http_rig

SECRET = "The treasure lies under the old oak behind the mill, seven steps to the north. " * 3


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HttpRig]:
    with http_rig(tmp_path / "data") as found:
        yield found


def ask(server: HttpRig, path: str, **members: Any) -> tuple[Mapping[str, str], int, str]:
    """Return the headers, the number of cached tokens, and the text of the answer."""
    answer = server.ask("POST", path, {"model": MODEL, "max_tokens": 4, **members})
    assert answer.status == 200, answer.body
    choice = answer.value["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    details = answer.value["usage"].get("prompt_tokens_details") or {}
    return answer.headers, details.get("cached_tokens", 0), text


def test_text_completions_with_different_salts_share_no_kv(server: HttpRig) -> None:
    def cached(**members: Any) -> int:
        return ask(server, "/v1/completions", prompt=SECRET, **members)[1]

    assert cached() == 0
    assert cached() > 0
    assert cached(cache_salt="a") == 0
    assert cached(cache_salt="b") == 0
    assert cached(cache_salt="a") > 0
    answer = server.ask(
        "POST", "/v1/completions", {"model": MODEL, "prompt": "a", "cache_salt": "x" * 300}
    )
    assert answer.status == 400


def test_a_conversation_is_not_continued_with_another_salt(server: HttpRig) -> None:
    said = [{"role": "user", "content": SECRET}]
    _, _, reply = ask(server, "/v1/chat/completions", messages=said, cache_salt="a")
    said += [{"role": "assistant", "content": reply}, {"role": "user", "content": "And then?"}]
    headers, cached, _ = ask(server, "/v1/chat/completions", messages=said, cache_salt="b")
    assert headers["x-pensieve-bound"] == "new"
    assert cached == 0
    headers, cached, _ = ask(server, "/v1/chat/completions", messages=said, cache_salt="a")
    assert headers["x-pensieve-bound"] == "appended"
    assert cached > 0
