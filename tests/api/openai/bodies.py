"""Helpers of the tests in this folder: the served model, and functions for bodies and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from pensieve.api.json_fields import Refusal
from pensieve.api.openai.request import ParsedRequest, RequestKind, Served, parse
from pensieve.errors import InvalidArgument
from pensieve.sampling import Sampling

SERVED = Served(
    Sampling(temperature=0.6, top_p=0.95, max_tokens=512),
    models=frozenset({"tiny"}),
    vocab_size=1000,
    template_options=frozenset({"enable_thinking"}),
)
USER = {"role": "user", "content": "hi"}


def chat(**members: Any) -> ParsedRequest:
    return parse(RequestKind.CHAT, {"model": "tiny", "messages": [USER], **members}, SERVED)


def completion(**members: Any) -> ParsedRequest:
    return parse(RequestKind.COMPLETION, {"model": "tiny", "prompt": "Once", **members}, SERVED)


def response(**members: Any) -> ParsedRequest:
    return parse(RequestKind.RESPONSE, {"model": "tiny", "input": "hi", **members}, SERVED)


def refused(ask: Any, *given: Any, **members: Any) -> tuple[str, str]:
    """Return the refused parameter and the description of the problem."""
    with pytest.raises(InvalidArgument) as caught:
        ask(*given, **members)
    return caught.value.field, caught.value.problem


def code_of(ask: Any, **members: Any) -> str:
    """Return the code of the refusal."""
    with pytest.raises(Refusal) as caught:
        ask(**members)
    return caught.value.code
