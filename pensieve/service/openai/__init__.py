"""OpenAI's API as values: request bodies in, answers out; no network, no clock, nothing kept.

    line of a Batch file ──read_line──> BatchLine ──┐
    body ──parse──────────────────────────────────> Request ──> template, tokenizer, engine
                                                                          │
    line of the output  <──answer_line──  body  <──answer──  Reply <──────┘

`fields` takes JSON apart; `sampling_fields`, `chat_messages` and `response_items` know the parameters, and
`request` puts them together.
"""

from pensieve.service.openai.answer import Heading, PromptTokens, Reply, answer
from pensieve.service.openai.batch_line import (
    LINE_BYTES_MAX,
    BatchLine,
    LineError,
    answer_line,
    error_line,
    line_error,
    read_line,
)
from pensieve.service.openai.fields import Refusal
from pensieve.service.openai.json_text import one_line, read_json
from pensieve.service.openai.kinds import RequestKind
from pensieve.service.openai.request import Request, Served, parse

__all__ = [
    "LINE_BYTES_MAX",
    "BatchLine",
    "Heading",
    "LineError",
    "PromptTokens",
    "Refusal",
    "Reply",
    "Request",
    "RequestKind",
    "Served",
    "answer",
    "answer_line",
    "error_line",
    "line_error",
    "one_line",
    "parse",
    "read_json",
    "read_line",
]
