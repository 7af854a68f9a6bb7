"""Tokenizing, metrics, health during a drain, the OpenAPI document, and paths that are not served."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from pensieve.errors import ConfigError
from pensieve.guard.callers import new_token, tokens_of
from pensieve.guard.exposure import Listening, check_exposure
from tests.api.http.rig_http import MODEL, HttpRig, http_rig

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "How are you?"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpRig]:
    data = Path(tmp_path_factory.mktemp("http")) / "data"
    with http_rig(data, http={"http": "127.0.0.1:0", "metrics": "http"}) as found:
        yield found


def ask(server: HttpRig, path: str, **body: Any) -> Any:
    answer = server.ask("POST", path, body)
    assert answer.status == 200, answer.body
    return answer.value


# -- tokens --


def test_tokenize_matches_the_prompt_of_a_completion(server: HttpRig) -> None:
    found = ask(server, "/tokenize", prompt="Once upon a time", model=MODEL)
    assert found["count"] == len(found["tokens"]) > 1
    assert found["token_strs"] is None
    done = ask(server, "/v1/completions", model=MODEL, prompt="Once upon a time", max_tokens=1)
    assert done["usage"]["prompt_tokens"] == found["count"]
    assert ask(server, "/detokenize", tokens=found["tokens"]) == {"prompt": "Once upon a time"}
    strings = ask(server, "/tokenize", prompt="Once upon", return_token_strs=True)["token_strs"]
    assert "".join(strings) == "Once upon"


def test_tokenize_matches_the_prompt_of_a_chat(server: HttpRig) -> None:
    found = ask(server, "/tokenize", messages=[USER])
    done = server.chat(USER["content"]).value
    assert done["usage"]["prompt_tokens"] == found["count"]
    assert USER["content"] in ask(server, "/detokenize", tokens=found["tokens"])["prompt"]
    bare = ask(server, "/tokenize", messages=[USER], add_generation_prompt=False)
    assert found["tokens"][: bare["count"]] == bare["tokens"]
    assert bare["count"] < found["count"]
    begun = {"messages": [USER, {"role": "assistant", "content": "Well"}]}
    continued = ask(server, "/tokenize", **begun, continue_final_message=True)
    assert continued["tokens"][: found["count"]] == found["tokens"]
    assert ask(server, "/detokenize", tokens=continued["tokens"])["prompt"].endswith("Well")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [USER]}, "messages"),
        ("/tokenize", {"prompt": "a", "model": "gpt-9"}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
    ],
)
def test_wrong_bodies_are_refused_by_name(
    server: HttpRig, path: str, body: Mapping[str, Any], param: str
) -> None:
    refused = server.ask("POST", path, dict(body))
    assert refused.status in (400, 404)
    assert refused.error["param"] == param


# -- metrics --


def test_metrics_are_served_on_the_http_port(server: HttpRig) -> None:
    answer = server.ask("GET", "/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert b"\npensieve_turns_total" in answer.body
    assert server.rig.server.metrics_url == f"{server.url}/metrics"


def test_metrics_are_off_on_the_http_port_by_default(tmp_path: Path) -> None:
    with http_rig(tmp_path / "data") as server:
        assert server.ask("GET", "/metrics").status == 404
    with pytest.raises(ConfigError, match="--http"):
        check_exposure(Listening(metrics="http"))


def test_metrics_require_an_operators_token_and_tokenize_any_token(tmp_path: Path) -> None:
    caller, one = new_token("red", admin=False)
    operator, other = new_token("ops", admin=True)
    tokens = tokens_of(tmp_path / "tokens", (one + other).encode())
    with http_rig(tmp_path / "data", http={"tokens": tokens, "metrics": "http"}) as server:
        red, ops = {"x-api-key": caller}, {"x-api-key": operator}
        assert [server.ask("GET", "/metrics", None, each).status for each in ({}, red, ops)] == [
            *(401, 403, 200)
        ]
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
            assert [server.ask("POST", path, body, each).status for each in ({}, red)] == [401, 200]


# -- health --


def test_a_draining_daemon_is_live_but_not_ready(tmp_path: Path) -> None:
    with http_rig(tmp_path / "data") as server:
        paths = ("/health", "/health/ready", "/health/live")
        assert [server.ask("GET", path).status for path in paths] == [200, 200, 200]
        server.rig.call(server.rig.daemon.drain(0.0))
        assert [server.ask("GET", path).status for path in paths] == [503, 503, 200]
        assert "drains" in server.ask("GET", "/health/ready").error["message"]


# -- other paths --


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/v1/embeddings", "embeddings"),
        ("/v1/rerank", "reranking"),
        ("/rerank", "reranking"),
        ("/v1/images/generations", "images"),
        ("/v1/audio/speech", "audio"),
        ("/v1/moderations", "moderations"),
        ("/v1/assistants", "Responses"),
        ("/api/chat", "/v1"),
    ],
)
def test_unsupported_endpoints_are_named_in_the_error(
    server: HttpRig, path: str, word: str
) -> None:
    refused = server.ask("POST", path, {"model": MODEL, "input": "a"})
    assert (refused.status, refused.error["code"]) == (404, "unsupported_endpoint")
    assert refused.error["type"] == "invalid_request_error"
    assert word in refused.error["message"]


def test_the_error_for_a_wrong_path_suggests_the_right_one(server: HttpRig) -> None:
    assert "/v1/chat/completions" in server.ask("POST", "/chat/completions", {}).error["message"]
    assert "POST" in server.ask("GET", CHAT).error["message"]


# -- the document --


def test_the_openapi_document_lists_each_route_and_is_valid(server: HttpRig) -> None:
    answer = server.ask("GET", "/openapi.json")
    assert answer.status == 200
    found = answer.value
    assert found["openapi"].startswith("3.1.")
    assert set(found) == {"openapi", "info", "paths", "components", "security"}
    assert set(found["info"]) >= {"title", "version"}
    operations = [
        (path, method, each)
        for path, item in found["paths"].items()
        for method, each in item.items()
    ]
    ids = [each["operationId"] for _, _, each in operations]
    assert len(ids) == len(set(ids))
    for path, method, each in operations:
        assert method in {"get", "post", "delete"}
        named = {one["name"] for one in each.get("parameters", ()) if one["in"] == "path"}
        assert named == set(re.findall(r"\{(\w+)\}", path)), path
        assert all(one["required"] for one in each.get("parameters", ()))
        assert each["responses"]["200"]["description"]
        assert ("requestBody" in each) <= (method == "post")
    for reference in re.findall(r'"\$ref": "#/([^"]+)"', json.dumps(found)):
        node = found
        for part in reference.split("/"):
            node = node[part]
    for path, method, _ in operations:
        if "{" not in path and path != "/pensieve/memory":
            asked = server.ask(method.upper(), path, {} if method == "post" else None)
            assert "unknown endpoint" not in asked.body.decode(), path


def test_the_openapi_document_describes_bodies_as_they_are_parsed(server: HttpRig) -> None:
    paths = server.ask("GET", "/openapi.json").value["paths"]

    def body(path: str) -> Any:
        return paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]

    chat = body(CHAT)
    assert chat["required"] == ["messages", "model"]
    types = {name: chat["properties"][name].get("type") for name in chat["properties"]}
    assert types["temperature"] == "number"
    assert types["max_completion_tokens"] == types["seed"] == "integer"
    assert types["stream"] == types["store"] == types["continue_final_message"] == "boolean"
    assert types["messages"] == types["tools"] == "array"
    assert "0..100" in chat["properties"]["temperature"]["description"]
    assert "web_search_options" not in types
    assert "messages" not in body("/v1/completions")["properties"]
    assert "previous_response_id" in body("/v1/responses")["properties"]
    assert body("/v1/messages")["required"] == ["max_tokens", "messages", "model"]
    accepted = {name: True for name, kind in types.items() if kind == "boolean"}
    for name in accepted:
        asked = {"model": MODEL, "messages": [USER], "max_tokens": 1, name: "no"}
        refused = server.ask("POST", CHAT, asked)
        assert (refused.status, refused.error["param"]) == (400, name)
