"""A body raises nothing but InvalidArgument, and every accepted body can be used.

Random JSON would mostly fail at `model`. So most bodies are valid bodies in which some values, at any depth,
are replaced by odd values.
"""

from __future__ import annotations

import copy
import json
import math
import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pensieve.api.openai.request import ParsedRequest, RequestKind, parse
from pensieve.errors import InvalidArgument
from pensieve.jobs.batch_line import BatchLine, LineError, read_line
from tests.api.openai.bodies import SERVED, USER
from tests.scale import SCALE, SEED

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
KINDS = st.sampled_from(RequestKind)
NUM_ODD_BODIES = 20_000 * SCALE

CALL = {"name": "f", "arguments": '{"x": [1]}'}
TOOL = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": False}
SHARED = {
    "model": "tiny",
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.0,
    "seed": 7,
    "stop": ["a", "b"],
    "stop_token_ids": [1, 2],
    "logit_bias": {"5": 1, "6": -1.5},
    "min_tokens": 1,
    "ignore_eos": False,
    "stream": True,
    "stream_options": {"include_usage": True},
    "user": "ada",
    "metadata": {"a": "b"},
}
WHOLE = {
    RequestKind.CHAT: SHARED
    | {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
            USER,
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "so",
                "tool_calls": [{"id": "c", "type": "function", "function": CALL}],
            },
            {"role": "tool", "content": "2", "tool_call_id": "c"},
        ],
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": "auto",
        "max_completion_tokens": 9,
        "logprobs": True,
        "top_logprobs": 2,
        "n": 2,
        "response_format": {"type": "text"},
        "chat_template_kwargs": {"enable_thinking": True},
        "reasoning_effort": "none",
    },
    RequestKind.COMPLETION: SHARED
    | {"prompt": [1, 2, 3], "n": 2, "best_of": 2, "max_tokens": 9, "logprobs": 2, "echo": False},
    RequestKind.RESPONSE: SHARED
    | {
        "input": [
            USER,
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "so"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
            {"type": "function_call", "call_id": "c", **CALL},
            {"type": "function_call_output", "call_id": "c", "output": "2"},
        ],
        "instructions": "Be brief.",
        "tools": [{"type": "function", **TOOL}],
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "max_output_tokens": 9,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "reasoning": {"effort": "none", "summary": "auto"},
        "conversation": {"id": "c"},
    },
}
ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**64, 10**400, 0.0, -0.0, 0.5, 1e308),
    *(math.nan, math.inf, -math.inf, "", "a", "\0", "\ud800", "x" * 10_000, "5", "None"),
    *([], [[]], [None], [True], [1], ["a"], [{}], {}, {"": None}, {"a": {}}, {"type": "text"}),
    *([1] * 20_000, {"\udfff": 1}, {"type": "function", "function": None}),
]


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": [value]}
    return value


def parsed(kind: RequestKind, body: Any) -> ParsedRequest | None:
    """Return the parsed body, or None if it was refused."""
    try:
        request = parse(kind, body, SERVED)
    except InvalidArgument as error:
        refused_as = f"{error.field}: {error.problem}"
    else:
        check(request)
        return request
    refused_as.encode()  # can be written to a log
    assert len(refused_as) < 1_000
    return None


def check(request: ParsedRequest) -> None:
    """Check that the parsed request needs no further validation."""
    assert request.sampling.problem(SERVED.vocab_size) is None
    assert 1 <= request.num_choices <= 16
    json.dumps(
        [*request.tools, dict(request.turn.settings.template_options)], allow_nan=False
    ).encode()
    for message in request.turn.messages:
        message.content.encode()


@settings(max_examples=100 * SCALE)
@given(KINDS, JSON)
def test_any_json_body_is_parsed_or_refused(kind: RequestKind, body: Any) -> None:
    parsed(kind, body)


@settings(max_examples=100 * SCALE)
@given(KINDS, st.dictionaries(st.sampled_from(sorted(set().union(*WHOLE.values()))), JSON))
def test_any_parameter_values_are_parsed_or_refused(
    kind: RequestKind, members: dict[str, Any]
) -> None:
    parsed(kind, WHOLE[kind] | members)


@settings(max_examples=100 * SCALE)
@given(st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_batch_line_is_parsed_or_refused(text: bytes) -> None:
    found = read_line(1, text, SERVED)
    assert found is None or isinstance(found, BatchLine | LineError)


def test_the_unmodified_bodies_are_accepted() -> None:
    for kind, body in WHOLE.items():
        assert parsed(kind, body) is not None, kind


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key) inside a value."""
    found: list[tuple[Any, Any]] = []
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in pairs:
        found.append((value, key))
        if isinstance(inner, dict | list):
            found += places(inner)
    return found


def test_bodies_with_odd_values_are_parsed_or_refused() -> None:
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    odd = [*ODD, nested(40), nested(2_000)]
    accepted = 0
    for _ in range(NUM_ODD_BODIES):
        kind = rng.choice(list(RequestKind))
        body = copy.deepcopy(WHOLE[kind])
        for container, key in rng.sample(places(body), rng.choice((1, 1, 2, 5))):
            if rng.random() < 0.1 and isinstance(container, dict):
                container[rng.choice(("", "name", "type", "x", "\ud800"))] = rng.choice(odd)
            elif rng.random() < 0.1:
                container.pop(key, None) if isinstance(container, dict) else container.clear()
            elif isinstance(container, dict) or key < len(container):
                container[key] = copy.copy(rng.choice(odd))
        accepted += parsed(kind, body) is not None
    assert NUM_ODD_BODIES // 50 < accepted < NUM_ODD_BODIES // 2


def test_a_huge_or_deep_parameter_value_is_refused() -> None:
    body = WHOLE[RequestKind.CHAT]
    for value in ([0] * 16_384, {str(n): 0 for n in range(16_384)}, nested(64), nested(500_000)):
        assert parsed(RequestKind.CHAT, body | {"metadata": value}) is None
