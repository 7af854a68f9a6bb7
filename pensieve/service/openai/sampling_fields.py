"""The parameters of a body that decide how tokens are chosen.

OpenAI's names are ours, but for the length of a reply and its logprobs, which each endpoint names in its own
way.  What OpenAI lacks (`top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `stop_token_ids`, `ignore_eos`)
goes by the names that open servers use.  The ranges are those of `Sampling`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from pensieve.core.sampling import LOGIT_BIAS_MAX, STOP_STRINGS_MAX, STOP_TOKEN_IDS_MAX, Sampling
from pensieve.service.openai.fields import Fields, Refusal, quoted
from pensieve.service.openai.kinds import RequestKind

NUMBERS = (
    *("temperature", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
INTEGERS = ("top_k", "seed", "min_tokens")
LENGTHS = {  # the first that is given counts
    RequestKind.CHAT: ("max_completion_tokens", "max_tokens"),
    RequestKind.COMPLETION: ("max_tokens",),
    RequestKind.RESPONSE: ("max_output_tokens",),
}
LOGPROBS_INCLUDED = "message.output_text.logprobs"
TOKEN_ID_DIGITS_MAX = 10


class SamplingFields(NamedTuple):
    """What a body says of sampling."""

    sampling: Sampling
    given: frozenset[str]  # the fields of `sampling` that the body sets; others have the defaults
    params: Mapping[str, str]  # what the body calls a field, where it has another name for it


def take_sampling(
    kind: RequestKind, fields: Fields, defaults: Sampling, vocab_size: int | None
) -> SamplingFields:
    """Raises Refusal with the body's name of what is wrong."""
    values: dict[str, Any] = {name: fields.number(name) for name in NUMBERS}
    values |= {name: fields.integer(name) for name in INTEGERS}
    length_param, values["max_tokens"] = _length(LENGTHS[kind], fields)
    values["logprobs"] = _logprobs(kind, fields)
    values["stop"] = _stop(fields)
    values["stop_token_ids"] = _stop_token_ids(fields)
    values["logit_bias"] = _logit_bias(fields)
    if "ignore_eos" in fields:
        values["ignore_eos"] = fields.flag("ignore_eos")
    given = {name: value for name, value in values.items() if value is not None}
    if "min_tokens" in given and "max_tokens" not in given:
        values["max_tokens"] = max(defaults.max_tokens, given["min_tokens"])
    filled = {name: value for name, value in values.items() if value is not None}
    sampling = replace(defaults, **{"ignore_eos": False, "logprobs": None, **filled})
    is_completion = kind is RequestKind.COMPLETION
    params = {
        "max_tokens": length_param,
        "logprobs": "logprobs" if is_completion else "top_logprobs",
    }
    if problem := sampling.problem(vocab_size):
        raise Refusal(params.get(problem[0], problem[0]), problem[1])
    return SamplingFields(sampling, frozenset(given), params)


def _length(names: tuple[str, ...], fields: Fields) -> tuple[str, int | None]:
    found = {name: value for name in names if (value := fields.integer(name)) is not None}
    if len(set(found.values())) > 1:
        first, second = found
        raise Refusal(fields.where(second), f"differs from {first}: give one of them")
    return next(iter(found.items()), (names[0], None))


def _logprobs(kind: RequestKind, fields: Fields) -> int | None:
    if kind is RequestKind.COMPLETION:
        return fields.integer("logprobs")
    if kind is RequestKind.CHAT:
        wanted, switch = fields.flag("logprobs"), "logprobs: true"
    else:
        wanted, switch = _included(fields), f"{LOGPROBS_INCLUDED!r} in include"
    alternatives = fields.integer("top_logprobs") or 0
    if alternatives and not wanted:
        raise Refusal(fields.where("top_logprobs"), f"needs {switch}")
    return alternatives if wanted else None


def _included(fields: Fields) -> bool:
    """Whether logprobs are; the rest of what may be included does not exist here."""
    given = fields.items("include") or ()
    for index, each in enumerate(given):
        if each not in (LOGPROBS_INCLUDED, "reasoning.encrypted_content"):
            problem = f"only {LOGPROBS_INCLUDED!r} is supported"
            raise Refusal(f"{fields.where('include')}[{index}]", problem, "unsupported_parameter")
    return LOGPROBS_INCLUDED in given


def _stop(fields: Fields) -> tuple[str, ...] | None:
    given = fields.take("stop")
    if given is None:
        return None
    strings = [given] if isinstance(given, str) else given
    if not isinstance(strings, list | tuple) or not all(isinstance(s, str) for s in strings):
        raise Refusal(fields.where("stop"), "must be a string or a list of strings", "invalid_type")
    if len(strings) > STOP_STRINGS_MAX:
        raise Refusal(fields.where("stop"), f"at most {STOP_STRINGS_MAX} strings")
    return tuple(strings)


def _stop_token_ids(fields: Fields) -> tuple[int, ...] | None:
    given = fields.items("stop_token_ids")
    if given is None:
        return None
    where = fields.where("stop_token_ids")
    if len(given) > STOP_TOKEN_IDS_MAX:
        raise Refusal(where, f"at most {STOP_TOKEN_IDS_MAX} ids")
    if not all(is_token_id(each) for each in given):
        raise Refusal(where, "must be a list of token ids", "invalid_type")
    return tuple(given)


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...] | None:
    """JSON has strings for keys, so that is what the token ids are."""
    given, where = fields.object("logit_bias"), fields.where("logit_bias")
    if given is None:
        return None
    if len(given) > LOGIT_BIAS_MAX:
        raise Refusal(where, f"at most {LOGIT_BIAS_MAX} entries")
    for key in given:
        digits = key.isascii() and key.isdigit() and len(key) <= TOKEN_ID_DIGITS_MAX
        if not digits or key != str(int(key)) or not is_token_id(int(key)):
            raise Refusal(where, f"the key {quoted(key)} is no token id")
    entries = Fields(given, where)
    found = ((int(key), entries.number(key)) for key in given)
    return tuple(sorted((token_id, bias) for token_id, bias in found if bias is not None))


def is_token_id(value: Any) -> bool:
    """Whether it could be one, of the largest vocabulary."""
    return type(value) is int and 0 <= value < 2**32
