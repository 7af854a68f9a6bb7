"""The sampling parameters of a turn, and their defaults, each defined once.

These parts are made from the fields of `Sampling`: the translation from protobuf, the JSON parsers, the flags
of `pensieve chat`, the SDK's reference, the table in docs/http.md and `Sampling.problem`. `problem` checks
the values when a request arrives. The engine and the sampler do not check them again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from textwrap import indent
from typing import Any, NamedTuple, TypedDict

STOP_STRINGS_MAX = 16
STOP_STRING_CHARACTERS_MAX = 128
LOGIT_BIAS_MAX = 1024
LOGPROBS_MAX = 20
STOP_TOKEN_IDS_MAX = 64

# docs/models.md, section Sampling, explains these defaults. `scripts/measure loops` compares other values.
OURS = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.12}
NO_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
MAX_TOKENS = 1024
STOP_REPETITION = 256


class Parameter(NamedTuple):
    """A sampling parameter's help and bounds."""

    help: str
    bounds: str  # as text
    low: float = -math.inf
    high: float = math.inf
    low_excluded: bool = False
    metavar: str = ""  # of the flag of `pensieve chat`; "": there is no such flag
    common: bool = False  # shown in `pensieve chat --help`; otherwise only in --help-all


def _parameter(default: Any, *given: Any, **more: Any) -> Any:
    return field(default=default, metadata={"parameter": Parameter(*given, **more)})


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling parameters of one turn. By default: greedy decoding of at most 512 tokens."""

    temperature: float = _parameter(
        0.0,
        "temperature; 0 is greedy",
        "must lie in 0..100",
        *(0, 100),
        metavar="T",
        common=True,
    )
    top_p: float = _parameter(
        1.0,
        "keep the most likely tokens up to this total probability",
        "must lie in (0, 1]",
        *(0, 1),
        low_excluded=True,
        metavar="P",
        common=True,
    )
    top_k: int = _parameter(
        0,
        "keep this many of the most likely tokens; 0: all",
        "must be 0 (no limit) or positive",
        *(0, (1 << 31) - 1),
        metavar="K",
        common=True,
    )
    min_p: float = _parameter(
        0.0,
        "drop tokens less likely than this fraction of the most likely token",
        "must lie in 0..1",
        *(0, 1),
        metavar="P",
        common=True,
    )
    top_n_sigma: float = _parameter(
        0.0,
        "drop tokens whose logit is more than this many standard deviations below the largest; 0: off",
        "must lie in 0..100",
        *(0, 100),
        metavar="N",
    )
    repetition_penalty: float = _parameter(
        1.0,
        "above 1: make all tokens of the context less likely, as transformers does",
        "must lie in 0.01..100",
        *(0.01, 100),
        metavar="X",
    )
    presence_penalty: float = _parameter(
        0.0,
        "subtract this from the logit of each token already in the reply",
        "must lie in -2..2",
        *(-2, 2),
        metavar="X",
    )
    frequency_penalty: float = _parameter(
        0.0,
        "subtract this from a token's logit for each time the token is in the reply",
        "must lie in -2..2",
        *(-2, 2),
        metavar="X",
    )
    seed: int = _parameter(
        0,
        "the same seed gives the same reply; 0: a random seed",
        "must lie in 0..2^64-1",
        *(0, (1 << 64) - 1),
        metavar="N",
        common=True,
    )
    max_tokens: int = _parameter(
        512,
        "end the reply after this many tokens",
        "must be at least 1",
        *(1, (1 << 31) - 1),
        metavar="N",
        common=True,
    )
    min_tokens: int = _parameter(
        0,
        "do not end the reply before this many tokens",
        "must lie in 0..max_tokens",
        *(0, (1 << 31) - 1),
        metavar="N",
    )
    stop: tuple[str, ...] = _parameter(
        (), "end the reply before the first of these strings", f"at most {STOP_STRINGS_MAX} strings"
    )
    stop_token_ids: tuple[int, ...] = _parameter(
        (), "end the reply at the first of these tokens", f"at most {STOP_TOKEN_IDS_MAX} ids"
    )
    ignore_eos: bool = _parameter(
        False, "continue to max_tokens even if the model samples an end token", "true or false"
    )
    stop_repetition: int = _parameter(
        0,
        "stop a reply whose end repeats a pattern of at most this many tokens: at least four copies, which "
        "together have at least this many tokens; 0: off",
        "must be 0 (off) or positive",
        *(0, (1 << 31) - 1),
        metavar="N",
    )
    logprobs: int | None = _parameter(
        None,
        "return the log probability of each token and of this many alternatives",
        f"must lie in 0..{LOGPROBS_MAX}",
        *(0, LOGPROBS_MAX),
    )
    logit_bias: tuple[tuple[int, float], ...] = _parameter(
        (),
        "add these values to the logits of these token ids",
        f"at most {LOGIT_BIAS_MAX} entries",
    )

    def with_given(self, given: Mapping[str, Any]) -> Sampling:
        """Return these defaults with the values that a client gave."""
        values = {"ignore_eos": False, "logprobs": None, **given}
        if values["ignore_eos"]:  # the client wants max_tokens tokens
            values.setdefault("stop_repetition", 0)
        if values.get("temperature") == 0:  # plain greedy decoding
            for name, neutral in NO_PENALTIES.items():
                values.setdefault(name, neutral)
        if "min_tokens" in given and "max_tokens" not in given:
            values["max_tokens"] = max(self.max_tokens, given["min_tokens"])
        return replace(self, **values)

    def problem(self, vocab_size: int | None = None) -> tuple[str, str] | None:
        """Return the first invalid field and the reason; None if all are valid.

        Token ids are checked only if `vocab_size` is given.
        """
        for name, parameter in NUMBERS:
            value = getattr(self, name)
            if value is None:
                continue
            if not parameter.low <= value <= parameter.high or (
                parameter.low_excluded and value == parameter.low
            ):
                is_finite = -math.inf < value < math.inf
                return name, parameter.bounds if is_finite else "must be finite"
        checks = (
            ("min_tokens", self.min_tokens <= self.max_tokens, "must lie in 0..max_tokens"),
            ("stop", len(self.stop) <= STOP_STRINGS_MAX, f"at most {STOP_STRINGS_MAX} strings"),
            ("stop", all(self.stop), "a stop string must not be empty"),
            (
                "stop",
                all(len(text) <= STOP_STRING_CHARACTERS_MAX for text in self.stop),
                f"at most {STOP_STRING_CHARACTERS_MAX} characters each",
            ),
            (
                "stop_token_ids",
                len(self.stop_token_ids) <= STOP_TOKEN_IDS_MAX,
                f"at most {STOP_TOKEN_IDS_MAX} ids",
            ),
            (
                "logit_bias",
                len(self.logit_bias) <= LOGIT_BIAS_MAX,
                f"at most {LOGIT_BIAS_MAX} entries",
            ),
            (
                "logit_bias",
                all(math.isfinite(bias) and -100.0 <= bias <= 100.0 for _, bias in self.logit_bias),
                "each bias must lie in -100..100",
            ),
        )
        for name, holds, problem in checks:
            if not holds:
                return name, problem
        if vocab_size is not None:
            for name, ids in (
                ("stop_token_ids", self.stop_token_ids),
                ("logit_bias", tuple(token_id for token_id, _ in self.logit_bias)),
            ):
                if any(not 0 <= token_id < vocab_size for token_id in ids):
                    return name, f"token ids must lie in 0..{vocab_size - 1}"
        return None


class DefaultSampling(NamedTuple):
    """The sampling parameters of a request that sets none. They are the same for every API."""

    sampling: Sampling
    from_model: bool  # the values come from the model's files


def default_sampling(generation_config: Mapping[str, Any]) -> DefaultSampling:
    """Return the defaults of a model. `generation_config`: its generation_config.json; {} if it has none.

    If the config sets `do_sample`, `temperature`, `top_p`, `top_k` or `min_p`, it is used as in transformers:
    parameters that it does not set are neutral. Otherwise the defaults are OURS (or the config's own
    `repetition_penalty`), because small models repeat themselves with greedy decoding.

    Raises ValueError if a value is out of bounds.
    """
    kinds = {"temperature": float, "top_p": float, "top_k": int, "min_p": float}
    values: dict[str, Any] = {
        name: kind(generation_config[name])
        for name, kind in {**kinds, "repetition_penalty": float}.items()
        if generation_config.get(name) is not None
    }
    do_sample = generation_config.get("do_sample")
    from_model = do_sample is not None or bool(kinds.keys() & values.keys())
    if do_sample is False:
        values["temperature"] = 0.0
    elif from_model:
        values.setdefault("temperature", 1.0)
    else:
        values = {**OURS, **values}
    sampling = Sampling(**values, max_tokens=MAX_TOKENS, stop_repetition=STOP_REPETITION)
    if (problem := sampling.problem()) is not None:
        raise ValueError(" ".join(problem))
    return DefaultSampling(sampling, from_model)


def parameter_of(each: Field[Any]) -> Parameter:
    """Return the `Parameter` of a field of `Sampling`."""
    found: Parameter = each.metadata["parameter"]
    return found


NUMBERS = tuple(
    (each.name, parameter_of(each))
    for each in fields(Sampling)
    if parameter_of(each).high < math.inf
)
# The types are compared as text, because annotations are strings in this module.
FLOATS = tuple(each.name for each in fields(Sampling) if each.type == "float")
INTEGERS = tuple(each.name for each in fields(Sampling) if each.type == "int")


class SamplingOptions(TypedDict, total=False):
    # The fields are for type checkers. The docstring is made from the fields of `Sampling` below.

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    top_n_sigma: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    max_tokens: int | None
    min_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    stop_repetition: int | None
    logprobs: int | None
    logit_bias: Mapping[int, float] | None


SAMPLING_HELP = "".join(
    f"{each.name}: {parameter_of(each).help}; {parameter_of(each).bounds}.\n"
    for each in fields(Sampling)
)
SamplingOptions.__doc__ = (
    "Sampling values of a reply. A value that is missing or None has the daemon's default.\n\n"
    f"Attributes:\n{indent(SAMPLING_HELP, '    ')}"
)
