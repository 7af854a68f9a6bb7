"""Calls of tools in a reply, in the forms that families of models write them.

    CallStyle ─┐
    text ──> CallFinder ──> text, CallBegan, CallArguments      as they come
                 │ sends each character to
             a style's scanner: hermes, llama, mistral, pythonic
                 │ reads with json_call, json_values, values; reports to
             Calls: the calls of the reply

All is written by hand: no regular expression, no evaluation, no recursion.  A reply costs time in
proportion to its length, whatever is in it, and a bounded part of it is withheld.
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
