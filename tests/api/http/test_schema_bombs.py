"""A hostile schema or grammar is answered, or refused with the parameter's name. Chats continue meanwhile."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pensieve.builtin import MODEL_PATH
from tests.api.http.rig_http import MODEL, HttpRig, http_rig

OBJECT = {"type": "object"}
TEMPLATE = """\
{#- Calls are written as <tool_call>, and tools take no room. #}
{%- if tools %}{{- '<|im_start|>system\\n' + tools|length|string + ' tools<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        found = {**OBJECT, "properties": {"a": found}}
    return found


def refs(**definitions: Any) -> dict[str, Any]:
    return {**OBJECT, "properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": definitions}


def strings(*patterns: str) -> dict[str, Any]:
    each = [{"type": "string", "pattern": pattern} for pattern in patterns]
    return {**OBJECT, "properties": {"x": {"allOf": each} if len(each) > 1 else each[0]}}


NODE = {**OBJECT, "properties": {"left": {"$ref": "#/$defs/a"}, "right": {"$ref": "#/$defs/a"}}}
SCHEMAS: dict[str, Any] = {
    "deep": nested(15),
    "too deep": nested(40),
    "a large enumeration": {
        **OBJECT,
        "properties": {"x": {"enum": [f"v{n}" for n in range(5_000)]}},
    },
    "a huge enumeration": {**OBJECT, "properties": {"x": {"enum": [*range(15_000)]}}},
    "many properties": {**OBJECT, "properties": {f"p{n}": {} for n in range(990)}},
    "required, all": {
        **OBJECT,
        "properties": {f"p{n}": {"type": "integer"} for n in range(300)},
        "required": [f"p{n}" for n in range(300)],
    },
    "a cycle of references": refs(a={"$ref": "#/$defs/b"}, b={"$ref": "#/$defs/a"}),
    "a reference to itself": refs(a={"$ref": "#/$defs/a"}),
    "a reference to all": {"$ref": "#"},
    "a tree": refs(a=NODE),
    "references that double": refs(
        a={"anyOf": [{"$ref": "#/$defs/b0"}, {"$ref": "#/$defs/b0"}]},
        **{f"b{n}": {"allOf": [{"$ref": f"#/$defs/b{n + 1}"}] * 2} for n in range(20)},
        b20={"type": "string"},
    ),
    "nested repetition": strings("^(a+)+$"),
    "repetition of repetition": strings("^(([a-z]{1,300}x){1,300}){1,300}$"),
    "patterns at once": strings(*(f"^.*{each}.{{30}}$" for each in "abcdefgh")),
    "counts": {**OBJECT, "properties": {"x": {"type": "array", "minItems": 10**9}}},
    "lengths": {**OBJECT, "properties": {"x": {"type": "string", "minLength": 10**9}}},
    "numbers": {**OBJECT, "properties": {"x": {"type": "number", "multipleOf": 1e-300}}},
    "ranges": {
        **OBJECT,
        "properties": {"x": {"type": "integer", "minimum": -(10**300), "maximum": 10**300}},
    },
    "alternatives": {"anyOf": [{**OBJECT, "required": [f"k{n}"]} for n in range(400)]},
    "nothing fits": {**OBJECT, "properties": {"x": False}, "required": ["x"]},
}
FORMS: dict[str, dict[str, Any]] = {
    "regex, nested": {"guided_regex": "(a+)+b"},
    "regex, counted": {"guided_regex": "((a{1000}){1000}){1000}"},
    "regex, of words": {"guided_regex": "(.{1,500}x){1,500}"},
    "regex, long": {"guided_regex": "a|" * 500_000 + "b"},
    "regex, at once": {"guided_regex": "&".join([".*a.{30}"] * 12)},
    "grammar, long": {"guided_grammar": "start: " + '"a" ' * 250_000},
    "grammar, ambiguous": {"guided_grammar": 'start: x*\nx: "a" | x x | "a" x'},
    "grammar, left recursive": {"guided_grammar": 'start: start start | "a"'},
    "grammar, of counts": {"guided_grammar": 'start: a~9999\na: b~9999\nb: c~9999\nc: "x"'},
    "grammar, a circle": {"guided_grammar": "start: a\na: b\nb: a"},
    "choices": {"guided_choice": [f"choice {n}" for n in range(1_001)]},
    "a long choice": {"guided_choice": ["x" * 60_000]},
    "many tools": {
        "tools": [
            {
                "type": "function",
                "function": {"name": f"f{n}", "strict": True, "parameters": nested(4)},
            }
            for n in range(120)
        ]
    },
    "too many tools": {
        "tools": [
            {"type": "function", "function": {"name": f"f{n}", "parameters": nested(4)}}
            for n in range(400)
        ],
        "tool_choice": "required",
    },
}


def bodies_with_schema(schema: Any) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (name, path, body) for each place where a schema is allowed."""
    messages = [{"role": "user", "content": "hi"}]
    chat = {"messages": messages, "max_tokens": 3}
    form = {"name": "n", "schema": schema}
    yield (
        "response_format",
        "/v1/chat/completions",
        {**chat, "response_format": {"type": "json_schema", "json_schema": form}},
    )
    function = {"name": "f", "strict": True, "parameters": schema}
    tools = [{"type": "function", "function": function}]
    yield "tools", "/v1/chat/completions", {**chat, "tools": tools}
    text = {"format": {"type": "json_schema", **form}}
    yield "text.format", "/v1/responses", {"input": "hi", "max_output_tokens": 3, "text": text}
    output = {"format": {"type": "json_schema", "schema": schema}}
    yield "output_config", "/v1/messages", {**chat, "output_config": output}


def bombs() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for name, schema in SCHEMAS.items():
        for place, path, body in bodies_with_schema(schema):
            yield f"{name} in {place}", path, body
    for name, members in FORMS.items():
        messages = [{"role": "user", "content": "hi"}]
        yield name, "/v1/chat/completions", {"messages": messages, "max_tokens": 3, **members}


class Chatting:
    """Streams one reply after another, and counts the events."""

    def __init__(self, rig: HttpRig) -> None:
        self._rig = rig
        self.is_over = False
        self.num_pieces = 0
        self.wrong: list[Any] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Chatting:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over = True
        self._thread.join()

    def _run(self) -> None:
        while not self.is_over:
            connection = self._rig.connection()
            messages = [{"role": "user", "content": "Tell me of Oslo."}]
            body = {"model": MODEL, "messages": messages, "stream": True, "ignore_eos": True}
            raw = json.dumps({**body, "max_tokens": 100}).encode()
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/chat/completions", raw, headers)
            found = connection.getresponse()
            lines = [line for line in found if line.startswith(b"data: ")]
            self.num_pieces += len(lines)
            if found.status != 200 or lines[-1].strip() != b"data: [DONE]":
                self.wrong.append((found.status, lines[-1:]))
            connection.close()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpRig]:
    folder = Path(tmp_path_factory.mktemp("bombs"))
    shutil.copytree(MODEL_PATH, folder / MODEL)
    (folder / MODEL / "chat_template.jinja").write_text(TEMPLATE)
    with http_rig(folder / "data", model=True, model_folder=folder / MODEL) as found:
        yield found


def test_hostile_schemas_are_answered_or_refused_while_a_chat_continues(rig: HttpRig) -> None:
    statuses: dict[str, int] = {}
    with Chatting(rig) as chatting:
        for name, path, body in bombs():
            answer = rig.ask("POST", path, {"model": MODEL, **body})
            assert answer.status in (200, 400), (name, answer.status, answer.body[:300])
            statuses[name] = answer.status
            if answer.status == 400:
                error = answer.error
                assert 0 < len(error["message"]) < 1_000, name
                assert "messages" in path or error["param"], name
        before = chatting.num_pieces
    assert not chatting.wrong
    assert before > 0
    refused = {name for name, status in statuses.items() if status == 400}
    assert "a reference to all in response_format" in refused
    for name in ("too deep", "a huge enumeration", "nothing fits"):
        for place in ("response_format", "tools"):
            assert f"{name} in {place}" in refused
    for name in ("regex, long", "regex, at once", "grammar, long", "choices", "too many tools"):
        assert name in refused
    for name in ("deep", "a tree", "many properties", "alternatives"):
        for place in ("response_format", "tools"):
            assert f"{name} in {place}" not in refused


def test_too_deeply_nested_bodies_are_refused(rig: HttpRig) -> None:
    for depth in (1_000, 200_000):
        schema = '{"a":' * depth + "1" + "}" * depth
        body = f'{{"model": "{MODEL}", "messages": [], "response_format": {schema}}}'
        answer = rig.ask("POST", "/v1/chat/completions", body.encode())
        assert answer.status == 400
        assert answer.error["type"] == "invalid_request_error"
    assert rig.chat("Still there?").status == 200


def test_many_new_schemas_at_once_are_all_answered(rig: HttpRig) -> None:
    """All schemas differ, so each is compiled in the service and in the engine."""
    found: list[int] = []

    def ask(number: int) -> None:
        schema = {**OBJECT, "properties": {f"p{n}": {"const": number} for n in range(200)}}
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        found.append(rig.chat("hi", response_format=form, max_tokens=4).status)

    with Chatting(rig) as chatting:
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert found == [200] * 12
    assert not chatting.wrong
