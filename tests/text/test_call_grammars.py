"""A grammar allows only whole calls of the given tools, in the form of each family, and leaves text free."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import pytest

from pensieve.text import ChatTemplate, PartMarker, ReplyPieces, style_named
from pensieve.text.grammars import GrammarError, Grammars, Matcher
from pensieve.text.tool_calls.styles import CallForm
from tests.conversations.schemas import is_valid, random_root_schema
from tests.text.families import LLAMA_3, MISTRAL, QWEN_3, template_of
from tests.text.world import template_with

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
CALL = '{"name": "get", "arguments": {"city": "Oslo"}}'
PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}{% endfor %}"


@cache
def template(name: str) -> ChatTemplate:
    """Return the template of a family, or one without control tokens for calls."""
    families = {"hermes": QWEN_3, "llama": LLAMA_3, "mistral": MISTRAL}
    if name in families:
        return template_of(families[name])
    if name == "named":
        return template_with(PLAIN, special=("<s>", "[TOOL_CALLS]", "[ARGS]", "</s>"))
    if name == "half marked":  # a marker opens a call, but none closes it
        return template_with(PLAIN, plain=("<tool_call>",))
    return template_with(PLAIN + ("{# [ARGS] #}" if name == "plain named" else ""))


WRITTEN = {  # one call, and two calls, in each form
    "hermes": ("<tool_call>\n" + CALL + "\n</tool_call>", "\n"),
    "plain hermes": ("<tool_call>" + CALL + "</tool_call>", "\n"),
    "half marked": ("<tool_call>" + CALL + "</tool_call>", "\n"),
    "llama": (CALL.replace("arguments", "parameters"), "; "),
    "mistral": ("[TOOL_CALLS] [" + CALL + "]", None),
    "plain mistral": ("[TOOL_CALLS][" + CALL + "]", None),
    "named": ('[TOOL_CALLS]get[ARGS]{"city": "Oslo"}', ""),
    "plain named": ('[TOOL_CALLS]get[ARGS]{"city": "Oslo"}', ""),
}


def style_for(name: str) -> Any:
    kind = next((each for each in ("hermes", "llama", "mistral") if each in name), "mistral")
    return style_named("hermes" if name == "half marked" else kind, template(name))


def a_tool(name: str, schema: Any = CITY, is_lenient: bool = False) -> dict[str, Any]:
    return {"name": name, "schema": schema, "is_lenient": is_lenient}


def matcher(
    name: str,
    *,
    must: bool = False,
    single: bool = False,
    tools: Any = (),
    reply: Any = None,
) -> Matcher:
    asked = {
        "form": style_for(name).form,
        "tools": [*tools] or [a_tool("get"), a_tool("set", None)],
        "must": must,
        "single": single,
        "reply": reply,
    }
    return Grammars(template(name).tokenizer).compile("tool_calls", json.dumps(asked))


def allowed(held: Matcher, name: str) -> list[int]:
    mask, tokenizer = held.mask(), template(name).tokenizer
    return [
        each
        for each in range(tokenizer.vocab_size)
        if mask[each >> 3] >> (each & 7) & 1 and each not in tokenizer.eos_token_ids
    ]


def takes(held: Matcher, name: str, text: str) -> bool:
    """Return whether the grammar accepts the text, with its control tokens, as a whole reply."""
    for token_id in template(name).tokenizer.encode_literal(text):
        if token_id not in allowed(held, name):
            return False
        held.consume(token_id)
    return held.is_accepting


@pytest.mark.parametrize("name", WRITTEN)
def test_an_optional_call_may_appear_and_text_may_stay_text(name: str) -> None:
    call, between = WRITTEN[name]
    for text in ("", "Hello.", "  \n", "I <b>say</b> [this] {so}.", call, f"\n\n{call}"):
        assert takes(matcher(name), name, text), text
    several = not name.endswith("mistral")
    if several:
        assert takes(matcher(name), name, f"{call}{between}{call}")
        assert not takes(matcher(name, single=True), name, f"{call}{between}{call}")
    if name != "llama":
        assert takes(matcher(name), name, f"I look. {call}")
        assert takes(matcher(name, single=True), name, f"I look. {call}")


@pytest.mark.parametrize("name", WRITTEN)
def test_a_required_call_is_the_whole_reply(name: str) -> None:
    call, between = WRITTEN[name]
    for single in (True, False):
        held = {"must": True, "single": single}
        assert takes(matcher(name, **held), name, call)
        assert takes(matcher(name, **held), name, f"\n\n{call}")
        for text in ("", "Hello.", f"I look. {call}", f"{call} bye"):
            assert not takes(matcher(name, **held), name, text), text
        if between is not None:
            assert takes(matcher(name, **held), name, f"{call}{between}{call}") != single


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("must", [True, False])
def test_calls_that_match_no_tool_are_not_allowed(name: str, must: bool) -> None:
    call, _ = WRITTEN[name]
    for wrong in (
        call.replace("city", "town"),
        call.replace('"Oslo"', "5"),
        call.replace("get", "got"),
        call.replace('{"city": "Oslo"}', "{}"),
        call[:-1],
    ):
        assert not takes(matcher(name, must=must), name, wrong), wrong
    free = call.replace("get", "set").replace('"Oslo"', '[1, {"x": null}]')
    assert takes(matcher(name, must=must), name, free)


def test_text_may_follow_only_calls_with_a_closing_marker() -> None:
    for name, may in (("hermes", True), ("plain hermes", True), ("half marked", False)):
        call, _ = WRITTEN[name]
        assert takes(matcher(name), name, f"One. {call} Two. {call} Three.") == may
        assert not takes(matcher(name, single=True), name, f"{call} Two.")
    for name in ("named", "mistral", "llama"):
        assert not takes(matcher(name), name, f"{WRITTEN[name][0]} Two.")


def test_a_marker_that_is_a_control_token_may_be_written_as_text() -> None:
    held = matcher("hermes")
    for token_id in template("hermes").tokenizer.encode_text("The word <tool_call> is text."):
        assert token_id in allowed(held, "hermes")
        held.consume(token_id)
    assert held.is_accepting


def test_a_reply_matches_the_reply_grammar_or_is_calls() -> None:
    form = ["json_schema", '{"const": "yes"}']
    call, _ = WRITTEN["hermes"]
    for text, may in (('"yes"', True), ("yes", False), (call, True), (f'"yes"{call}', False)):
        assert takes(matcher("hermes", reply=form), "hermes", text) == may
    for kind, text in (("json_object", ""), ("regex", "[0-9]+"), ("choice", '["1", "2"]')):
        held = matcher("hermes", reply=[kind, text])
        assert takes(held, "hermes", '{"a": 1}' if kind == "json_object" else "1")
        assert takes(matcher("hermes", reply=[kind, text]), "hermes", call)


def test_a_lenient_schema_is_enforced_as_far_as_possible() -> None:
    schema = {**CITY, "not": {"required": ["town"]}}
    with pytest.raises(GrammarError, match="not"):
        matcher("hermes", must=True, tools=[a_tool("get", schema)])
    held = matcher("hermes", must=True, tools=[a_tool("get", schema, is_lenient=True)])
    assert takes(held, "hermes", WRITTEN["hermes"][0])


def test_each_schema_has_separate_definitions() -> None:
    def tool(name: str, kind: str) -> dict[str, Any]:
        inner = {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["x"]}
        return a_tool(name, {**inner, "$defs": {"a": {"type": kind}}})

    tools = [tool("one", "integer"), tool("two", "boolean")]
    for name, value, may in (("one", "5", True), ("two", "5", False), ("two", "true", True)):
        text = f'<tool_call>{{"name": "{name}", "arguments": {{"x": {value}}}}}</tool_call>'
        assert takes(matcher("hermes", must=True, tools=tools), "hermes", text) == may


def test_a_tool_name_that_the_call_form_cannot_write_is_refused() -> None:
    for name in ("a b", "a[b", "", "x" * 300):
        with pytest.raises(GrammarError, match="cannot write a call"):
            matcher("named", tools=[a_tool(name)])
    odd = 'say "hi" / \\ größe'
    text = "<tool_call>" + json.dumps({"name": odd, "arguments": {}}, ensure_ascii=False)
    assert takes(matcher("hermes", tools=[a_tool(odd, None)]), "hermes", text + "</tool_call>")


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("single", [True, False])
def test_randomly_sampled_replies_are_read_as_calls_that_match_the_schemas(
    name: str, single: bool
) -> None:
    """The grammar and the reader of replies agree. Tokens are random, as from a very unsure model."""
    chance, num_calls = random.Random(f"{name} {single}"), 0
    texts, style = template(name), style_for(name)
    for _ in range(6):
        schemas = {each: random_root_schema(chance) for each in ("first", "second")}
        tools = [a_tool(each, schema) for each, schema in schemas.items()]
        held = matcher(name, must=True, single=single, tools=tools)
        ids: list[int] = []
        for _ in range(600):
            if held.is_accepting and (single or chance.random() < 0.2):
                break
            left = allowed(held, name)
            if not left:
                break
            ids.append(chance.choice(left))
            held.consume(ids[-1])
        if not held.is_accepting:
            continue
        shown = [{"name": each, "parameters": schema} for each, schema in schemas.items()]
        cutter, marker = ReplyPieces(style, shown), PartMarker(texts.tokenizer)
        bytes_of = [(each, texts.tokenizer.piece(each, first=False)) for each in ids]
        said = [
            ("" if texts.tokenizer.is_silent(each) else piece.decode("utf-8", "replace"))
            for each, piece in bytes_of
        ]
        parts = [marker.push(each) for each in ids]
        whole = _joined(bytes_of, parts, texts)
        for text, part in whole:
            cutter.push(text, part)
        cutter.end()
        assert cutter.ends_with_call, said
        assert len(cutter.calls) == cutter.num_calls > 0
        assert not single or cutter.num_calls == 1
        for call in cutter.calls:
            assert is_valid(call.arguments, schemas[call.name])
        num_calls += cutter.num_calls
    assert num_calls >= 2


def _joined(bytes_of: Any, parts: Any, texts: ChatTemplate) -> list[tuple[str, Any]]:
    """Join neighbouring pieces of one part, so that characters of several tokens are whole."""
    runs: list[tuple[bytes, Any]] = []
    for (token_id, piece), part in zip(bytes_of, parts, strict=True):
        shown = b"" if texts.tokenizer.is_silent(token_id) else piece
        if runs and runs[-1][1] is part:
            runs[-1] = (runs[-1][0] + shown, part)
        else:
            runs.append((shown, part))
    return [(run.decode(), part) for run, part in runs]


def test_the_call_form_follows_from_the_template() -> None:
    assert style_for("hermes").form is CallForm.HERMES
    assert style_for("llama").form is CallForm.LLAMA
    assert style_for("mistral").form is CallForm.MISTRAL_LIST
    assert style_for("named").form is CallForm.MISTRAL_NAMED
    pythonic = style_named("pythonic", template("hermes"))
    assert pythonic is not None
    assert pythonic.form is None
    coder = style_named("auto", template_with(PLAIN + "{# <tool_call>\n<function=name> #}"))
    assert coder is not None
    assert coder.name == "hermes"
    assert coder.form is None
