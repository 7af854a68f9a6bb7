"""How a turn's tokens are chosen: the sampling options as plain values, and their bounds.

`Sampling` is checked where it enters (service, CLI) by `problem`, which names the field; the
engine and the sampler do not check it again.  A temperature of 0 is greedy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

STOP_STRINGS_MAX = 16
STOP_STRING_CHARACTERS_MAX = 128
LOGIT_BIAS_MAX = 1024
LOGPROBS_MAX = 20
STOP_TOKEN_IDS_MAX = 64


@dataclass(frozen=True, slots=True)
class Sampling:
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over the whole context, as in transformers
    presence_penalty: float = 0.0  # over this reply
    frequency_penalty: float = 0.0  # over this reply
    seed: int = 0
    max_tokens: int = 512
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # how many alternatives to report beside the sampled one
    logit_bias: tuple[tuple[int, float], ...] = ()

    def problem(self, vocab_size: int | None = None) -> tuple[str, str] | None:
        """The first (field, problem) for which these values are refused, or None."""
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, float) and not math.isfinite(value):
                return each.name, "must be finite"
        checks: tuple[tuple[str, bool, str], ...] = (
            ("temperature", 0.0 <= self.temperature <= 100.0, "must lie in 0..100"),
            ("top_p", 0.0 < self.top_p <= 1.0, "must lie in (0, 1]"),
            ("top_k", 0 <= self.top_k < 2**31, "must be 0 (no limit) or positive"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "must lie in 0..1"),
            (
                "repetition_penalty",
                0.01 <= self.repetition_penalty <= 100.0,
                "must lie in 0.01..100",
            ),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "must lie in -2..2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "must lie in -2..2"),
            ("seed", 0 <= self.seed < 2**64, "must lie in 0..2^64-1"),
            ("max_tokens", 1 <= self.max_tokens < 2**31, "must be at least 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "must lie in 0..max_tokens"),
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
                "logprobs",
                self.logprobs is None or 0 <= self.logprobs <= LOGPROBS_MAX,
                f"must lie in 0..{LOGPROBS_MAX}",
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
