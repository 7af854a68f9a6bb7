"""Anthropic's Messages API as values: bodies in, answers and events out; no network, no clock, nothing kept.

    body ──parse────────> Request (that of service/openai) ──> template, tokenizer, engine
                                                                       │
    body   <──message──────── pieces of the reply  <───────────────────┤
    events <──MessageStream── pieces as they come  <───────────────────┘

`content` reads messages and their blocks, `request` the parameters; `answer` writes blocks, `stream` the
events that a client puts together to the same blocks, and `errors` what went wrong.  A Request does not say
whose API it came by: what is behind it serves both.
"""

from pensieve.service.anthropic.answer import Ending, ending_of, message, stopped_by
from pensieve.service.anthropic.errors import error_body
from pensieve.service.anthropic.request import UNSUPPORTED_THREAD, parse, parse_count
from pensieve.service.anthropic.stream import MessageStream

__all__ = [
    "UNSUPPORTED_THREAD",
    "Ending",
    "MessageStream",
    "ending_of",
    "error_body",
    "message",
    "parse",
    "parse_count",
    "stopped_by",
]
