"""Convert text to tokens and back, exactly. Needs no torch.

    messages ──ChatTemplate──> TemplateText ──Tokenizer──> ids of each message, to append to the log
    sampled ids ──Detokenizer──> text ──StopMatcher──> text that may be sent
                                      ──ReplyPieces──> thinking, text, tool calls

`Tokenizer` reads a folder in the Hugging Face layout. `ChatTemplate` turns new messages into the tokens
that follow a log, without reading the log. `TemplateText` keeps a client's text from becoming control
tokens. `probe` finds what a template would change in earlier turns if it rendered these turns again.
"""

from pensieve.text.detokenizer import Detokenizer
from pensieve.text.message import Message, TemplateSetting, ToolCall
from pensieve.text.parts import Part, PartMarker
from pensieve.text.reply_pieces import ReplyPieces, Text, Thinking
from pensieve.text.stop import StopMatcher
from pensieve.text.template import ChatTemplate
from pensieve.text.template_probe import TemplateReport, probe
from pensieve.text.template_text import TemplateText
from pensieve.text.tokenizer import Tokenizer
from pensieve.text.tool_calls import CallArguments, CallBegan, CallStyle, style_named, style_of

__all__ = [
    "CallArguments",
    "CallBegan",
    "CallStyle",
    "ChatTemplate",
    "Detokenizer",
    "Message",
    "Part",
    "PartMarker",
    "ReplyPieces",
    "StopMatcher",
    "TemplateReport",
    "TemplateSetting",
    "TemplateText",
    "Text",
    "Thinking",
    "Tokenizer",
    "ToolCall",
    "probe",
    "style_named",
    "style_of",
]
