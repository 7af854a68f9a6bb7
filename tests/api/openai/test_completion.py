"""Bodies of text completions: one prompt, as text or as tokens."""

from __future__ import annotations

from typing import Any

import pytest

from pensieve.api.openai.request import RequestKind, parse
from tests.api.openai.bodies import SERVED, code_of, completion, refused


def test_a_prompt_is_text_or_token_ids() -> None:
    assert completion(prompt="Once").prompt == "Once"
    assert completion(prompt=[5, 0, 999]).prompt == (5, 0, 999)


def test_a_list_of_one_prompt_is_that_prompt() -> None:
    assert completion(prompt=["Once"]).prompt == "Once"
    assert completion(prompt=[[5, 6]]).prompt == (5, 6)
    assert completion(prompt=[5]).prompt == (5,)


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        (None, "is required"),
        ("", "must not be empty"),
        ([], "must not be empty"),
        ([[]], "must not be empty"),
        ([""], "must not be empty"),
        (["a", "b"], "several prompts in one request are not supported: send a request for each"),
        ([[1], [2]], "several prompts in one request are not supported: send a request for each"),
        ([[[1]]], "several prompts in one request are not supported: send a request for each"),
        ([1, "a"], "token ids must be integers in 0..999"),
        ([1, True], "token ids must be integers in 0..999"),
        ([True], "must be a string or a list of token ids"),
        ([1.0, 2], "token ids must be integers in 0..999"),
        ([1, 1000], "token ids must be integers in 0..999"),
        ([1, -1], "token ids must be integers in 0..999"),
        (5, "must be a string or a list of token ids"),
        ({}, "must be a string or a list of token ids"),
        ("\ud800", "character 0 is half of a surrogate pair, which UTF-8 cannot express"),
        (["\ud800"], "character 0 is half of a surrogate pair, which UTF-8 cannot express"),
    ],
)
def test_invalid_prompts_are_refused(prompt: Any, problem: str) -> None:
    assert refused(completion, prompt=prompt) == ("prompt", problem)


def test_token_ids_have_at_most_32_bits_if_the_vocabulary_is_unknown() -> None:
    served = SERVED._replace(vocab_size=None)
    body = {"model": "tiny", "prompt": [2**32 - 1]}
    assert parse(RequestKind.COMPLETION, body, served).prompt == (2**32 - 1,)


def test_a_prompt_of_100_000_token_ids_is_accepted() -> None:
    assert len(completion(prompt=[1] * 100_000).prompt or ()) == 100_000


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"echo": True}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": True}, "best_of"),
        ({"tools": []}, "tools"),
        ({"chat_template_kwargs": {}}, "chat_template_kwargs"),
        ({"messages": []}, "messages"),
    ],
)
def test_unsupported_fields_are_refused(members: Any, param: str) -> None:
    assert refused(completion, **members)[0] == param
    assert code_of(completion, **members) == "unsupported_parameter"


def test_fields_without_effect_are_accepted() -> None:
    assert completion(echo=False, suffix="", best_of=1, user="ada") == completion()
    assert completion(best_of=3, n=3).num_choices == 3


def test_later_errors_use_the_field_names_of_the_body() -> None:
    assert completion().param("content") == "prompt"
    assert completion().param("logprobs") == "logprobs"
