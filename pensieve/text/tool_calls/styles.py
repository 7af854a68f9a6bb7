"""Define the call format of each model family, and find the family of a model.

A style defines where in a reply a call may begin, and has a scanner that reads a call from its first
character. A call may begin:

* Anywhere, at a mark. If the mark is a control token of the model, only that token counts (`Part.TOOL_CALL`).
  Text that looks like the mark then begins no call.
* At the start of a section that a control token opened. The token may decode to no text, so the mark may be
  missing from the text.
* At the start of the reply, for families without a mark.

If calls are JSON, a grammar can enforce them (call_grammars.py). The chat template shows which form the
model uses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

from pensieve.errors import InvalidArgument
from pensieve.text.template import ChatTemplate
from pensieve.text.tool_calls.calls import ParsedCalls
from pensieve.text.tool_calls.hermes import FUNCTION, OPENING, hermes
from pensieve.text.tool_calls.llama import PYTHON_TAG, llama
from pensieve.text.tool_calls.mistral import TOOL_CALLS, mistral
from pensieve.text.tool_calls.pythonic import NAME_CHARACTERS, pythonic
from pensieve.text.tool_calls.scan import Scan

PYTHON_MARKS = (
    "<|tool_call_start|>",
    "<|python_start|>",
)  # control tokens of models that use the Python format
ARGUMENTS_MARK = "[ARGS]"  # used by newer Mistral models
PYTHON_PROMPT = "func_name1("  # an example in the templates of models that use the Python format


class CallForm(StrEnum):
    """A form of calls that grammars can enforce."""

    HERMES = "hermes"
    LLAMA = "llama"
    MISTRAL_LIST = "mistral_list"
    MISTRAL_NAMED = "mistral_named"


@dataclass(frozen=True, slots=True)
class CallStyle:
    """The call format of a model family."""

    name: str
    mark: str  # text that begins a call anywhere in a reply; "": no mark
    # possible first characters of a call at the start of a section or reply
    openers: frozenset[str]
    opens_reply: bool  # whether a call may begin the reply without a mark
    scan: Callable[[ParsedCalls, bool], Scan[None]]  # the bool: the call must begin with its mark
    mark_is_token: bool = False  # the mark counts only within Part.TOOL_CALL
    form: CallForm | None = None  # None: no grammar can enforce it


STYLES = {
    each.name: each
    for each in (
        CallStyle("hermes", OPENING, frozenset("<{"), False, hermes),
        CallStyle("llama", "", frozenset("<{"), True, llama),
        CallStyle("mistral", TOOL_CALLS, NAME_CHARACTERS | {"[", "{"}, False, mistral),
        CallStyle("pythonic", "", frozenset("["), True, pythonic),
    )
}
NAMES = ("auto", *STYLES, "none")


def style_of(template: ChatTemplate) -> CallStyle | None:
    """Derive the style of a model from its chat templates and control tokens. None if it is unknown."""
    name = _name_of(template)
    return None if name is None else style_named(name, template)


def style_named(name: str, template: ChatTemplate) -> CallStyle | None:
    """Return the style that a setting names (one of `NAMES`)."""
    if name == "auto":
        return style_of(template)
    if name == "none":
        return None
    if name not in STYLES:
        raise InvalidArgument("tool_calls", f"{name!r} is not one of {', '.join(NAMES)}")
    style = STYLES[name]
    has_token = bool(style.mark) and template.tokenizer.token_id(style.mark) is not None
    return replace(style, mark_is_token=has_token, form=_form_of(name, template))


def _form_of(name: str, template: ChatTemplate) -> CallForm | None:
    if name == "hermes":
        return None if FUNCTION in _source(template) else CallForm.HERMES
    if name == "mistral":
        is_named = _has(template, ARGUMENTS_MARK)
        return CallForm.MISTRAL_NAMED if is_named else CallForm.MISTRAL_LIST
    return CallForm.LLAMA if name == "llama" else None


def _source(template: ChatTemplate) -> str:
    return "\n".join(template.tokenizer.templates.values())


def _has(template: ChatTemplate, mark: str) -> bool:
    return mark in _source(template) or template.tokenizer.token_id(mark) is not None


def _name_of(template: ChatTemplate) -> str | None:
    source, has = _source(template), partial(_has, template)
    if has(OPENING):
        return "hermes"
    if has(TOOL_CALLS):
        return "mistral"
    if PYTHON_PROMPT in source or any(map(has, PYTHON_MARKS)):
        return "pythonic"
    if has(PYTHON_TAG) or ('"parameters": ' in source and "tool_calls" in source):
        return "llama"
    return None
