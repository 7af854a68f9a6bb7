"""Grammars for llguidance. They make a reply call tools in the form that a family of models uses.

    form            a reply with calls
    hermes          text <tool_call> {"name": …, "arguments": …} </tool_call> text …
    llama           {"name": …, "parameters": …}; {"name": …, …}        at the start of the reply
    mistral_list    text [TOOL_CALLS] [{"name": …, "arguments": …}, {…}]
    mistral_named   text [TOOL_CALLS]name[ARGS]{…}[TOOL_CALLS]name[ARGS]{…}

The input is JSON:

    form      one of the forms above
    tools     the tools that may be called, each with `name`, `schema` (null: any object), and `is_lenient`
              (ignore keywords of the schema that cannot be enforced)
    must      the reply must be a call
    single    the reply has at most one call
    reply     kind and text of a constraint on a reply without calls, or null

**Marks.** A mark is the text or control token that starts a call, such as `<tool_call>`. Text is free until a
mark. After a mark, only a call of these tools can follow. If the mark is a control token, text that looks
like the mark stays text (see tool_calls/styles.py). Llama's form has no mark: the first character of the
reply decides between call and text. In some forms, no closing mark ends the calls. In these forms, no text
can follow a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pensieve.text.tool_calls.calls import NAME_CHARACTERS_MAX
from pensieve.text.tool_calls.hermes import CLOSING, OPENING
from pensieve.text.tool_calls.llama import PYTHON_TAG
from pensieve.text.tool_calls.mistral import TOOL_CALLS
from pensieve.text.tool_calls.styles import ARGUMENTS_MARK, CallForm

OWN_TERMS = r"""
TEXT: /(.|\n)*/
UNMARKED: /[\s\x1c-\x1f]*([^{<\s\x1c-\x1f](.|\n)*|<([^|](.|\n)*)?)?/
GAP: /[ \t\r\n]{0,8}/
W: /[ ]?(\n[ ]{0,20})?/
"""  # UNMARKED: text that cannot begin a call in Llama's form

RuleOf = Callable[[str, str], str]  # from a kind and its text to the right side of a rule
SchemaRule = Callable[[Mapping[str, Any], bool], str]  # from a schema and whether it is lenient


def calls_grammar(
    text: str, token_id: Callable[[str], int | None], rule_of: RuleOf, schema_rule: SchemaRule
) -> str:
    """Return the grammar in Lark syntax. Raises ValueError if a tool cannot be called in this form."""
    wanted = json.loads(text)
    return _Grammar(wanted, token_id, rule_of, schema_rule).text()


class _Grammar:
    def __init__(
        self,
        wanted: Mapping[str, Any],
        token_id: Callable[[str], int | None],
        rule_of: RuleOf,
        schema_rule: SchemaRule,
    ) -> None:
        self._form = CallForm(wanted["form"])
        self._tools: Sequence[Mapping[str, Any]] = wanted["tools"]
        self._must, self._single = bool(wanted["must"]), bool(wanted["single"])
        self._reply = wanted["reply"]
        self._token_id = token_id
        self._rule_of, self._schema_rule = rule_of, schema_rule
        self._rules: list[str] = []

    def text(self) -> str:
        if self._form is CallForm.LLAMA:
            free, calls = "UNMARKED", self._llama()
        elif self._form is CallForm.HERMES:
            free, calls = self._marked(OPENING, self._hermes(), may_repeat=True)
        elif self._form is CallForm.MISTRAL_NAMED:
            free, calls = self._marked(TOOL_CALLS, self._named(), may_repeat=True)
        else:
            free, calls = self._marked(TOOL_CALLS, self._list(), may_repeat=False)
        self._rule("calls", calls)
        start = "calls"
        if not self._must:
            if self._reply is not None:
                free = self._rule("form", self._rule_of(*self._reply))
            start = f"calls | {free}"
        return "\n".join([f"start: {start}", *self._rules, OWN_TERMS])

    def _marked(self, mark: str, call: str, *, may_repeat: bool) -> tuple[str, str]:
        """Return rules for free text and for calls, in a form whose calls begin with a mark."""
        many = may_repeat and not self._single
        excludes_text = self._must or self._reply is not None
        mark_id, call = self._token_id(mark), self._rule("call", call)
        if mark_id is not None:
            free, first = "TEXT", f"{'GAP' if excludes_text else 'TEXT'} <[{mark_id}]> {call}"
            more = f"GAP <[{mark_id}]> {call}"
        else:
            free = self._rule("LAST", f"TEXT & ~/(.|\\n)*{_escaped(mark)}(.|\\n)*/")
            again = self._rule("AGAIN", f"GAP {_literal(mark)}")
            head = self._rule("head[lazy]", f"TEXT {_literal(mark)}").removesuffix("[lazy]")
            first = f"{again if excludes_text else head} {call}"
            more = f"{again} {call}"
        if not many:
            return free, f"{first} GAP"
        if excludes_text or not self._is_closed:
            return free, f"{first} ({more})* GAP"
        return free, f"({first})+ {free}"

    @property
    def _is_closed(self) -> bool:
        """Whether text may follow a call.

        False if the opening mark is a control token and the closing mark is not. The call is then in a part
        of the reply (parts.py) that only a control token can close.
        """
        if self._form is not CallForm.HERMES:
            return False
        return self._token_id(OPENING) is None or self._token_id(CLOSING) is not None

    def _hermes(self) -> str:
        return f"{self._object('arguments')} {self._mark(CLOSING)}"

    def _llama(self) -> str:
        call = self._object("parameters")
        more = "" if self._single else f' (";" {call})*'
        tag = self._token_id(PYTHON_TAG)
        return f"{'' if tag is None else f'(<[{tag}]>)? '}{call}{more}"

    def _list(self) -> str:
        call = self._object("arguments")
        more = "" if self._single else f' ("," {call})*'
        opening = self._rule("OPEN_LIST", 'GAP "["')
        return f'{opening} {call}{more} "]"'

    def _named(self) -> str:
        choices = []
        for number, tool in enumerate(self._tools):
            name = tool["name"]
            if re.search(r"[\s\[{]", name) or not 1 <= len(name) <= NAME_CHARACTERS_MAX:
                raise ValueError(f"this model cannot write a call of {name[:80]!a}")
            choices.append(
                f"{_literal(name)} {self._mark(ARGUMENTS_MARK)} {self._arguments(number)}"
            )
        return f"({' | '.join(choices)})"

    def _object(self, member: str) -> str:
        """Return a rule for a call that is a JSON object, with the white space around the object."""
        choices = []
        for number, tool in enumerate(self._tools):
            name, key = json.dumps(tool["name"], ensure_ascii=False), json.dumps(member)
            parts = ('GAP "{" W "\\"name\\"" W ":" W', _literal(name), 'W "," W', _literal(key))
            begin = self._rule(f"BEGIN_{number}", f'{" ".join(parts)} W ":" W')
            choices.append(f"{begin} {self._arguments(number)}")
        end = self._rule("END", 'W "}" GAP')
        return self._rule("object", f"({' | '.join(choices)}) {end}")

    def _arguments(self, number: int) -> str:
        tool = self._tools[number]
        schema = {"type": "object"} if tool["schema"] is None else tool["schema"]
        return self._rule(f"arguments_{number}", self._schema_rule(schema, tool["is_lenient"]))

    def _mark(self, mark: str) -> str:
        mark_id = self._token_id(mark)
        return _literal(mark) if mark_id is None else f"<[{mark_id}]>"

    def _rule(self, name: str, right_side: str) -> str:
        self._rules.append(f"{name}: {right_side}")
        return name


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    """Escape the text for a regular expression between slashes."""
    return re.escape(text).replace("/", "\\/")
