"""Text to tokens and back, exactly; no torch.

    messages ──ChatTemplate──> Traced text ──Tokenizer──> Delta: ids that are appended to the log
    sampled ids ──Detokeniser──> text ──StopMatcher──> text that may be sent

`Tokenizer` is a folder in the Hugging Face layout, `ChatTemplate` turns new messages into the tokens
that follow a log without looking at the log, `Traced` is what makes user text harmless, and `probe` says
what a template would do to earlier turns if it were let.
"""

from pensieve.text.detokenizer import Detokeniser
from pensieve.text.message import Message, Setting, ToolCall
from pensieve.text.parts import Part, PartMarker
from pensieve.text.stop import StopMatcher
from pensieve.text.template import ChatTemplate, Delta
from pensieve.text.template_probe import TemplateReport, probe
from pensieve.text.tokenizer import Tokenizer
from pensieve.text.traced import Traced

__all__ = [
    "ChatTemplate",
    "Delta",
    "Detokeniser",
    "Message",
    "Part",
    "PartMarker",
    "Setting",
    "StopMatcher",
    "TemplateReport",
    "Tokenizer",
    "ToolCall",
    "Traced",
    "probe",
]
