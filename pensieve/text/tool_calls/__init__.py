"""Find tool calls in a reply, in the forms that families of models write them.

    CallStyle ─┐
    text ──> CallFinder ──> text, CallBegan, CallArguments      as they come
                 │ sends each character to
             a style's scanner: hermes, llama, mistral, pythonic
                 │ reads with json_call, json_values, values; reports to
             ParsedCalls: the calls of the reply

The scanners use no regular expression, no evaluation and no recursion. A reply costs time in proportion to
its length, whatever it contains, and a bounded part of it is withheld.
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
