"""Find tool calls in a reply, in the formats of several model families.

    CallStyle ─┐
    text ──> CallFinder ──> text, CallBegan, CallArguments      streamed
                 │ sends each character to
             a style's scanner: hermes, llama, mistral, pythonic
                 │ reads with json_call, json_values, values; reports to
             ParsedCalls: the calls of the reply

The scanners use no regular expressions, no evaluation and no recursion. The time for a reply is proportional
to its length, for any content. Only a bounded part of a reply is withheld.
"""

from pensieve.text.tool_calls.calls import CallArguments, CallBegan, ParsedCall
from pensieve.text.tool_calls.finder import CallFinder
from pensieve.text.tool_calls.styles import NAMES, STYLES, CallStyle, style_named, style_of

__all__ = [
    "NAMES",
    "STYLES",
    "CallArguments",
    "CallBegan",
    "CallFinder",
    "CallStyle",
    "ParsedCall",
    "style_named",
    "style_of",
]
