"""Sampling parameters are read exactly, or refused with an error that names the field."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pensieve.api.openai.request import ParsedRequest, RequestKind, parse
from pensieve.sampling import Sampling
from tests.api.openai.bodies import SERVED, chat, code_of, completion, refused, response

DEFAULTS = SERVED.defaults


def test_a_body_that_sets_nothing_has_the_defaults() -> None:
    for request in (chat(), completion(), response()):
        assert request.sampling == DEFAULTS
        assert request.turn.given_sampling == {}


def test_sampling_fields_of_a_body_override_the_defaults() -> None:
    request = chat(
        temperature=1,
        top_p=0.5,
        top_k=40,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=-2,
        frequency_penalty=2.0,
        seed=7,
        max_completion_tokens=9,
        min_tokens=3,
        stop=["a", "b"],
        stop_token_ids=[5, 6],
        ignore_eos=True,
        logprobs=True,
        top_logprobs=2,
        logit_bias={"50": -100, "7": 1.5},
    )
    assert request.sampling == Sampling(
        temperature=1.0,
        top_p=0.5,
        top_k=40,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        seed=7,
        max_tokens=9,
        min_tokens=3,
        stop=("a", "b"),
        stop_token_ids=(5, 6),
        ignore_eos=True,
        logprobs=2,
        logit_bias=((7, 1.5), (50, -100.0)),
    )
    assert len(request.turn.given_sampling or ()) == 15  # all sampling parameters
    assert type(request.sampling.temperature) is float


def test_null_counts_as_absent() -> None:
    request = chat(temperature=None, stop=None, seed=None, n=None, logit_bias=None, tools=None)
    assert request.sampling == DEFAULTS
    assert request.turn.given_sampling == {}


@pytest.mark.parametrize(
    ("ask", "name"),
    [
        (chat, "max_tokens"),
        (chat, "max_completion_tokens"),
        (completion, "max_tokens"),
        (response, "max_output_tokens"),
    ],
)
def test_each_endpoint_has_its_own_name_for_max_tokens(
    ask: Callable[..., ParsedRequest], name: str
) -> None:
    request = ask(**{name: 5})
    assert request.sampling.max_tokens == 5
    assert request.turn.given_sampling == {"max_tokens": 5}
    assert refused(ask, **{name: 0}) == (name, "must be at least 1")
    assert refused(ask, **{name: True}) == (name, "must be an integer")


def test_both_names_of_a_chats_max_tokens_must_agree() -> None:
    assert chat(max_tokens=5, max_completion_tokens=5).sampling.max_tokens == 5
    assert refused(chat, max_tokens=5, max_completion_tokens=6) == (
        "max_tokens",
        "differs from max_completion_tokens: use one of them",
    )


def test_min_tokens_raises_the_default_max_tokens() -> None:
    assert chat(min_tokens=600).sampling.max_tokens == 600
    assert chat(min_tokens=600).turn.given_sampling == {"min_tokens": 600}
    assert refused(chat, min_tokens=6, max_tokens=5)[0] == "min_tokens"


def test_stop_is_a_string_or_a_list_of_strings() -> None:
    assert chat(stop="END").sampling.stop == ("END",)
    assert chat(stop=[]).sampling.stop == ()
    assert refused(chat, stop=5) == ("stop", "must be a string or a list of strings")
    assert refused(chat, stop=["a", None])[0] == "stop"
    assert refused(chat, stop="") == ("stop", "a stop string must not be empty")
    assert refused(chat, stop=["a"] * 17) == ("stop", "at most 16 strings")
    assert refused(chat, stop="x" * 129) == ("stop", "at most 128 characters each")


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("temperature", True, "must be a number"),
        ("temperature", "1", "must be a number"),
        ("temperature", -0.1, "must lie in 0..100"),
        ("temperature", math.nan, "holds a number that is too large or not finite"),
        ("temperature", math.inf, "holds a number that is too large or not finite"),
        ("temperature", 10**400, "holds a number that is too large or not finite"),
        ("top_p", 0, "must lie in (0, 1]"),
        ("top_k", 1.0, "must be an integer"),
        ("top_k", 2**31, "must be 0 (no limit) or positive"),
        ("min_p", 1.5, "must lie in 0..1"),
        ("presence_penalty", 2.1, "must lie in -2..2"),
        ("frequency_penalty", -2.1, "must lie in -2..2"),
        ("repetition_penalty", 0, "must lie in 0.01..100"),
        ("seed", -1, "must lie in 0..2^64-1"),
        ("seed", 2**64, "must lie in 0..2^64-1"),
        ("ignore_eos", 1, "must be true or false"),
        ("stop_token_ids", [1000], "token ids must lie in 0..999"),
        ("stop_token_ids", [1.0], "must be a list of token ids"),
        ("stop_token_ids", [True], "must be a list of token ids"),
        ("stop_token_ids", 5, "must be a list"),
        ("stop_token_ids", list(range(65)), "at most 64 ids"),
    ],
)
def test_invalid_sampling_values_are_refused_by_name(name: str, value: Any, problem: str) -> None:
    for ask in (chat, completion, response):
        assert refused(ask, **{name: value}) == (name, problem)


@pytest.mark.parametrize(
    ("bias", "param", "problem"),
    [
        ({"5": 101}, "logit_bias", "each bias must lie in -100..100"),
        ({"5": "1"}, "logit_bias.'5'", "must be a number"),
        ({"5": True}, "logit_bias.'5'", "must be a number"),
        ({"1000": 1}, "logit_bias", "token ids must lie in 0..999"),
        ({"05": 1}, "logit_bias", "the key '05' is not a token id"),
        ({"-5": 1}, "logit_bias", "the key '-5' is not a token id"),
        ({"٥": 1}, "logit_bias", "the key '\\u0665' is not a token id"),
        ({"": 1}, "logit_bias", "the key '' is not a token id"),
        ({"9" * 5000: 1}, "logit_bias", f"the key '{'9' * 80}...' is not a token id"),
        ([5], "logit_bias", "must be an object"),
        ({str(n): 0 for n in range(1025)}, "logit_bias", "at most 1024 entries"),
    ],
)
def test_logit_bias_keys_must_be_token_ids(bias: Any, param: str, problem: str) -> None:
    assert refused(chat, logit_bias=bias) == (param, problem)


def test_chat_top_logprobs_requires_logprobs() -> None:
    assert chat(logprobs=True).sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).sampling.logprobs == 20
    assert chat(logprobs=False, top_logprobs=0).sampling.logprobs is None
    assert refused(chat, top_logprobs=3) == ("top_logprobs", "needs logprobs: true")
    assert refused(chat, logprobs=3) == ("logprobs", "must be true or false")
    assert refused(chat, logprobs=True, top_logprobs=21) == ("top_logprobs", "must lie in 0..20")
    assert refused(chat, logprobs=True, top_logprobs=True)[0] == "top_logprobs"


def test_completion_logprobs_is_a_number() -> None:
    assert completion(logprobs=0).sampling.logprobs == 0
    assert completion(logprobs=5).sampling.logprobs == 5
    assert refused(completion, logprobs=True) == ("logprobs", "must be an integer")
    assert refused(completion, logprobs=21) == ("logprobs", "must lie in 0..20")
    assert refused(completion, top_logprobs=2) == ("top_logprobs", "is not supported")


def test_response_logprobs_are_requested_with_include() -> None:
    included = ["message.output_text.logprobs"]
    assert response(include=included).sampling.logprobs == 0
    assert response(include=included, top_logprobs=4).sampling.logprobs == 4
    assert response(include=["reasoning.encrypted_content"]).sampling.logprobs is None
    assert refused(response, top_logprobs=4)[0] == "top_logprobs"
    assert refused(response, include=["file_search_call.results"])[0] == "include[0]"
    assert code_of(response, include=[{}]) == "unsupported_parameter"


def test_logprobs_and_ignore_eos_have_no_default() -> None:
    served = SERVED._replace(defaults=replace(DEFAULTS, logprobs=5, ignore_eos=True))
    request = parse(RequestKind.COMPLETION, {"model": "tiny", "prompt": "a"}, served)
    assert request.sampling.logprobs is None
    assert not request.sampling.ignore_eos
