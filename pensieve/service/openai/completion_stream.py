"""A text completion as it comes: chunks, each with the text that is new of one choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pensieve.core.turn import FinishReason
from pensieve.service.openai.answer import (
    ID_PREFIXES,
    Heading,
    PromptTokens,
    Reply,
    logprob_columns,
    logprob_rows,
    usage_of,
)
from pensieve.service.openai.request import Request
from pensieve.text.tokenizer import Tokenizer


class CompletionStream:
    def __init__(self, request: Request, heading: Heading, tokenizer: Tokenizer) -> None:
        self._request, self._heading, self._tokenizer = request, heading, tokenizer
        self._num_characters: dict[int, int] = {}  # that were sent, by choice

    def chunk(self, choice: int, tokens: Reply) -> dict[str, Any]:
        """For some of a choice's tokens; their parts do not count."""
        sent = self._num_characters.get(choice, 0)
        text, logprobs = "".join(tokens.texts), None
        if self._request.sampling.logprobs is not None:
            rows = logprob_rows(tokens, self._tokenizer, is_first=not sent)
            logprobs = logprob_columns(rows, sent)
        self._num_characters[choice] = sent + len(text)
        return self._chunk(choice, text, logprobs=logprobs)

    def end(self, choice: int, finish: FinishReason) -> dict[str, Any]:
        return self._chunk(choice, "", finish.value)

    def usage(self, replies: Sequence[Reply], prompt: PromptTokens) -> dict[str, Any]:
        return {**self._head(), "choices": [], "usage": usage_of(replies, prompt)}

    def _chunk(
        self,
        choice: int,
        text: str,
        finish_reason: str | None = None,
        *,
        logprobs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        one = {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        usage = {"usage": None} if self._request.include_usage else {}
        return {**self._head(), "choices": [one], **usage}

    def _head(self) -> dict[str, Any]:
        heading = self._heading
        return {
            "id": ID_PREFIXES[self._request.kind] + heading.answer_id,
            "object": "text_completion",
            "created": heading.created,
            "model": heading.model,
            "system_fingerprint": None,
        }
